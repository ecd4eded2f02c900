"""Finding the rows of an NVMe slab again from their headers alone, when its journal is of no use.

Reads every header through the I/O engine, believes none that is not sound and in its own place, and lets the highest
generation win. A torn row among them fails its verification later; one that was dropped while it was sound is found
again. Used by shelves.py.
"""

from __future__ import annotations

import functools
import logging
import time

from kvtier.errors import ShelfError
from kvtier.io.base import IoEngine, IoRequest, Operation
from kvtier.record import Record
from kvtier.tiers.header import HEADER_BYTES, RowFormat, parse_header
from kvtier.tiers.memory import AlignedPages
from kvtier.tiers.slab import Slab

log = logging.getLogger(__name__)

POLL_S = 0.001
SILENT_S = 30.0
"""A disk that gives no header for so long is given up."""
_BLANK = bytes(HEADER_BYTES)


def scan_headers(slab: Slab, form: RowFormat, engine: IoEngine, in_flight_max: int) -> list[Record]:
    """Records of all sound headers of this geometry, of whatever namespace. Waits; the engine must be idle.

    Raises ShelfError if the disk gives nothing for `SILENT_S`.
    """
    pages = AlignedPages(in_flight_max)
    taken: dict[int, memoryview] = {}
    found: list[Record] = []
    refused_count = 0
    following = 0
    moved_at = time.monotonic()
    while following < slab.slot_count or taken:
        requests: list[IoRequest] = []
        room = min(len(pages), engine.room(Operation.READ), slab.slot_count - following)
        for slot in range(following, following + room):
            taken[slot] = page = pages.take()
            then = functools.partial(_examine, page)
            requests.append(IoRequest(Operation.READ, slab.descriptor, slab.offset(slot), (page,), slot, then=then))
        following += room
        assert engine.submit(requests) == room
        results = engine.poll()
        for result in results:
            pages.give(taken.pop(result.tag))
            if isinstance(result.value, tuple):
                record, written = result.value
                if record.slot == result.tag and (written.row_bytes, written.slice_bytes) == _lengths(form):
                    found.append(record)
                    continue
            refused_count += result.value is not None or result.error_number is not None
        if results:
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > SILENT_S:
            raise ShelfError(f"the NVMe slab is being rebuilt and its disk has given nothing for {SILENT_S:g} s")
        else:
            time.sleep(POLL_S)
    if refused_count:
        log.warning("NVMe: %d row headers are damaged, misplaced or cannot be read", refused_count)
    return found


def _examine(page: memoryview) -> tuple[Record, RowFormat] | bool | None:
    """Worker: what a header says, False if it is damaged, None if nothing was ever written there."""
    parsed = parse_header(page)
    return parsed if parsed is not None or page == _BLANK else False


def _lengths(form: RowFormat) -> tuple[int, int]:
    return form.row_bytes, form.slice_bytes
