"""A suspended pass: a part of a streamed sequence on its way through the layers, which rests while slices come near.

Joins a resting pass of the runner with the groups of the stager: a layer runs once its slices of all rows are there.
Knows neither scheduler nor loop. Owned by the turns (turns.py), engine thread.
"""

from __future__ import annotations

import enum
import time

import numpy as np

from kvtier.models.decoder import NonFiniteError
from kvtier.runner import Runner
from kvtier.sequence import StagedPart
from kvtier.stager import Stager
from kvtier.staging import Staged, StageState


class Advance(enum.Enum):
    """What came of an `advance`."""

    RAN = "ran"
    """A layer; there are more."""
    WAITS = "waits"
    """The slices of the next layer are under way."""
    LOST = "lost"
    """A block cannot be had: the pass has been abandoned."""
    ENDED = "ended"
    """After the last layer: `tokens` are there, or an `error`."""


class SuspendedPass:
    """One pass over one part. Its rows neither move nor leave while it is under way, and those staged are leased."""

    def __init__(self, runner: Runner, stager: Stager, staged: StagedPart, now: float) -> None:
        self.part = staged.part
        self._runner = runner
        self._stager = stager
        self._blocks = np.flatnonzero(staged.part.sequence.table.addresses == 0)
        assert len(self._blocks) == len(staged.records)
        self._resting = runner.begin(staged.part)
        self._staging = stager.begin(staged.records, now, staged.expected)
        self._ready: Staged | None = None
        self.tokens: list[int] = []
        """Once it has ended: what was sampled."""
        self.error: NonFiniteError | None = None
        """Once it has ended: why there are no tokens."""
        self.lost_block: int | None = None
        """Once it is lost: the first block of the sequence that cannot be had."""
        self.busy_s = 0.0
        """Time that its layers have taken."""

    @property
    def deadline(self) -> float:
        """When what it waits for counts as lost."""
        return self._stager.deadline(self._staging)

    def advance(self, now: float) -> Advance:
        """Run the next layer if its slices are there."""
        staged = self._ready if self._ready is not None else self._stager.stage(self._staging, now)
        if staged.state is StageState.PENDING:
            return Advance.WAITS
        if staged.state is StageState.LOST:
            assert staged.lost is not None
            self.lost_block = int(self._blocks[staged.lost])
            self.abandon()
            return Advance.LOST
        started_at = time.monotonic()
        self._run_layer(staged, now)
        if self._staging.over:
            self._end()
        self.busy_s += time.monotonic() - started_at
        return Advance.ENDED if self._staging.over else Advance.RAN

    def abandon(self) -> None:
        """End it before its last layer. Nothing of it counts; what it has appended to its rows is written again."""
        self._runner.finish()
        self._stager.abandon(self._staging)

    def _run_layer(self, staged: Staged, now: float) -> None:
        assert staged.addresses is not None
        layer = self._resting.layer
        self._runner.run_layers(self._resting, range(layer, layer + 1), self._blocks, staged.addresses)
        if layer + 1 < staged.layers.stop:
            self._ready = staged
        else:
            self._ready = None
            self._runner.finish()
            self._stager.use_up(self._staging, now)

    def _end(self) -> None:
        try:
            self.tokens = self._runner.end(self._resting)
        except NonFiniteError as error:
            self.error = error
