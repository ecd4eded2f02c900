"""Ages in logarithmic buckets, and what keeping a block of some age is worth if reuse ages are distributed like that.

Pure arithmetic over counts. Used by the reuse policy.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Counts: TypeAlias = NDArray[np.float64]

FIRST_EDGE_S = 0.125
BUCKET_COUNT = 48
"""Two an octave: the last one begins at 12 days."""
EDGES_S: Counts = FIRST_EDGE_S * 2.0 ** (np.arange(BUCKET_COUNT) / 2)
"""Where each bucket ends."""
_FROM_START = np.tri(BUCKET_COUNT, dtype=bool).T
"""[start, end]: whether the end is not before the start."""
WIDTHS_S: Counts = np.diff(EDGES_S, prepend=0.0)


def bucket_of(age_s: float) -> int:
    """Bucket of an age; what is older than all is in the last."""
    if age_s < FIRST_EDGE_S:
        return 0
    mantissa, exponent = math.frexp(age_s / FIRST_EDGE_S)  # mantissa in [0.5, 1)
    return min(2 * exponent - 1 + (mantissa >= math.sqrt(0.5)), BUCKET_COUNT - 1)


def reuse_index(reuses: Counts, entries: Counts) -> Counts:
    """Reuses per second of space, at the best time to give up, of a block that has reached each age.

    `reuses` [group, bucket] counts those used again by the age at which they were, `entries` [group] all. Returns
    [group, bucket]: max over T of P(reused in the next T | not yet) / E[seconds it stays meanwhile], the index of
    Gittins ("Bandit processes and dynamic allocation indices", 1979) for the choice of when to stop waiting.
    """
    used = np.cumsum(reuses, axis=1)  # [group, bucket]: by the end of the bucket
    left = np.maximum(entries[:, None] - np.pad(used, ((0, 0), (1, 0))), 1e-9)  # [group, bucket + 1]: at its start
    spent_s = np.cumsum((left[:, :-1] + left[:, 1:]) / 2 * WIDTHS_S, axis=1)
    used_before, spent_before_s = (np.pad(sums[:, :-1], ((0, 0), (1, 0)))[:, :, None] for sums in (used, spent_s))
    rates = (used[:, None] - used_before) / np.maximum(spent_s[:, None] - spent_before_s, 1e-12)  # [group, start, end]
    index: Counts = np.where(_FROM_START, rates, -np.inf).max(axis=2)
    return index
