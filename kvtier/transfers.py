"""Rows under way between a slab and the caller's memory: header pages, I/O requests, and what came of them.

Packs headers and verifies rows on the I/O workers; every transfer's page, row and slot belong to it until it has been
polled. A device's row is read into a landing place, judged, and then copied up; it is copied down before it is written.
Knows no directory: it is told the record and hands back the judgement. Owned by the shelf, on its thread.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.block import DeviceRow, Row
from kvtier.io.base import IoEngine, IoRequest, IoResult, Operation
from kvtier.record import Lease, Record
from kvtier.ticket import ShelfDone, ShelfOperation, ShelfOutcome
from kvtier.tiers.checksum import slice_sums
from kvtier.tiers.crossings import Crossing, Crossings
from kvtier.tiers.header import HEADER_BYTES, RowFormat, Verdict, check_row, check_slices, pack_header
from kvtier.tiers.memory import AlignedPages
from kvtier.tiers.slab import Slab

READ, WRITE = ShelfOperation.READ, ShelfOperation.WRITE
"""Looked up once: until Python 3.12 a member of an enum costs as much as a call, and there are several a row."""
IO_READ, IO_WRITE = Operation.READ, Operation.WRITE
IO_OPERATIONS = {READ: IO_READ, WRITE: IO_WRITE}
LANDING_PAUSE_S = 0.001
"""Between two looks for the last copies while a shelf is closed."""


class Transfer(NamedTuple):
    """A row to move, or with `layers` the slices of some of them to read. A write's record may lack its sums."""

    ticket: int
    record: Record
    row: Row
    layers: range | None = None
    in_place: bool = False
    """`row` is the slot's own: only its header is read, to judge both where they lie."""

    @property
    def read_operation(self) -> ShelfOperation:
        """What it is to the caller, unless it is a write."""
        return ShelfOperation.VERIFY if self.in_place else ShelfOperation.READ


