"""Turns of streamed sequences: suspended passes, one at a time, beside the passes of resident ones.

Owns the pass under way. While others run it goes on a layer at a time, and reads ahead, as long as their steps grow by
no more than its share (allowance.py); it never waits for a disk. Knows neither requests nor events. Owned by the loop,
engine thread.
"""

from __future__ import annotations

import time
from typing import Protocol

from kvtier.allowance import Allowance
from kvtier.cost import Work
from kvtier.runner import Runner
from kvtier.sequence import Sequence, StagedPart
from kvtier.stager import Stager
from kvtier.suspended import Advance, SuspendedPass

ALONE_S = 0.01
"""After so long somebody may have come, or the next slices."""
HUNG_S = 0.5
"""Reads of which none has ended for so long take nothing of anybody's time."""


class StagedScheduler(Protocol):
    """What of the scheduler gives turns their work."""

    def schedule_staged(self, now: float) -> StagedPart | None:
        """The next part for a suspended pass, if any; pinned until it is committed, abandoned or lost."""

    def abandon_staged(self, sequence: Sequence) -> None:
        """The pass over the part that was given last has been abandoned; nothing is wrong with its rows."""

    def lost(self, sequence: Sequence, block_index: int, now: float) -> None:
        """The pass has been abandoned: this block cannot be had."""

    def is_sound(self, sequence: Sequence) -> bool:
        """Whether all rows of the pass are still what they were."""


class StreamedTurns:
    """See the module."""

    def __init__(self, scheduler: StagedScheduler, runner: Runner, stager: Stager, share: float) -> None:
        """`share`: by what part of the time that they take alone others' steps may grow, in the mean."""
        self._scheduler = scheduler
        self._runner = runner
        self._stager = stager
        self._allowance = Allowance(share)
        self._under_way: SuspendedPass | None = None
        self._step_ended_at: float | None = None
        """When the others' last step ended, if it was the last thing to run; turns since then took `_turns_s`."""
        self._turns_s = 0.0
        self.moved = False
        """Whether the last turn has done anything: if not, there is a disk to wait for, or nothing to do."""

    @property
    def deadline(self) -> float | None:
        """When a turn is due though nothing has happened; None without a pass under way."""
        return self._under_way.deadline if self._under_way is not None else None

    def note_step(self, work: Work, began_at: float, now: float) -> None:
        """A step of others is over, for which the loop began to prepare at `began_at`, or when the one before ended."""
        since = began_at if self._step_ended_at is None else self._step_ended_at
        stager = self._stager
        seconds = now - since - self._turns_s
        reading = stager.moved_at >= since or (stager.in_flight > 0 and now - stager.moved_at < HUNG_S)
        self._allowance.note_step(work, seconds, in_peace=not (self.moved or reading))
        self._step_ended_at, self._turns_s = now, 0.0

    def turn(self, now: float, alone: bool) -> SuspendedPass | None:
        """Run layers as long as something is left, or for a moment if nobody else runs; the pass that has ended so."""
        self.moved = False
        if alone:
            self._allowance.forgive()
            self._step_ended_at, self._turns_s = None, 0.0
        if not (alone or self._allowance.left):
            self._stager.pause(now)
            return None
        self._stager.resume(now)
        end = time.monotonic() + ALONE_S
        while alone or self._allowance.left:
            started_at = time.monotonic()
            self._part_with_unsound()
            under_way = self._under_way or self._begin(now)
            advance = under_way.advance(now) if under_way is not None else Advance.WAITS
            if not alone:
                self._spend(time.monotonic() - started_at)
            if under_way is None or advance is Advance.WAITS:
                break
            self.moved = True
            if advance is not Advance.RAN:
                self._under_way = None
                return self._settle(under_way, advance, now)
            if alone and time.monotonic() >= end:
                break
        return None

    def abandon(self, sequence: Sequence) -> None:
        """A sequence is about to end: so does its pass, if it is the one under way."""
        if self._under_way is not None and self._under_way.part.sequence is sequence:
            self._under_way.abandon()
            self._under_way = None
            self._scheduler.abandon_staged(sequence)

    def _spend(self, seconds: float) -> None:
        self._allowance.spend(seconds)
        self._turns_s += seconds

    def _part_with_unsound(self) -> None:
        """Rows that it attends to in place may be somebody else's from now on."""
        if self._under_way is not None and not self._scheduler.is_sound(self._under_way.part.sequence):
            self.abandon(self._under_way.part.sequence)

    def _begin(self, now: float) -> SuspendedPass | None:
        staged = self._scheduler.schedule_staged(now)
        if staged is not None:
            self._under_way = SuspendedPass(self._runner, self._stager, staged, now)
        return self._under_way

    def _settle(self, over: SuspendedPass, advance: Advance, now: float) -> SuspendedPass | None:
        if advance is Advance.ENDED:
            return over
        assert over.lost_block is not None
        self._scheduler.lost(over.part.sequence, over.lost_block, now)
        return None
