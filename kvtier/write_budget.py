"""How many bytes may still be written to a shelf: so many within 24 hours, whoever writes them.

Counts what is granted, in buckets of an hour, and forgets a bucket only when all of it is older than a day by the boot
clock, which nobody can set. The log has hours of the wall clock, and all of them are moved when that is set: whoever
goes on after a restart finds them as old as they are, unless it was set meanwhile. Reads no clock: `advance` tells the
time. Owned by the books of a shelf; the journal keeps the buckets across restarts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier.record import NO_TENANT, Grant
from kvtier.shortage import Shortage

HOUR_S = 3600
HOURS = 24
BUCKETS_MAX = HOURS + 1
STEP_S = 60.0
"""By less than that the wall clock is never taken to have been set."""


class SpendingLog(Protocol):
    """Told what was spent in some hours, each time with their whole sums; MUST NOT wait for a disk."""

    def spent(self, spent_by_hour: Mapping[int, int]) -> None:
        """Hours count from the Unix epoch; those without spending any more come first."""


class WriteBudget:
    """See the module."""

    def __init__(
        self,
        limit_bytes: int,
        slot_bytes: int,
        unix_s: float,
        boot_s: float,
        spent: Mapping[int, int] | None = None,
        log: SpendingLog | None = None,
    ) -> None:
        """`limit_bytes` a day, 0 for no limit; it is `unix_s`, `boot_s` after the start of the machine.

        `spent` in bytes by hour is what the log has already. Hours that are yet to come are taken for this one: the
        clock was set back, and they would otherwise count for ever.
        """
        self.limit_bytes = limit_bytes
        self._slot_bytes = slot_bytes
        self._boot_unix_s = unix_s - boot_s
        """When the machine was started, by the wall clock of now."""
        self._hour = int(unix_s) // HOUR_S
        self._moved_hours = 0
        """How much later an hour is called in the log."""
        self._told = dict(spent or {}) if limit_bytes else {}
        """What the log has."""
        self._spent: Counter[int] = Counter()
        for hour, spent_bytes in self._told.items():
            self._spent[min(hour, self._hour)] += spent_bytes
        self._first: dict[int, int] = {}
        """The lowest generation that was granted in an hour; they only rise."""
        self._log = log
        self._shortage = Shortage()
        self._forget()

    @property
    def spent_bytes(self) -> int:
        """Bytes of the last 24 hours, at least."""
        return sum(self._spent.values())

    def advance(self, unix_s: float, boot_s: float) -> None:
        """It is so late by the wall clock and by the boot clock."""
        now_s = self._boot_unix_s + boot_s
        hour, set_by_s, moved_hours = int(now_s) // HOUR_S, unix_s - now_s, self._moved_hours
        if not set_by_s - STEP_S <= moved_hours * HOUR_S < set_by_s + 2 * HOUR_S:
            moved_hours = math.ceil((set_by_s - STEP_S) / HOUR_S)  # upwards, or they were forgotten early
        if (hour, moved_hours) != (self._hour, self._moved_hours):
            self._hour, self._moved_hours = hour, moved_hours
            self._forget()

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
            self._spent[self._hour] += len(grants) * self._slot_bytes
            self._tell()

    def give_back(self, grants: Sequence[Grant]) -> None:
        """These were granted and never written to: the hours in which they were granted, as far as known, have less."""
        hours = Counter(self._hour_of(grant) for grant in grants) if self.limit_bytes else {}
        for hour, count in hours.items():
            if hour in self._spent:
                self._spent[hour] = max(0, self._spent[hour] - count * self._slot_bytes)
        self._tell()

    def _hour_of(self, grant: Grant) -> int:
        """-1: longer ago than a day, or by somebody before this one."""
        return max((hour for hour, first in self._first.items() if first <= grant.generation), default=-1)

    def _forget(self) -> None:
        """Let go of what is older than a day."""
        oldest = self._hour - HOURS
        self._spent = Counter({hour: spent_bytes for hour, spent_bytes in self._spent.items() if hour >= oldest})
        self._first = {hour: first for hour, first in self._first.items() if hour >= oldest}
        self._tell()

    def _tell(self) -> None:
        """Tell the log what it does not have."""
        known, self._told = self._told, {}
        for hour, spent_bytes in self._spent.items():
            if spent_bytes:
                called = max(0, hour + self._moved_hours)
                self._told[called] = self._told.get(called, 0) + spent_bytes
        news = dict.fromkeys(known.keys() - self._told.keys(), 0)
        news |= {called: spent for called, spent in self._told.items() if known.get(called) != spent}
        if news and self._log is not None:
            self._log.spent(news)


def spent_bytes(spent: Mapping[int, int], unix_s: float) -> int:
    """Bytes of the 24 hours until `unix_s`, at least, of what was spent by hour."""
    return WriteBudget(1, 1, unix_s, 0.0, spent).spent_bytes