@dataclass(eq=False, slots=True)
class Flight:
    """One row, or slices of it, under way. `record` has its sums once a write's result is there."""

    ticket: int
    operation: ShelfOperation
    record: Record
    page: memoryview
    """For the header; slices are read without, and have it as their place among what is in flight."""
    row: memoryview
    layers: range | None
    in_place: bool
    form: RowFormat
    taken: bytes = b""
    """The sums of `row` that are known before a write, or that the I/O engine has taken."""
    crossing: Crossing | None = None
    """The row is a device's, and `row` its landing place."""
    seen_at: float | None = None
    """When the shelf first polled it; set and read by its watch, like `late`."""
    late: bool = False

    def pack(self) -> None:
        """Worker, before a write: complete the record with the row's sums and make its header."""
        if not self.record.sums:
            sums = self.taken or slice_sums(self.row, self.form.slice_bytes)
            self.record = self.record._replace(sums=sums)
        pack_header(self.page, self.record, self.form)

    def verify(self) -> Verdict:
        """Worker, after a read: judge what came."""
        if self.layers is not None:
            return check_slices(self.row, self.layers, self.record, self.form, self.taken)
        return check_row(self.page, self.row, self.record, self.form, self.taken)

    def done(self, result: IoResult, outcome: ShelfOutcome, lease: Lease | None = None) -> ShelfDone:
        """What the caller hears of it."""
        moved = (result.moved_bytes, result.duration_ns, result.ended_ns)
        operation = ShelfOperation.VERIFY if self.in_place else self.operation
        return ShelfDone(self.ticket, operation, outcome, self.record.block_hash, *moved, lease)


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
        self._crossings: Crossings | None = None
        self._descending: dict[int, IoRequest] = {}
        """Writes whose row is being copied down, by landing place."""
        self._ascending: dict[int, tuple[Flight, IoResult]] = {}
        """Reads whose row has been judged well and is being copied up, by landing place."""
        self._landed: list[tuple[Flight, IoResult]] = []
        self._closed = False
        self._read_pages, self._write_pages = AlignedPages(in_flight_max), AlignedPages(in_flight_max)

    def register_memory(self, memory: memoryview) -> None:
        """Rows to be written will lie in this memory; see `IoEngine`."""
        for one in (memory, self._write_pages.memory):  # header pages bring little where that is refused
            self._engine.register_memory(one)

    def __len__(self) -> int:
        return len(self._flights)

    def cross_by(self, crossings: Crossings) -> None:
        """Rows may be a device's from now on; nothing has been started yet."""
        assert not self._flights
        self._crossings = crossings

    def flights(self) -> Iterable[Flight]:
        """What is under way, oldest first."""
        return self._flights.values()

    def room(self, operation: ShelfOperation) -> int:
        """How many more may start now."""
        room = min(len(self._pages(operation)), self._engine.room(IO_OPERATIONS[operation]))
        return room if self._crossings is None else min(room, self._crossings.room(operation is READ))

    def ticket(self) -> int:
        """A new number for a transfer; never used twice."""
        return next(self._numbers)

    def start(self, operation: ShelfOperation, transfers: Iterable[Transfer]) -> None:
        """Start transfers, no more than `room`."""
        pages = self._pages(operation)
        requests: list[IoRequest] = []
        for transfer in transfers:
            flight, request = self._prepare(operation, transfer, pages.take())
            self._flights[flight.ticket] = flight
            if flight.crossing is None or operation is READ:
                requests.append(request)
            else:
                assert self._crossings is not None
                self._descending[flight.crossing.place] = request
                self._crossings.start(flight.crossing, upward=False)
        self._submit(requests)

    def poll(self) -> list[tuple[Flight, IoResult]]:
        """What has ended since the last call; its row and page are free again."""
        if not (self._flights or self._landed):
            return []
        ended, self._landed = self._landed, []
        ended += self._land()
        for result in self._engine.poll():
            flight = self._flights[result.tag]
            if flight.crossing is not None and result.value is Verdict.GOOD:
                if self._closed:
                    ended.append((flight, result._replace(error_number=errno.ECANCELED)))
                    continue
                assert self._crossings is not None and flight.operation is READ
                self._ascending[flight.crossing.place] = flight, result
                self._crossings.start(flight.crossing, upward=True)
                continue
            ended.append((flight, result))
        self._part_with(ended)
        return ended

    def cancel(self, operation: ShelfOperation) -> None:
        """Let go of what has not started; it ends with ECANCELED."""
        self._engine.cancel(IO_OPERATIONS[operation])

    def check(self) -> None:
        """Assert that pages and flights agree."""
        for operation in IO_OPERATIONS:
            flying = sum(flight.operation is operation for flight in self._flights.values())
            assert flying + len(self._pages(operation)) == self._in_flight_max, operation
        if self._crossings is not None:
            self._crossings.check(sum(flight.crossing is not None for flight in self._flights.values()))
            assert self._crossings.under_way.keys() == self._descending.keys() | self._ascending.keys()

    def close(self, deadline_s: float) -> int:
        """Wait for what is under way up to the deadline; returns how many transfers are stuck.

        What has ended can still be polled; reads that have yet to be copied up are refused.
        """
        end = time.monotonic() + deadline_s
        while self._descending and time.monotonic() < end:
            self._landed += self._land()
            time.sleep(LANDING_PAUSE_S)
        self._closed = True
        stuck = self._engine.close(max(0.0, end - time.monotonic()))
        if self._crossings is not None and not self._crossings.close(max(0.0, end - time.monotonic())):
            stuck += len(self._crossings.under_way)
        return stuck

    def _prepare(self, operation: ShelfOperation, transfer: Transfer, page: memoryview) -> tuple[Flight, IoRequest]:
        """What is to be asked of the I/O engine, and what is to be remembered of it."""
        ticket, record, row, layers, in_place = transfer
        form, slab = self._form, self._slab
        assert row.nbytes == (form.row_bytes if layers is None else form.read_bytes(layers)), row.nbytes
        reads = operation is READ
        crossing = None
        if isinstance(row, DeviceRow):
            assert self._crossings is not None, "nobody has said how rows of a device are reached"
            crossing = self._crossings.take(row.slot, upward=reads)
            row = self._crossings.view(crossing)
        known = b"" if reads else record.sums
        flight = Flight(ticket, operation, record, page, row, layers, in_place, form, known, crossing)
        offset = slab.offset(record.slot)
        if layers is not None:
            offset += HEADER_BYTES + layers.start * form.slice_bytes
        buffers = (page,) if in_place else (page, row) if layers is None else (row,)
        asked, prepare, then = (IO_READ, None, flight.verify) if reads else (IO_WRITE, flight.pack, None)
        sums = None if in_place else flight
        return flight, IoRequest(asked, slab.descriptor, offset, buffers, ticket, prepare, then, sums)

    def _pages(self, operation: ShelfOperation) -> AlignedPages:
        return self._read_pages if operation is READ else self._write_pages

    def _submit(self, requests: list[IoRequest]) -> None:
        taken = self._engine.submit(requests)
        assert taken == len(requests), "more was started than there was room for"

    def _land(self) -> list[tuple[Flight, IoResult]]:
        """Go on with what has been copied: writes begin, reads have ended."""
        ended: list[tuple[Flight, IoResult]] = []
        requests: list[IoRequest] = []
        for crossing in self._crossings.ended() if self._crossings is not None else ():
            if (request := self._descending.pop(crossing.place, None)) is not None:
                requests.append(request)
            else:
                flight, result = self._ascending.pop(crossing.place)
                ended.append((flight, result._replace(ended_ns=time.monotonic_ns())))
        if requests:
            self._submit(requests)
        return ended

    def _part_with(self, ended: Iterable[tuple[Flight, IoResult]]) -> None:
        """Their pages and landing places are free again."""
        flights, read_pages, write_pages = self._flights, self._read_pages, self._write_pages
        for flight, _ in ended:
            del flights[flight.ticket]
            (read_pages if flight.operation is READ else write_pages).give(flight.page)
            if flight.crossing is not None:
                assert self._crossings is not None
                self._crossings.give(flight.crossing)
