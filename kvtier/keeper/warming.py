"""Brings the hottest rows of NVMe into free slots of DRAM, as an engine of no model would.

Joins the keeper with a number and locks of its own, so that whatever becomes of this process is cleaned up like an
engine's. Reads each row, checks it, writes it with a header for its new slot, publishes it. Called by the command line.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ShelfError
from kvtier.eviction import LeastRecentlyUsed
from kvtier.keeper.desk import Desk
from kvtier.keeper.fields import as_claims, as_rows, pieces
from kvtier.keeper.operator_line import ANSWER_S, Line
from kvtier.keeper.operator_wire import LayoutView
from kvtier.keeper.seat import Seat
from kvtier.keeper.spawn import knock
from kvtier.keeper.wire import (
    DRAM,
    ENGINE_DECODER,
    NVME,
    Abandon,
    Drop,
    Farewell,
    Granted,
    Join,
    Publish,
    Published,
    Refused,
    Reserve,
    ToEngine,
    Welcome,
)
from kvtier.record import Grant, Record
from kvtier.terms import STANDARD
from kvtier.tiers.header import HEADER_BYTES, RowFormat, Verdict, check_row, pack_header, parse_header

BATCH_ROWS = 16
Kind = TypeVar("Kind")


@dataclass(slots=True)
class Warmed:
    """What became of the rows that were to be brought."""

    moved: int = 0
    there: int = 0
    """Somebody else had brought it by then."""
    bad: int = 0
    """Not what its record says: dropped from NVMe."""
    unreadable: int = 0
    refused: int = 0
    """No slot for it: DRAM is full, or its tenant's quota is; or the slot could not be written whole."""
    evicted: int = 0
    """Rows that went from DRAM for those that came."""

    @property
    def ended(self) -> int:
        """Rows that were dealt with."""
        return self.moved + self.there + self.bad + self.unreadable + self.refused


def hottest(desk: Desk, layout: str, count: int) -> list[Record]:
    """Up to `count` rows of NVMe that are not in DRAM: higher priority, then more uses, then later ones come first."""
    there = {record.block_hash for page in desk.rows(layout, DRAM) for record in page.rows}
    ranked = (
        ((-record.priority, -uses, idle_s, record.depth, record.block_hash), record)
        for page in desk.rows(layout, NVME)
        for record, uses, idle_s in zip(page.rows, page.uses, page.idle_s, strict=False)
        if record.block_hash not in there
    )
    return [record for _, record in heapq.nsmallest(count, ranked, key=lambda pair: pair[0])]


def warmed(desk: Desk, layout: LayoutView, records: Sequence[Record], evicts: bool, counts: Warmed) -> Iterator[int]:
    """Bring these rows, in this order, and count what becomes of them; yields how many have ended since.

    Without `evicts` it stops at the first row that had to go: others have taken the free slots meanwhile.
    """
    if not records:
        return
    guest = Guest(desk, layout)
    try:
        for tenant, same in itertools.groupby(records, key=lambda record: record.tenant):
            for piece in pieces(same, BATCH_ROWS):
                before = counts.ended
                if counts.evicted and not evicts:
                    counts.refused += len(piece)
                else:
                    guest.bring(piece, tenant, counts)
                yield counts.ended - before
    finally:
        guest.close()


class Guest:
    """An engine's place at the keeper, taken for a while to write rows."""

    def __init__(self, desk: Desk, layout: LayoutView) -> None:
        """Join. ShelfError: there is no keeper, or it has no place."""
        link = knock(desk.cache.top)
        if link is None:
            raise ShelfError("the keeper has gone meanwhile, and DRAM with it")
        self._line: Line[ToEngine] = Line(link, ENGINE_DECODER)
        self._form = RowFormat(bytes(32), layout.row_bytes, layout.slice_bytes)
        cache, policy = CacheDirectory(desk.path, None), LeastRecentlyUsed.name
        self._seat = Seat(cache, layout.name, self._form, (0, 0), policy, (STANDARD, STANDARD))
        self._number = 0
        memory = memoryview(mmap.mmap(-1, self._form.slot_bytes))
        self._buffer = [memory[:HEADER_BYTES], memory[HEADER_BYTES:]]
        try:
            self._line.say(self._seat.greeting()[0])
            welcome = self._line.hear()
            if not isinstance(welcome, Welcome):
                reason = welcome.reason if isinstance(welcome, Refused) else "no welcome"
                raise ShelfError(f"the keeper refuses: {reason}; try again")
            given, self._line.descriptors = self._line.descriptors, []
            self._seat.take(welcome, given)
            if not {DRAM, NVME} <= self._seat.slabs.keys():
                raise ShelfError("the keeper has not both DRAM and NVMe any more")
            self._line.say(Join([], []))
        except ShelfError:
            self.close()
            raise

    def close(self) -> None:
        """Give the place up."""
        self._line.close()
        self._seat.close(stuck=False)

    def bring(self, records: Sequence[Record], tenant: bytes, counts: Warmed) -> None:
        """Move rows of one tenant, as many as there are slots for."""
        granted = self._ask(Granted, Reserve(self._next(), DRAM, len(records), tenant, _deadline_ns()))
        counts.evicted += granted.evicted_count
        counts.refused += len(records) - len(granted.grants)
        written: list[Record] = []
        unused: list[Grant] = []
        for record, grant in zip(records, granted.grants, strict=False):
            moved = self._move(record, grant, counts)
            if moved is not None:
                written.append(moved)
            else:
                unused.append(grant)
        if unused:
            self._line.say(Abandon(DRAM, as_claims(unused)))
        if written:
            published = self._ask(Published, Publish(self._next(), DRAM, as_rows(written), _deadline_ns()))
            moved_count = published.outcomes.count(0)
            counts.moved += moved_count
            counts.there += len(written) - moved_count

    def _move(self, record: Record, grant: Grant, counts: Warmed) -> Record | None:
        """Copy one row into a granted slot; its new record, or None with the reason counted."""
        source, target = self._seat.slabs[NVME].slab, self._seat.slabs[DRAM].slab
        header, row = self._buffer
        try:
            count = os.preadv(source.descriptor, self._buffer, source.offset(record.slot))
        except OSError:
            counts.unreadable += 1
            return None
        parsed = parse_header(header) if count == self._form.slot_bytes else None
        form = dataclasses.replace(self._form, namespace=parsed[1].namespace) if parsed is not None else self._form
        if parsed is None or check_row(header, row, record, form) is not Verdict.GOOD:
            counts.bad += 1
            self._line.say(Drop(NVME, as_claims([(record.slot, record.generation)])))
            return None
        moved = record._replace(slot=grant.slot, generation=grant.generation)
        pack_header(header, moved, form)
        try:
            count = os.pwritev(target.descriptor, self._buffer, target.offset(grant.slot))
        except OSError:
            count = 0
        if count != self._form.slot_bytes:
            counts.refused += 1
            return None
        return moved

    def _ask(self, kind: type[Kind], question: Struct) -> Kind:
        """The answer to a question; what mirrors are told meanwhile is passed over."""
        self._line.say(question)
        while True:
            message = self._line.hear()
            if isinstance(message, kind):
                return message
            if isinstance(message, Farewell):
                raise ShelfError(f"the keeper is leaving: {message.reason}")

    def _next(self) -> int:
        self._number += 1
        return self._number


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(ANSWER_S * 1e9)
