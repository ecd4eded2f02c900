"""What is under way to sequences: a `Fetch` for each sequence that waits, an `Arrival` for each block that is read.

A fetch is one sequence's claim on a run of blocks, some resident already, some arriving. Values and their links only:
the promoter changes them, the scheduler asks a fetch whether it is ready. Time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from kvtier.block import BlockHash, Tier
from kvtier.lane import Batch, Lane
from kvtier.retention import Retention


@dataclass(eq=False, slots=True)
class Fetch:
    """Blocks on their way to one sequence, first to last. Every listed slot carries one hold that the fetch owns."""

    lanes: dict[Tier, Lane]
    limit: float
    """Monotonic seconds after which what is still pending counts as a miss."""
    patience_s: float
    """What is pending also counts as a miss once its tier has given nothing for so long."""
    slots: list[int] = field(default_factory=list)
    origins: list[Tier | None] = field(default_factory=list)
    """Where each block came from; None while it is under way or once it is lost."""
    pending: dict[int, Arrival] = field(default_factory=dict)
    """Places still under way."""
    awaited: Counter[Tier] = field(default_factory=Counter)
    """How many of them are read from which tier."""
    closed: bool = False

    @property
    def deadline(self) -> float:
        """When, as things stand, what is pending counts as a miss."""
        silent_at = min((self.silent_at(tier) for tier, count in self.awaited.items() if count), default=math.inf)
        return min(self.limit, silent_at)

    def silent_at(self, tier: Tier) -> float:
        """When a tier has given nothing for longer than this fetch has patience."""
        return self.lanes[tier].moved_at + self.patience_s

    def is_ready(self, now: float) -> bool:
        """Nothing to wait for any more: all arrived or lost, or it takes too long."""
        return not self.pending or now >= self.deadline

    def wait_for(self, place: int, arrival: Arrival) -> None:
        """A block of this fetch is under way."""
        arrival.waiting.append((self, place))
        self.pending[place] = arrival
        self.awaited[arrival.tier] += 1

    def wait_no_longer(self, place: int) -> None:
        """A block is there, or lost."""
        arrival = self.pending.pop(place, None)
        if arrival is not None:
            self.awaited[arrival.tier] -= 1


@dataclass(eq=False, slots=True)
class Arrival:
    """One block being read into one slot; holds that slot itself until the read has completed."""

    block_hash: BlockHash
    depth: int
    slot: int
    tier: Tier
    retention: Retention
    started_at: float
    batch: Batch | None = None
    late: bool = False
    """Somebody has given it up."""
    waiting: list[tuple[Fetch, int]] = field(default_factory=list)
