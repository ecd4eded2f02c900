"""Rows under way between a slab and the caller's memory: header pages, I/O requests, and what came of them.

Packs headers and verifies rows on the I/O workers; every transfer's page, row and slot belong to it until it has been
polled. Knows no directory: it is told the record and hands back the judgement. Owned by the shelf, on its thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.io.base import IoEngine, IoRequest, IoResult, Operation
from kvtier.record import Record
from kvtier.ticket import ShelfOperation
from kvtier.tiers.header import RowFormat, Verdict, check_row, pack_header, slice_sums
from kvtier.tiers.memory import AlignedPages
from kvtier.tiers.slab import Slab

IO_OPERATIONS = {ShelfOperation.READ: Operation.READ, ShelfOperation.WRITE: Operation.WRITE}


@dataclass(eq=False, slots=True)
class Flight:
    """One row under way. `record` has its sums once a write's result is there."""

    ticket: int
    operation: ShelfOperation
    record: Record
    page: memoryview
    row: memoryview
    form: RowFormat
    seen_at: float | None = None
    """When the shelf first polled it; set and read by the shelf, like `late`."""
    late: bool = False

    def pack(self) -> None:
        """Worker, before a write: complete the record with the row's sums and make its header."""
        if not self.record.sums:
            self.record = self.record._replace(sums=slice_sums(self.row, self.form.slice_bytes))
        pack_header(self.page, self.record, self.form)

    def verify(self) -> Verdict:
        """Worker, after a read: judge the row."""
        return check_row(self.page, self.row, self.record, self.form)


class RowTransfers:
    """Starts and ends the transfers of one shelf; at most `in_flight_max` reads and as many writes at once."""

    def __init__(self, form: RowFormat, slab: Slab, engine: IoEngine, in_flight_max: int) -> None:
        """The engine must take `in_flight_max` requests of each operation."""
        self._form = form
        self._slab = slab
        self._engine = engine
        self._in_flight_max = in_flight_max
        self._numbers = itertools.count(1)
        self._flights: dict[int, Flight] = {}
        self._pages = {operation: AlignedPages(in_flight_max) for operation in ShelfOperation}

    def __len__(self) -> int:
        return len(self._flights)

    def flights(self) -> Iterable[Flight]:
        """What is under way, oldest first."""
        return self._flights.values()

    def room(self, operation: ShelfOperation) -> int:
        """How many more may start now."""
        return min(len(self._pages[operation]), self._engine.room(IO_OPERATIONS[operation]))

    def ticket(self) -> int:
        """A new number for a transfer; never used twice."""
        return next(self._numbers)

    def start(self, operation: ShelfOperation, transfers: Iterable[tuple[int, Record, memoryview]]) -> None:
        """Start (ticket, record, row) transfers, no more than `room`. A write's record may lack its sums."""
        requests: list[IoRequest] = []
        for ticket, record, row in transfers:
            assert row.nbytes == self._form.row_bytes, row.nbytes
            flight = Flight(ticket, operation, record, self._pages[operation].take(), row, self._form)
            self._flights[ticket] = flight
            reads = operation is ShelfOperation.READ
            requests.append(
                IoRequest(
                    IO_OPERATIONS[operation],
                    self._slab.descriptor,
                    self._slab.offset(record.slot),
                    (flight.page, row),
                    ticket,
                    prepare=None if reads else flight.pack,
                    then=flight.verify if reads else None,
                )
            )
        taken = self._engine.submit(requests)
        assert taken == len(requests), "more was started than there was room for"

    def poll(self) -> list[tuple[Flight, IoResult]]:
        """What has ended since the last call; its row and page are free again."""
        ended: list[tuple[Flight, IoResult]] = []
        for result in self._engine.poll():
            flight = self._flights.pop(result.tag)
            self._pages[flight.operation].give(flight.page)
            ended.append((flight, result))
        return ended

    def cancel(self, operation: ShelfOperation) -> None:
        """Let go of what has not started; it ends with ECANCELED."""
        self._engine.cancel(IO_OPERATIONS[operation])

    def check(self) -> None:
        """Assert that pages and flights agree."""
        for operation, pages in self._pages.items():
            flying = sum(flight.operation is operation for flight in self._flights.values())
            assert flying + len(pages) == self._in_flight_max, operation

    def close(self, deadline_s: float) -> int:
        """Wait for what is under way up to the deadline; returns how many transfers are stuck in the kernel."""
        return self._engine.close(deadline_s)
