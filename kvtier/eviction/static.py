"""Policies that learn nothing: least recently used, and a small queue for the new in the manner of S3-FIFO.

Both are plain functions of a block's record. Called by the queue.
"""

from __future__ import annotations

import math

from kvtier.eviction.base import BlockUse

PROBATION_SHARE = 0.1
"""Of the capacity, for blocks used once: as in S3-FIFO."""


class LeastRecentlyUsed:
    """Oldest use first."""

    name = "lru"
    ghost_share = 0.0

    def __init__(self, capacity: int) -> None:
        """The same for every capacity."""

    def group(self, use: BlockUse) -> int:  # noqa: ARG002
        """One for all."""
        return 0

    def value(self, group: int, age_s: float, share: float) -> float:  # noqa: ARG002
        """The younger the better."""
        return -age_s

    def learn(self, left: int | None, idle_s: float, entered: int) -> None:
        """Nothing."""


class SmallQueueFirst:
    """Blocks used once pass through a tenth of the tier; those used again, here or after they had gone, get the rest.

    S3-FIFO (Yang et al., SOSP 2023) keeps its queues in order of arrival, which would evict the head of a chain before
    its tail; ours are in order of last use, and a tenth that is not full competes with the rest by age.
    """

    name = "s3fifo"
    ghost_share = 1.0

    def __init__(self, capacity: int) -> None:
        """The same for every capacity."""

    def group(self, use: BlockUse) -> int:
        """0 for those used once, 1 for the rest."""
        return int(use.uses > 1)

    def value(self, group: int, age_s: float, share: float) -> float:
        """Nothing for the first group while it is too large, else the younger the better."""
        return -math.inf if group == 0 and share > PROBATION_SHARE else -age_s

    def learn(self, left: int | None, idle_s: float, entered: int) -> None:
        """Nothing."""
