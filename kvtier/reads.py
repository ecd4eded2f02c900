"""Reads of one shelf: those that wait for their turn, and what the end of one says of its row.

A row that is not what its record says is dropped from the books, unless that has changed meanwhile. Owned by the shelf,
on its thread.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence

from kvtier.books import Books
from kvtier.io.base import IoResult
from kvtier.record import Record
from kvtier.ticket import ReadItem, ShelfDone, ShelfOperation, ShelfOutcome
from kvtier.tiers.header import Verdict
from kvtier.transfers import Flight, RowTransfers, Transfer
from kvtier.watch import TransferWatch


class ShelfReads:
    """See the module. Its length is that of the queue."""

    def __init__(self, books: Books, transfers: RowTransfers, watch: TransferWatch, waiting_max: int) -> None:
        self._books = books
        self._transfers = transfers
        self._watch = watch
        self._waiting_max = waiting_max
        self._waiting: deque[Transfer] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, items: Sequence[ReadItem], now: float, in_place: bool = False) -> list[int | None]:
        """Queue reads and start what there is room for; a ticket each, None if it is not allowed or too many wait.

        `in_place`: the targets are the rows themselves, to be judged where they lie.
        """
        tickets: list[int | None] = []
        for item in items:
            full = len(self._waiting) >= self._waiting_max
            if full or self._watch.allowed(ShelfOperation.READ, 1, now) == 0:
                tickets.append(None)
            else:
                ticket = self._transfers.ticket()
                self._waiting.append(Transfer(ticket, *item, in_place))
                tickets.append(ticket)
        self.start()
        return tickets

    def start(self) -> None:
        """Start as many as there is room for."""
        if not self._waiting:
            return
        count = min(len(self._waiting), self._transfers.room(ShelfOperation.READ))
        self._transfers.start(ShelfOperation.READ, [self._waiting.popleft() for _ in range(count)])

    def end(self, ended: Sequence[tuple[Flight, IoResult]], now: float) -> list[ShelfDone]:
        """What came of reads that have ended."""
        done: list[ShelfDone] = []
        for flight, result in ended:
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
            for waits in self._waiting
        ]
        self._waiting.clear()
        return refused

    def clear(self) -> None:
        """The shelf closes: nobody hears of those that wait."""
        self._waiting.clear()

    def _miss(self, record: Record, result: IoResult) -> ShelfOutcome:
        """A row that came but is not the one: drop its record, unless that has changed meanwhile."""
        if not self._books.drop([record]):
            return ShelfOutcome.STALE
        return ShelfOutcome.SHORT_READ if result.value is None else ShelfOutcome.BAD_ROW
