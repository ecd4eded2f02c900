"""What a shelf asks of its books, and the form in which they lie in this process.

`Books` is the seam between a shelf and whoever decides over its slots: `LocalBooks` is a directory that belongs to this
engine alone; keeper/shared.py has the form that engines share. Every call returns at once; what must wait for somebody
else comes back through `answers`. Called by the shelf, on its thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.block import BlockHash
from kvtier.directory import Directory, PublishOutcome
from kvtier.record import Grant, Lease, Record
from kvtier.retention import Retention
from kvtier.ticket import Reply
from kvtier.write_budget import WriteBudget


class BookCounts(NamedTuple):
    """What the books of a shelf count, besides slots and evictions; the field names are keys of `Shelf.stats`."""

    pinned: int = 0
    """Rows that are pinned now."""
    expired: int = 0
    pins_refused: int = 0
    """Pins over the budget."""
    quota_refused: int = 0
    """Slots that a tenant's quota has refused; what waits and is asked for again is not counted again."""
    write_budget_refused: int = 0
    """Slots that the write budget has refused, counted likewise."""

    def grown(self, before: BookCounts, now: BookCounts) -> BookCounts:
        """These with what they have grown from `before` to `now`; where `now` is less, it has begun anew."""
        grown = (mine + new - (old if new >= old else 0) for mine, old, new in zip(self, before, now, strict=True))
        return BookCounts(*grown)._replace(pinned=now.pinned)


