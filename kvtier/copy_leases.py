"""Leases on rows of DRAM that wait to be copied to NVMe, so that DRAM does not evict them before they have been.

Bounded: a share of DRAM's rows, each for a few seconds, and no more of them while NVMe takes nothing or a streamed
sequence lacks rows. Then what has none is copied all the same if it is still there. Owned by the demoter, on the engine
thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.block import BlockHash, Tier
from kvtier.record import Lease
from kvtier.shelf import Shelf

KEPT_SHARE = 0.5
"""Of the rows of DRAM, those that may be kept at once. Blocks behind them wait in HBM, where they may be evicted."""
KEPT_S = 5.0
"""A row is kept no longer than this, whatever becomes of its copy."""
STANDING_S = 1.0
"""Once no write to NVMe has ended well for so long, no more rows are kept until one does."""
LACKING_S, LACKING_GAP_S = 1.0, 2.0
"""A streamed sequence that could not have its rows for so long gets those that are kept; it asks at least so often."""


class CopyLeases:
    """See the module. Its length is that of the leases that it has. Call `settle` after each poll of the shelves."""

    def __init__(self, shelves: Mapping[Tier, Shelf]) -> None:
        self._shelves = shelves
        self._coming: set[BlockHash] = set()
        """Being written to DRAM, to be leased once they are there."""
        self._kept: dict[BlockHash, tuple[Lease, float]] = {}
        """With the time until which, the earliest first."""
        self._over: list[Lease] = []
        """To be given back, all at once."""
        self._waits_since: float | None = None
        """When NVMe was last seen to get on while rows were kept; None: none was."""
        self._lacked_from = self._lacked_at = -LACKING_GAP_S

    def __len__(self) -> int:
        return len(self._kept) + len(self._over)

    def held(self, tier: Tier) -> int:
        """Leases on rows of a tier."""
        return len(self) if tier is Tier.DRAM else 0

    def blocks(self) -> set[BlockHash]:
        """Those whose rows are kept."""
        return set(self._kept)

    def may_keep(self, now: float) -> bool:
        """Whether rows are kept now: those of blocks that are written to DRAM, as soon as there is room."""
        dram = self._shelves.get(Tier.DRAM)
        if dram is None or dram.is_lost or Tier.NVME not in self._shelves or self._makes_way(now):
            return False
        return self._waits_since is None or now - self._waits_since <= STANDING_S

    @property
    def is_full(self) -> bool:
        """As many rows are kept as may be at once."""
        rows_max = max(1, int(KEPT_SHARE * self._shelves[Tier.DRAM].slot_count))
        return len(self._kept) + len(self._coming) >= rows_max

    def expect(self, block_hash: BlockHash) -> None:
        """A block is written to DRAM such that its row is leased at once; `arrived` tells how that ends."""
        self._coming.add(block_hash)

    def expects(self, block_hash: BlockHash) -> bool:
        """A block is to be leased once it is written to DRAM."""
        return block_hash in self._coming

    def arrived(self, block_hash: BlockHash, lease: Lease | None, now: float) -> None:
        """The write of a block to DRAM has ended, with a lease if one was expected and it went well."""
        self._coming.discard(block_hash)
        if lease is not None:
            self.keep(lease, now)

    def keep(self, lease: Lease, now: float) -> None:
        """Take a lease over: its block or the time ends it."""
        self.end(lease.record.block_hash)
        self._kept[lease.record.block_hash] = lease, now + KEPT_S
        if self._waits_since is None:
            self._waits_since = now

    def copied(self, block_hash: BlockHash, now: float) -> None:
        """A write to NVMe has ended well."""
        self.end(block_hash)
        self._waits_since = now if self._kept else None

    def end(self, block_hash: BlockHash) -> None:
        """A block does not wait for NVMe any more."""
        kept = self._kept.pop(block_hash, None)
        if kept is not None:
            self._over.append(kept[0])

    def settle(self, now: float) -> None:
        """Give back what is over, by its block or its time; all if nothing can come of it any more."""
        if self._kept and (self._shelves[Tier.DRAM].is_lost or Tier.NVME not in self._shelves):
            self.end_all()
        while self._kept and next(iter(self._kept.values()))[1] <= now:
            self.end(next(iter(self._kept)))
        self._give_back()

    def end_all(self) -> None:
        """Let go of all."""
        for block_hash in list(self._kept):
            self.end(block_hash)
        self._give_back()

    def lacking(self, now: float) -> None:
        """A streamed sequence could not have its rows, and no other one has any that will come back."""
        if now - self._lacked_at > LACKING_GAP_S:
            self._lacked_from = now
        self._lacked_at = now
        if self._makes_way(now):
            self.end_all()

    def _give_back(self) -> None:
        if self._over:
            over, self._over = self._over, []
            self._shelves[Tier.DRAM].holdings.end_leases(over)

    def _makes_way(self, now: float) -> bool:
        lacks = now - self._lacked_at <= LACKING_GAP_S
        return lacks and self._lacked_at - self._lacked_from > LACKING_S
