"""How many bytes may still be written to a shelf: so many within 24 hours, whoever writes them.

Counts what is granted, in buckets of an hour, and forgets a bucket only when all of it is older than a day. Reads no
clock: `advance` tells the time. Owned by the books of a shelf; the journal keeps the buckets across restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier.record import NO_TENANT, Grant
from kvtier.shortage import Shortage

HOUR_S = 3600
HOURS = 24
BUCKETS_MAX = HOURS + 1


class SpendingLog(Protocol):
    """Told what was spent in an hour, each time with the whole sum; MUST NOT wait for a disk."""

    def spent(self, hour: int, spent_bytes: int) -> None:
        """`hour` counts from the Unix epoch."""


class WriteBudget:
    """See the module."""

    def __init__(
        self,
        limit_bytes: int,
        slot_bytes: int,
        unix_s: float,
        spent: Mapping[int, int] | None = None,
        log: SpendingLog | None = None,
    ) -> None:
        """`limit_bytes` a day, 0 for no limit; it is `unix_s`, and `spent` in bytes by hour is known already."""
        self.limit_bytes = limit_bytes
        self._slot_bytes = slot_bytes
        self._spent = dict(spent or {}) if limit_bytes else {}
        self._first: dict[int, int] = {}
        """The lowest generation that was granted in an hour; they only rise."""
        self._log = log
        self._shortage = Shortage()
        self._hour = int(unix_s) // HOUR_S
        self.advance(unix_s)

    @property
    def spent_bytes(self) -> int:
        """Bytes of the last 24 hours, at least."""
        return sum(self._spent.values())

    def advance(self, unix_s: float) -> None:
        """It is so late. A clock that was set back takes what it would otherwise count for ever along."""
        self._hour = int(unix_s) // HOUR_S
        ahead = [hour for hour in self._spent if hour > self._hour]
        for hour in ahead:
            moved = self._spent[hour]
            self._set(hour, 0)
            self._set(self._hour, self._spent.get(self._hour, 0) + moved)
        for hour in [hour for hour in self._spent if hour < self._hour - HOURS]:
            self._set(hour, 0)
        self._first = {hour: first for hour, first in self._first.items() if 0 <= self._hour - hour <= HOURS}

    @property
    def refused(self) -> int:
        """Slots that were asked for in vain, those that are asked for again not counted again."""
        return self._shortage.refused

    def allow(self, count: int, tenant: bytes = NO_TENANT) -> int:
        """How many of `count` slots may be granted now."""
        if not self.limit_bytes:
            return count
        allowed = max(0, min(count, (self.limit_bytes - self.spent_bytes) // self._slot_bytes))
        self._shortage.note(tenant, count - allowed)
        return allowed

    def spend(self, grants: Sequence[Grant]) -> None:
        """These slots were granted."""
        if self.limit_bytes and grants:
            self._first.setdefault(self._hour, min(grant.generation for grant in grants))
            self._set(self._hour, self._spent.get(self._hour, 0) + len(grants) * self._slot_bytes)

    def give_back(self, grants: Sequence[Grant]) -> None:
        """These were granted and never written to: the hours in which they were granted, as far as known, have less."""
        hours = Counter(self._hour_of(grant) for grant in grants) if self.limit_bytes else {}
        for hour, count in hours.items():
            if hour in self._spent:
                self._set(hour, max(0, self._spent[hour] - count * self._slot_bytes))

    def _hour_of(self, grant: Grant) -> int:
        """-1: longer ago than a day, or by somebody before this one."""
        return max((hour for hour, first in self._first.items() if first <= grant.generation), default=-1)

    def _set(self, hour: int, spent_bytes: int) -> None:
        if spent_bytes:
            self._spent[hour] = spent_bytes
        else:
            self._spent.pop(hour, None)
        if self._log is not None:
            self._log.spent(hour, spent_bytes)


def spent_bytes(spent: Mapping[int, int], unix_s: float) -> int:
    """Bytes of the 24 hours until `unix_s`, at least, of what was spent by hour."""
    return WriteBudget(1, 1, unix_s, spent).spent_bytes
