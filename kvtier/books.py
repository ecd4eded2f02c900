"""What a shelf asks of its books, and the form in which they lie in this process.

`Books` is the seam between a shelf and whoever decides over its slots: `LocalBooks` is a directory that belongs to this
engine alone; keeper/shared.py has the form that engines share. Every call returns at once; what must wait for somebody
else comes back through `answers`. Called by the shelf, on its thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.block import BlockHash
from kvtier.directory import Directory, PublishOutcome
from kvtier.record import Grant, Lease, Record


class Books(Protocol):
    """Which slot holds what, and whose it is. All on one thread; nothing here waits."""

    @property
    def used_slots(self) -> int:
        """Slots that are not free."""

    @property
    def evictions(self) -> int:
        """Rows evicted so far."""

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

    def publish(self, records: Sequence[Record], now: float) -> None:
        """Bind written slots to their hashes; each gets one answer."""

    def answers(self, now: float, /) -> list[tuple[Record, PublishOutcome | None]]:
        """What became of published rows since the last call; None: nobody answered in time."""

    def abandon(self, grants: Sequence[Grant]) -> None:
        """Give reservations back; their I/O must have completed."""

    def drop(self, records: Sequence[Record]) -> list[Record]:
        """Hide rows at once; returns those that were still there."""

    def acquire(self, records: Sequence[Record]) -> list[Lease | None]:
        """A claim on each row that is still there. What was made from the row counts only if `intact` says so after."""

    def intact(self, lease: Lease, /) -> bool:
        """Whether the row has been the lease's all the time until now."""

    def release(self, leases: Sequence[Lease]) -> None:
        """End claims, each as often as it was acquired."""

    def coldest(self, count: int) -> list[Record]:
        """Up to `count` rows that will be evicted soon, the first of them first."""

    def check(self) -> None:
        """Assert the books."""


class LocalBooks:
    """`Books` of one engine: its directory answers at once, and a lease keeps its row."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._answers: list[tuple[Record, PublishOutcome | None]] = []
        self.find = directory.find
        self.holds = directory.holds
        self.touch = directory.touch
        self.stamp = directory.stamp
        self.reserve = directory.reserve
        self.abandon = directory.abandon
        self.drop = directory.drop
        self.acquire = directory.acquire
        self.release = directory.release
        self.coldest = directory.coldest
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

    def publish(self, records: Sequence[Record], now: float) -> None:
        """See `Books`."""
        outcomes = self._directory.publish(records, now)
        self._answers += [(record, outcome) for record, (outcome, _) in zip(records, outcomes, strict=True)]

    def answers(self, _now: float) -> list[tuple[Record, PublishOutcome | None]]:
        """See `Books`."""
        answers, self._answers = self._answers, []
        return answers

    def intact(self, _lease: Lease) -> bool:
        """See `Books`: while it is held nobody overwrites the row."""
        return True
