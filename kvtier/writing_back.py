"""Writing back: which rows of DRAM are copied to NVMe under policy `back`, a little before DRAM lets them go.

Owned by the demoter, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.block import Tier
from kvtier.record import Record
from kvtier.shelf import Shelf

BACK_S = 0.1
BACK_ROWS = 256
"""This many of the coldest DRAM rows are looked at so often."""
BACK_SHARE = 0.9
"""DRAM rows are copied to NVMe once this share of the DRAM shelf is used."""


class WritingBack:
    """See the module."""

    def __init__(self, shelves: Mapping[Tier, Shelf]) -> None:
        self._shelves = shelves
        self._next_at = 0.0

    def due(self, now: float) -> Sequence[Record]:
        """The coldest rows of DRAM, a bounded number ahead of their eviction; none if it was asked just now."""
        dram = self._shelves.get(Tier.DRAM)
        if dram is None or Tier.NVME not in self._shelves or now < self._next_at:
            return ()
        self._next_at = now + BACK_S
        excess = min(dram.used_count - int(BACK_SHARE * dram.slot_count), BACK_ROWS)
        return dram.coldest(excess) if excess > 0 else ()
