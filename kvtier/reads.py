"""Reads of one shelf: those that wait for their turn, and what the end of one says of its row.

Loads of rows and reads for streamed contexts wait in lines of their own and share the disk evenly. A row that is not
what its record says is dropped from the books, unless that has changed meanwhile. Owned by the shelf, on its thread.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.books import Books
from kvtier.io.base import IoResult
from kvtier.record import Record
from kvtier.ticket import ReadItem, ShelfDone, ShelfLimits, ShelfOperation, ShelfOutcome
from kvtier.tiers.header import Verdict
from kvtier.transfers import Flight, RowTransfers, Transfer
from kvtier.watch import TransferWatch


@dataclass(eq=False, slots=True)
class _Line:
    """Reads of one kind, in order."""

    waiting: deque[Transfer] = field(default_factory=deque)
    in_flight: int = 0
    in_flight_bytes: int = 0


class ShelfReads:
    """See the module. Its length is that of the lines."""

    def __init__(self, books: Books, transfers: RowTransfers, watch: TransferWatch, limits: ShelfLimits) -> None:
        self._books = books
        self._transfers = transfers
        self._watch = watch
        self._waiting_max = limits.waiting_max
        self._each_max = (limits.in_flight_max + 1) // 2
        """In flight of one kind, so that the first of the other waits for no more than those."""
        self._loads, self._streamed = _Line(), _Line()

    def __len__(self) -> int:
        return len(self._loads.waiting) + len(self._streamed.waiting)

    def add(self, items: Sequence[ReadItem], now: float, in_place: bool = False) -> list[int | None]:
        """Queue reads and start what there is room for; a ticket each, None if it is not allowed or too many wait.

        `in_place`: the targets are the rows themselves, to be judged where they lie.
        """
        tickets: list[int | None] = []
        for item in items:
            waiting = self._line(item.layers, in_place).waiting
            full = len(waiting) >= self._waiting_max
            if full or self._watch.allowed(ShelfOperation.READ, 1, now) == 0:
                tickets.append(None)
            else:
                ticket = self._transfers.ticket()
                waiting.append(Transfer(ticket, *item, in_place))
                tickets.append(ticket)
        self.start()
        return tickets

    def start(self) -> None:
        """Start as many as there is room for."""
        if not (self._loads.waiting or self._streamed.waiting):
            return
        started: list[Transfer] = []
        room = self._transfers.room(ShelfOperation.READ)
        while len(started) < room and (line := self._next()) is not None:
            transfer = line.waiting.popleft()
            line.in_flight += 1
            line.in_flight_bytes += transfer.row.nbytes
            started.append(transfer)
        self._transfers.start(ShelfOperation.READ, started)

    def end(self, ended: Sequence[tuple[Flight, IoResult]], now: float) -> list[ShelfDone]:
        """What came of reads that have ended."""
        done: list[ShelfDone] = []
        for flight, result in ended:
            line = self._line(flight.layers, flight.in_place)
            line.in_flight -= 1
            line.in_flight_bytes -= flight.row.nbytes
            outcome = ShelfOutcome.DONE
            if result.error_number == errno.ECANCELED:
                outcome = ShelfOutcome.REFUSED
            elif result.error_number is not None:
                self._watch.trouble(flight.operation, result.error_number, now)
                outcome = ShelfOutcome.IO_ERROR
            else:
                self._watch.succeeded(ShelfOperation.READ)
                if result.value is not Verdict.GOOD:
                    outcome = self._miss(flight.record, result)
            done.append(flight.done(result, outcome))
        return done

    def refuse(self) -> list[ShelfDone]:
        """Let go of all that wait."""
        refused = [
            ShelfDone(waits.ticket, waits.read_operation, ShelfOutcome.REFUSED, waits.record.block_hash, 0, 0)
            for waits in (*self._loads.waiting, *self._streamed.waiting)
        ]
        self.clear()
        return refused

    def clear(self) -> None:
        """The shelf closes: nobody hears of those that wait."""
        self._loads.waiting.clear()
        self._streamed.waiting.clear()

    def _line(self, layers: range | None, in_place: bool) -> _Line:
        return self._loads if layers is None and not in_place else self._streamed

    def _next(self) -> _Line | None:
        """The line whose turn it is: what is in flight shares the disk, so the one that has fewer bytes of it then.

        Where that has as many reads in flight as it may, the other gets one at a time.
        """
        waiting = [line for line in (self._loads, self._streamed) if line.waiting]
        waiting.sort(key=lambda line: line.in_flight_bytes + line.waiting[0].row.nbytes)
        limits = (self._each_max, 1)
        return next((line for line, most in zip(waiting, limits, strict=False) if line.in_flight < most), None)

    def _miss(self, record: Record, result: IoResult) -> ShelfOutcome:
        """A row that came but is not the one: drop its record, unless that has changed meanwhile."""
        if not self._books.drop([record]):
            return ShelfOutcome.STALE
        return ShelfOutcome.SHORT_READ if result.value is None else ShelfOutcome.BAD_ROW
