"""The policy that learns when blocks come back, and keeps those that earn their space soonest.

Blocks are grouped by how often they were used. For each group the ages at which its blocks were used again are counted,
kept or not; the value of a block is its expected reuse per second of space. No clock, no block: counts only.
"""

from __future__ import annotations

import numpy as np

from kvtier.eviction.ages import BUCKET_COUNT, bucket_of, reuse_index
from kvtier.eviction.base import BlockUse

GROUP_COUNT = 5
"""Used once, twice, three and four times, more often."""
REFRESH_USES = 1024
HALF_LIFE_TURNS = 16
"""After so many uses for each block of capacity, what was learned counts half."""
SHRINK_ENTRIES = 50.0
"""A group is believed to be like all others until it has seen more blocks than this."""
PRIOR_REUSE = 0.5
"""Before anything is known: this share comes back, at any order of magnitude of age alike. Evicts like LRU."""


class ExpectedReuse:
    """Lowest first: the Gittins index of a block's age, by how often it was used."""

    name = "reuse"
    ghost_share = 4.0

    def __init__(self, capacity: int) -> None:
        """`capacity` in blocks sets how fast old lessons fade."""
        self._decay = 0.5 ** (REFRESH_USES / (HALF_LIFE_TURNS * max(capacity, REFRESH_USES)))
        self._reuses = [[0.0] * BUCKET_COUNT for _ in range(GROUP_COUNT)]
        self._entries = [0.0] * GROUP_COUNT
        self._uses_until_refresh = REFRESH_USES
        self._values = self._evaluate()

    def group(self, use: BlockUse) -> int:
        """Number of uses less one, up to the last group."""
        uses = use.uses
        return uses - 1 if uses < GROUP_COUNT else GROUP_COUNT - 1

    def value(self, group: int, age_s: float, share: float) -> float:  # noqa: ARG002
        """Expected reuses per second of space."""
        return self._values[group][bucket_of(age_s)]

    def learn(self, left: int | None, idle_s: float, entered: int) -> None:
        """Count, and now and then draw the conclusions."""
        if left is not None:
            self._reuses[left][bucket_of(idle_s)] += 1.0
        self._entries[entered] += 1.0
        self._uses_until_refresh -= 1
        if self._uses_until_refresh == 0:
            self._uses_until_refresh = REFRESH_USES
            self._values = self._evaluate()
            self._reuses = [[count * self._decay for count in row] for row in self._reuses]
            self._entries = [count * self._decay for count in self._entries]

    def _evaluate(self) -> list[list[float]]:
        """Values by group and bucket: never more for age or for fewer uses, so that no block outlives one it stands on.

        Where the index itself rises with age, just before blocks usually come back, giving that up cost no hits.
        """
        reuses, entries = np.array(self._reuses), np.array(self._entries)
        prior = PRIOR_REUSE / BUCKET_COUNT
        common = (reuses.sum(axis=0) + prior) / (entries.sum() + 1.0)
        index = reuse_index(reuses + SHRINK_ENTRIES * common, entries + SHRINK_ENTRIES)
        falling = np.minimum.accumulate(index, axis=1)
        values: list[list[float]] = np.maximum.accumulate(falling, axis=0).tolist()
        return values
