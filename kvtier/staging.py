"""Staging: the rows of one pass on their way through staging memory, and what is said of them.

Values only: which groups of layers there are, how far they are asked for, there, refused or lost. The stager changes
them, the pass reads its answers.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.record import Record


class StageState(enum.Enum):
    """How things stand with a group."""

    READY = "ready"
    PENDING = "pending"
    LOST = "lost"
    """A row cannot be had: the pass is to be abandoned."""


class Staged(NamedTuple):
    """Answer of `Stager.stage`."""

    state: StageState
    layers: range
    """The group that the pass needs next."""
    addresses: NDArray[np.int64] | None = None
    """READY: of each row, where it would begin if all its layers lay there."""
    lost: int | None = None
    """LOST: the first of the rows, by its place among them, that cannot be had."""


@dataclass(eq=False, slots=True)
class Staging:
    """The rows of one pass on their way through staging memory. Changed by its stager alone."""

    records: list[Record]
    groups: list[range]
    """Runs of layers, each but the last as long as the first."""
    moved_at: float
    """When a read last began or ended."""
    group: int = 0
    """The next one that the pass needs; those before it are used up."""
    asked: int = 0
    """Reads that have been asked for, group after group, row after row."""
    starts: list[list[int]] = field(default_factory=list)
    """By group, the unit of memory at which each row that has been asked for starts."""
    pending: Counter[int] = field(default_factory=Counter)
    """Reads asked for and not ended, by group."""
    refused: list[StagedRead] = field(default_factory=list)
    """Those of them that the shelf has not taken, to be offered again at `retry_at`."""
    retry_at: float = 0.0
    lost: int | None = None
    over: bool = False
    """Abandoned, or used up."""

    def lose(self, row: int) -> None:
        """A row cannot be had."""
        self.lost = row if self.lost is None else min(row, self.lost)


class StagedRead(NamedTuple):
    """A run of slices of one row that is read, or waits for it."""

    staging: Staging
    group: int
    row: int
    start: int
    unit_count: int
