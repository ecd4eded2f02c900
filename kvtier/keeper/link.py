"""What the shared books of one layout have in common: one line to the keeper, and who gets which message.

Owns the state of the line as the engine thread knows it; asks the books what they hold when a keeper is joined. Used by
shared.py, on the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.keeper.client import KeeperClient, Lost, Seated
from kvtier.keeper.wire import (
    Acquired,
    Farewell,
    Gone,
    Granted,
    Here,
    Join,
    Numbers,
    Published,
    Snapshot,
    ToEngine,
    ToKeeper,
)

if TYPE_CHECKING:
    from kvtier.keeper.shared import SharedBooks


class Link:
    """What the books of one layout have in common: the client, and who gets which message."""

    def __init__(self, client: KeeperClient) -> None:
        self.client = client
        self.line: int | None = None
        """The connection that is joined; None while there is none."""
        self.over = False
        """The cache directory is gone: there is nothing here any more, and never will be."""
        self._books: dict[int, SharedBooks] = {}
        self._number = 0

    def add(self, books: SharedBooks) -> None:
        """Messages about this tier go to `books`."""
        self._books[books.tier_index] = books

    def send(self, message: ToKeeper) -> bool:
        """Send a message, if there is anyone to read it."""
        if self.line is None:
            return False
        self.client.send(self.line, message)
        return True

    def number(self) -> int:
        """For a question; never used twice."""
        self._number += 1
        return self._number

    def pump(self, now: float) -> None:
        """Hand on what has come."""
        for message in self.client.take():
            if isinstance(message, Seated):
                self._join(message.line, now)
            elif isinstance(message, Lost):
                self.line = None
                self._each_lost()
            elif isinstance(message, Farewell):
                self.over, self.line = True, None
                for books in self._books.values():
                    books.end()
            else:
                self._hand(message)

    def _join(self, line: int, now: float) -> None:
        self.line = line
        held = [(tier, *grant) for tier, books in self._books.items() for grant in books.held()]
        leased = [(tier, *claim) for tier, books in self._books.items() for claim in books.held_leases()]
        self.send(Join(held, leased))
        for books in self._books.values():
            books.joined(now)

    def _each_lost(self) -> None:
        for books in self._books.values():
            books.lost()

    def _hand(self, message: ToEngine) -> None:
        if isinstance(message, (Gone, Here, Snapshot, Numbers)):
            books = self._books.get(message.tier)
            if books is not None:
                books.told(message)
        elif isinstance(message, (Granted, Published, Acquired)):
            for books in self._books.values():
                if books.answered(message):
                    break
