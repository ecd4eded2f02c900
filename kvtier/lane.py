"""The reads of one tier: how many are under way, when one last ended, and whether the tier has gone silent.

Books only. The promoter tells it of reads that start and end, and learns from it how long batches took and whether a
tier that is thought slow or silent should be tried with a single row. Time is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.block import Tier

PROBE_S = 1.0
"""A tier that is not read because it seems slow or silent is tried with one row this often, while it is asked for."""
HUNG_PROBE_S = 5.0
"""A probe that has not ended for so long is given up for another one."""


@dataclass(eq=False, slots=True)
class Batch:
    """Rows whose reads were started together."""

    rows: int
    """Those and the rows under way before them: what had to be read until the last of them was there."""
    left: int
    started_at: float
    expected_s: float
    ended_at: float = 0.0
    whole: bool = True
    """None has failed."""


class Lane:
    """See the module."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.live = 0
        """Reads under way that have not been given up."""
        self.moved_at = -math.inf
        """When a read last ended, or began with none under way."""
        self.silent = False
        """Somebody has waited in vain, and no read has ended well since."""
        self._tried_at = -math.inf
        self._probing = False

    def __repr__(self) -> str:
        return f"Lane({self.tier.value}, live={self.live}, silent={self.silent})"

    def start(self, rows: int, expected_s: float, now: float) -> Batch:
        """`rows` more are being read."""
        if self.live == 0:
            self.moved_at = now
        self.live += rows
        return Batch(self.live, rows, now, expected_s)

    def end(self, batch: Batch, late: bool, well: bool, ended_at: float, now: float) -> bool:
        """A row, `late` if it was given up, is there or has failed; True if that ends a batch of which none failed."""
        self.live -= not late
        batch.left -= 1
        batch.whole &= well
        batch.ended_at = max(batch.ended_at, ended_at)
        if well:
            self.moved_at = self._tried_at = now
            self.silent = self._probing = False
        return batch.left == 0 and batch.whole

    def give_up(self, rows: int) -> None:
        """Somebody waits no longer for this tier, and nobody for `rows` of what is under way."""
        self.live -= rows
        self.silent = True

    def probe_due(self, now: float) -> bool:
        """Whether one row should be read though nobody waits for it. It counts as begun."""
        if (self.live > 0 and not self.silent) or now - self._tried_at < (HUNG_PROBE_S if self._probing else PROBE_S):
            return False
        self._tried_at, self._probing = now, True
        return True