class Books(Protocol):
    """Which slot holds what, and whose it is. All on one thread; nothing here waits."""

    @property
    def used_slots(self) -> int:
        """Slots that are not free."""

    @property
    def evictions(self) -> int:
        """Rows evicted so far."""

    @property
    def counts(self) -> BookCounts:
        """What else is counted, of all who share the books."""

    @property
    def supplied(self) -> bool:
        """Slots that `reserve` lacked have come since it was called last."""

    @property
    def reports(self) -> bool:
        """Whether this engine reports what the shelf holds; of those that share one a single engine does."""

    def find(self, hashes: Sequence[BlockHash]) -> list[Record]:
        """Records of the leading run of `hashes` that is here; a row that is read proves itself."""

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether a readable row has this hash."""

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use of a chain's blocks, here or not."""

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when the blocks of a chain were last used, without counting that as a further use."""

    def reserve(self, count: int, tenant: bytes) -> list[Grant]:
        """Up to `count` slots to write into, as many as can be had at once."""

    def publish(self, records: Sequence[Record], now: float, lease: bool = False) -> None:
        """Bind written slots to their hashes; each gets one answer. `lease`: those that are published are leased."""

    def answers(self, now: float, /) -> list[tuple[Record, PublishOutcome | None]]:
        """What became of published rows since the last call; None: nobody answered in time."""

    def abandon(self, grants: Sequence[Grant]) -> None:
        """Give reservations back that may have been written to; their I/O must have completed."""

    def drop(self, records: Sequence[Record]) -> list[Record]:
        """Hide rows at once; returns those that were still there."""

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """A claim on each row that is still there. What was made from the row counts only if `intact` says so after."""

    def intact(self, lease: Lease, /) -> bool:
        """Whether the row has been the lease's all the time until now."""

    def release(self, leases: Sequence[Lease]) -> None:
        """End claims, each as often as it was acquired."""

    def ask_rows(self, count: int, tenant: bytes, least: int) -> int:
        """Ask for `count` slots or as many as can be had, if that is `least` at least; the number of the question."""

    def ask_leases(self, records: Sequence[Record]) -> int:
        """Ask for claims that keep their rows in place, whatever happens; the number of the question."""

    def replies(self) -> list[Reply]:
        """What became of questions since the last call; what nobody has answered in time is refused."""

    def give_rows(self, grants: Sequence[Grant]) -> None:
        """Give slots back that were asked for and never written to."""

    def end_leases(self, leases: Sequence[Lease]) -> None:
        """End claims that were asked for or came with `publish`, each as often as it was given."""

    def lost_claims(self) -> list[Grant]:
        """Slots whose rows such claims have ceased to keep since the last call."""

    def coldest(self, count: int) -> list[Record]:
        """Up to `count` rows that will be evicted soon, the first of them first."""

    def retain(self, hashes: Sequence[BlockHash], asked: Retention) -> None:
        """A request that asks for `asked` uses these blocks, a chain from its first on: raise what they have."""

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks can be evicted again."""

    def expire(self, unix_s: float, boot_s: float) -> None:
        """It is so late, by the wall and the boot clock: hide what has expired.

        Called often, since the write budget learns the time from it.
        """

    def check(self) -> None:
        """Assert the books."""


class LocalBooks:
    """`Books` of one engine: its directory answers at once, and a lease keeps its row."""

    supplied = False
    reports = True

    def __init__(self, directory: Directory, budget: WriteBudget | None = None) -> None:
        """Without a `budget` any number of bytes may be written."""
        self._directory = directory
        self._budget = budget if budget is not None else WriteBudget(0, 0, 0.0, 0.0)
        self._answers: list[tuple[Record, PublishOutcome | None]] = []
        self._replies: list[Reply] = []
        self._numbers = itertools.count(1)
        self.find = directory.find
        self.holds = directory.holds
        self.touch = directory.touch
        self.stamp = directory.stamp
        self.abandon = directory.abandon
        self.drop = directory.drop
        self.acquire = directory.acquire
        self.release = self.end_leases = directory.release
        self.coldest = directory.coldest
        self.retain = directory.retain
        self.unpin = directory.unpin
        self.check = directory.check

    def __repr__(self) -> str:
        return repr(self._directory)

    @property
    def used_slots(self) -> int:
        """See `Books`."""
        return self._directory.used_slots

    @property
    def evictions(self) -> int:
        """See `Books`."""
        return self._directory.evictions

    @property
    def counts(self) -> BookCounts:
        """See `Books`."""
        return counts_of(self._directory, self._budget)

    def reserve(self, count: int, tenant: bytes) -> list[Grant]:
        """See `Books`."""
        grants = self._directory.reserve(self._budget.allow(count, tenant), tenant)
        self._budget.spend(grants)
        return grants

    def publish(self, records: Sequence[Record], now: float, lease: bool = False) -> None:
        """See `Books`."""
        outcomes = self._directory.publish(records, now)
        if lease:
            published = PublishOutcome.PUBLISHED
            self._directory.acquire([row for outcome, row in outcomes if outcome is published and row is not None])
        self._answers += [(record, outcome) for record, (outcome, _) in zip(records, outcomes, strict=True)]

    def answers(self, _now: float) -> list[tuple[Record, PublishOutcome | None]]:
        """See `Books`."""
        answers, self._answers = self._answers, []
        return answers

    def ask_rows(self, count: int, tenant: bytes, least: int) -> int:
        """See `Books`: answered at once."""
        grants = self.reserve(count, tenant) if can_reserve(self._directory, self._budget, least, tenant) else None
        return self._reply(grants, None)

    def ask_leases(self, records: Sequence[Record]) -> int:
        """See `Books`: answered at once."""
        return self._reply(None, self._directory.acquire(records))

    def replies(self) -> list[Reply]:
        """See `Books`."""
        replies, self._replies = self._replies, []
        return replies

    def give_rows(self, grants: Sequence[Grant]) -> None:
        """See `Books`."""
        self._directory.abandon(grants)
        self._budget.give_back(grants)

    def lost_claims(self) -> list[Grant]:
        """See `Books`: none, this engine alone decides."""
        return []

    def expire(self, unix_s: float, boot_s: float) -> None:
        """See `Books`."""
        self._directory.expire(unix_s)
        self._budget.advance(unix_s, boot_s)

    def intact(self, _lease: Lease) -> bool:
        """See `Books`: while it is held nobody overwrites the row."""
        return True

    def _reply(self, grants: list[Grant] | None, leases: list[Lease | None] | None) -> int:
        number = next(self._numbers)
        self._replies.append(Reply(number, grants, leases))
        return number


def can_reserve(directory: Directory, budget: WriteBudget, count: int, tenant: bytes) -> bool:
    """Whether `count` slots, all of them, could be granted now; nothing is evicted for the answer."""
    return count == 0 or (budget.allow(count, tenant) == count and directory.has_room(count, tenant))


def counts_of(directory: Directory, budget: WriteBudget) -> BookCounts:
    """What both have counted."""
    return BookCounts(
        directory.pinned, directory.expired, directory.pins_refused, directory.quota_shortage.refused, budget.refused
    )
