"""Finding the rows of an NVMe slab again from their headers alone, when its journal is of no use.

Reads every header through the I/O engine, believes none that is not sound and in its own place, and lets the highest
generation win. What it finds wrongly (a dropped row, a torn one) fails its verification later. Used by shelves.py.
"""

from __future__ import annotations

import functools
import time

from kvtier.io.base import IoEngine, IoRequest, Operation
from kvtier.record import Record
from kvtier.tiers.header import RowFormat, parse_header
from kvtier.tiers.memory import AlignedPages
from kvtier.tiers.slab import Slab

POLL_S = 0.001


def scan_headers(slab: Slab, form: RowFormat, engine: IoEngine, in_flight_max: int) -> list[Record]:
    """Records of all sound headers of this geometry, of whatever namespace. Waits; the engine must be idle."""
    pages = AlignedPages(in_flight_max)
    taken: dict[int, memoryview] = {}
    found: list[Record] = []
    following = 0
    while following < slab.slot_count or taken:
        requests: list[IoRequest] = []
        room = min(len(pages), engine.room(Operation.READ), slab.slot_count - following)
        for slot in range(following, following + room):
            taken[slot] = page = pages.take()
            then = functools.partial(parse_header, page)
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
        if not results:
            time.sleep(POLL_S)
    return found


def _lengths(form: RowFormat) -> tuple[int, int]:
    return form.row_bytes, form.slice_bytes
