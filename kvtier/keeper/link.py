"""What the shared books of one layout have in common: one line to the keeper, and who gets which message.

Owns the state of the line as the engine thread knows it; asks the books what they hold when a keeper is joined. Used by
shared.py, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.keeper.client import KeeperClient, Lost, Seated
from kvtier.keeper.fields import pieces
from kvtier.keeper.wire import (
    HELD_MAX,
    Abandon,
    Acquired,
    Farewell,
    Gone,
    Granted,
    Held,
    Here,
    Join,
    Numbers,
    Published,
    Reporter,
    Snapshot,
    ToEngine,
    ToKeeper,
)

if TYPE_CHECKING:
    from kvtier.keeper.shared import SharedBooks

ANSWER_S = 5.0
"""What the keeper gets to answer in."""
TEND_S = 0.05
"""How often books do what they do by themselves while nothing comes."""


class Link:
    """What the books of one layout have in common: the client, and who gets which message."""

    def __init__(self, client: KeeperClient, seated: Callable[[], None], ended: Callable[[], None]) -> None:
        """`seated`: make books of what the keeper has given. `ended`: the books are over."""
        self.client = client
        self.line: int | None = None
        """The connection that is joined; None while there is none."""
        self.over = False
        """The shelves are gone for good; a new seat brings new ones."""
        self.reports = False
        """This engine is the one that reports what the shelves hold."""
        self.heard_count = 0
        """Times that something has come."""
        self._books: dict[int, SharedBooks] = {}
        self._seated = seated
        self._ended = ended
        self._number = 0

    def add(self, books: SharedBooks) -> None:
        """Messages about this tier go to `books`."""
        self._books[books.tier_index] = books

    def remove(self, tier_index: int) -> None:
        """Books that are closed hear nothing any more."""
        del self._books[tier_index]

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

    def is_due(self, tended_at: float, heard_count: int, now: float) -> bool:
        """Whether books have something to do that were tended then and had been told so much."""
        news = self.client.has_news or heard_count != self.heard_count
        return news or not tended_at <= now < tended_at + TEND_S

    def pump(self, now: float) -> None:
        """Hand on what has come."""
        self.heard_count += self.client.has_news
        for message in self.client.take():
            if isinstance(message, Seated):
                self._join(message.line, now)
            elif isinstance(message, Lost):
                self.line = None
                for books in self._books.values():
                    books.lost()
            elif isinstance(message, Farewell):
                self.over, self.line, self.reports = True, None, False
                for books in self._books.values():
                    books.end()
                self._ended()
            elif isinstance(message, Reporter):
                self.reports = message.reports
            else:
                self._hand(message)

    def _join(self, line: int, now: float) -> None:
        self.over, self.line = False, line
        self._seated()
        held = [(tier, *grant) for tier, books in self._books.items() for grant in books.held()]
        leased = [(tier, *claim) for tier, books in self._books.items() for claim in books.leases.held()]
        grants, leases = list(pieces(held, HELD_MAX)), list(pieces(leased, HELD_MAX))
        last = Join(grants.pop() if grants else [], leases.pop() if leases else [])
        for held_before in (*(Held(piece, []) for piece in grants), *(Held([], piece) for piece in leases)):
            self.send(held_before)
        self.send(last)
        for books in self._books.values():
            books.joined(now)

    def _hand(self, message: ToEngine) -> None:
        if isinstance(message, (Gone, Here, Snapshot, Numbers)):
            books = self._books.get(message.tier)
            if books is not None:
                books.told(message)
            return
        assert isinstance(message, (Granted, Published, Acquired)), message
        tier = None if isinstance(message, Published) else message.tier
        if not any(books.answered(message) for index, books in self._books.items() if tier in (None, index)):
            self._give_back(message)

    def _give_back(self, message: Granted | Published | Acquired) -> None:
        """An answer that nobody waits for any more. A lease was given back when it did not come in time."""
        if isinstance(message, Granted) and message.grants:
            self.send(Abandon(message.tier, message.grants, unused=True))
