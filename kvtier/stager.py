"""The stager: brings slices of NVMe rows near, a group of layers at a time, for passes that attend to them.

Owns the reads ahead: through the groups of a pass in order, and into the first group of the pass expected next, as far
as there is memory. Every slice is verified by the shelf. Knows neither sequences nor tensors; the store polls for it,
the loop asks it. All calls come from the engine thread and return at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kvtier.block import Tier
from kvtier.metrics import Metrics
from kvtier.record import Record
from kvtier.shelf import ReadItem, Shelf, ShelfDone, ShelfOutcome
from kvtier.staging import Staged, StagedRead, StageState, Staging
from kvtier.tiers.staging import StagingMemory

READ_BYTES_MAX = 1 << 20
"""Longer reads are no faster, and the pass would begin later."""
RETRY_S = 0.05
"""A read that the shelf does not take now, since its disk is in trouble, is offered again after this long."""


class Stager:
    """See the module. It stages one pass at a time, and reads ahead for one that is expected."""

    def __init__(
        self,
        layers: int,
        memory: StagingMemory,
        shelves: Mapping[Tier, Shelf],
        deadline_s: float,
        metrics: Metrics,
    ) -> None:
        """`memory` in slices, at least two; rows are read from the shelf that is NVMe's by then.

        A pass loses the row that it waits for once nothing has moved for `deadline_s`.
        """
        assert memory.unit_count >= 2
        self._layers = layers
        self._memory = memory
        self._shelves = shelves
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._reads: dict[int, StagedRead] = {}
        self._current: Staging | None = None
        self._expected: Staging | None = None
        self._paused_at: float | None = None
        self.moved_at = -math.inf
        """When a read of any pass last began or ended."""

    def __repr__(self) -> str:
        return f"Stager({self._memory!r}, in_flight={self.in_flight})"

    @property
    def blocks_max(self) -> int:
        """Most rows of one pass: two groups of them are in memory at once, of one layer at least."""
        return self._memory.unit_count // 2

    @property
    def in_flight(self) -> int:
        """Reads under way, those of abandoned passes included."""
        return len(self._reads)

    def begin(self, records: Sequence[Record], now: float, expected: Sequence[Record] = ()) -> Staging:
        """Stage rows for a pass, at most `blocks_max`, to be leased until it has ended; the one before has ended.

        `expected`: the rows of the pass that is likely to follow, none if that is not known.
        """
        assert self._current is None and 0 < len(records) <= self.blocks_max, len(records)
        self._current = self._adopt(records, now) or self._staging(records, now)
        if 0 < len(expected) <= self.blocks_max:
            self._expected = self._staging(expected, now)
        self.pump(now)
        return self._current

    def stage(self, staging: Staging, now: float) -> Staged:
        """How things stand with the next group of the pass."""
        assert staging is self._current
        group, layers = staging.group, staging.groups[staging.group]
        if staging.lost is not None:
            return Staged(StageState.LOST, layers, lost=staging.lost)
        starts = staging.starts[group]
        if len(starts) == len(staging.records) and not staging.pending[group]:
            unit_bytes = self._memory.unit_bytes
            base = self._memory.address - layers.start * unit_bytes
            return Staged(StageState.READY, layers, base + np.array(starts, np.int64) * unit_bytes)
        if now >= self.deadline(staging):
            reads = [*(read for read in self._reads.values() if read.staging is staging), *staging.refused]
            awaited = min((read.row for read in reads if read.group == group), default=len(starts))
            return Staged(StageState.LOST, layers, lost=awaited)
        return Staged(StageState.PENDING, layers)

    def deadline(self, staging: Staging) -> float:
        """When a group that is PENDING becomes LOST unless something moves."""
        return staging.moved_at + self._deadline_s

    def use_up(self, staging: Staging, now: float) -> None:
        """The group that was READY is not needed any more; with the last one the pass has ended."""
        assert staging is self._current and not staging.pending[staging.group]
        self._give(staging, staging.group, set())
        staging.group += 1
        if staging.group == len(staging.groups):
            staging.over = True
            self._current = None
        self.pump(now)

    def abandon(self, staging: Staging) -> None:
        """End a pass early, and what was expected after it. Memory of reads in flight stays theirs until they end."""
        assert staging is self._current
        self._current = None
        self._let_go(staging)
        self._expect_nothing()

    def completed(self, done: ShelfDone, now: float) -> bool:
        """A read of the shelf has ended; whether it was one of the stager's."""
        read = self._reads.pop(done.ticket, None)
        if read is None:
            return False
        staging, self.moved_at = read.staging, now
        if done.outcome is ShelfOutcome.DONE:
            self._metrics.streamed_bytes.add(done.moved_bytes, Tier.NVME.value)
        if staging.over:
            self._memory.give(read.start, read.unit_count)
        elif done.outcome is ShelfOutcome.REFUSED:
            staging.refused.append(read)
        else:
            staging.pending[read.group] -= 1
            staging.moved_at, staging.retry_at = now, 0.0
            if done.outcome is not ShelfOutcome.DONE:
                staging.lose(read.row)
        return True

    def pause(self, now: float) -> None:
        """Start no reads until `resume`."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """Start reads again. A pass that had none under way could not move meanwhile: its deadline is put off."""
        paused_at, self._paused_at = self._paused_at, None
        current = self._current
        if paused_at is not None and current is not None:
            if not any(read.staging is current for read in self._reads.values()):
                current.moved_at += now - max(paused_at, current.moved_at)
            self.pump(now)

    def pump(self, now: float) -> None:
        """Start the reads that there is memory for."""
        if self._paused_at is not None:
            return
        current, expected = self._current, self._expected
        if (current is None or self._read_ahead(current, self._layers, now)) and expected is not None:
            self._read_ahead(expected, 1, now)

    def check(self) -> None:
        """Assert that every unit of memory that is taken belongs to one read or one row that is there."""
        held = [(read.start, read.unit_count) for read in self._reads.values()]
        flying = {read.start for read in self._reads.values()}
        for staging in (self._current, self._expected):
            if staging is not None:
                for layers, starts in zip(staging.groups, staging.starts, strict=True):
                    held += [(start, len(layers)) for start in starts if start not in flying]
        units = Counter(itertools.chain.from_iterable(range(start, start + count) for start, count in held))
        assert all(owners == 1 for owners in units.values()), "two own the same memory"
        assert len(units) == self._memory.taken_count, "memory is lost"

    def _staging(self, records: Sequence[Record], now: float) -> Staging:
        """Groups so long that two of them fit the memory, and a read is no longer than it need be."""
        unit_bytes = self._memory.unit_bytes
        count = min(self._memory.unit_count // (2 * len(records)), max(1, READ_BYTES_MAX // unit_bytes), self._layers)
        groups = [range(first, min(first + count, self._layers)) for first in range(0, self._layers, count)]
        return Staging(list(records), groups, now, starts=[[] for _ in groups])

    def _adopt(self, records: Sequence[Record], now: float) -> Staging | None:
        """What was expected, if it is what comes, perhaps with more rows; else it is let go."""
        expected, made = self._expected, self._staging(records, now)
        if expected is None:
            return None
        known = len(expected.records)
        fits = expected.lost is None and expected.groups == made.groups
        if fits and expected.records == made.records[:known]:
            expected.records = made.records
            expected.moved_at = now
            self._expected = None
            return expected
        self._expect_nothing()
        return None

    def _read_ahead(self, staging: Staging, group_end: int, now: float) -> bool:
        """Read what comes next, of groups below `group_end`; whether all of that is under way or there."""
        if staging.lost is not None or (staging.refused and now < staging.retry_at):
            return False
        end = min(group_end, len(staging.groups)) * len(staging.records)
        reads, staging.refused = staging.refused, []
        while staging.asked < end:
            group, row = divmod(staging.asked, len(staging.records))
            unit_count = len(staging.groups[group])
            start = self._memory.take(unit_count)
            if start is None:
                break
            staging.asked += 1
            staging.starts[group].append(start)
            staging.pending[group] += 1
            reads.append(StagedRead(staging, group, row, start, unit_count))
        if reads:
            self._start(staging, reads, now)
        return staging.asked >= end and not staging.refused and staging.lost is None

    def _start(self, staging: Staging, reads: list[StagedRead], now: float) -> None:
        shelf = self._shelves.get(Tier.NVME)
        if shelf is None or shelf.is_lost:
            staging.lose(min(read.row for read in reads))
            return
        items = [
            ReadItem(
                staging.records[read.row], self._memory.view(read.start, read.unit_count), staging.groups[read.group]
            )
            for read in reads
        ]
        for ticket, read in zip(shelf.read(items), reads, strict=True):
            if ticket is None:
                staging.refused.append(read)
                staging.retry_at = now + RETRY_S
            else:
                self._reads[ticket] = read
                staging.moved_at = self.moved_at = now

    def _give(self, staging: Staging, group: int, kept: set[int]) -> None:
        """The memory of a group is free again, but for runs that start at `kept`."""
        for start in staging.starts[group]:
            if start not in kept:
                self._memory.give(start, len(staging.groups[group]))
        staging.starts[group] = []

    def _let_go(self, staging: Staging) -> None:
        staging.over = True
        flying = {read.start for read in self._reads.values() if read.staging is staging}
        for group in range(len(staging.starts)):
            self._give(staging, group, flying)

    def _expect_nothing(self) -> None:
        if self._expected is not None:
            self._let_go(self._expected)
            self._expected = None
