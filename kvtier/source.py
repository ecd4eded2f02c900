"""Where the bytes of a write to a shelf come from: a slot of HBM that is held, or a leased DRAM row.

Owns the claims on both, and with the bytes what is asked for the block. Knows no queue and no policy. Used by the
demoter, on the engine thread.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvtier.block import BlockHash, Tier
from kvtier.record import Lease
from kvtier.resident import ResidentBlocks
from kvtier.retention import PLAIN, Retention, retention_of
from kvtier.shelf import Shelf, WriteItem
from kvtier.tiers.arena import Arena


@dataclass(frozen=True, slots=True)
class Write:
    """A block to write, its source claimed: one of `slot` and `lease`."""

    block_hash: BlockHash
    depth: int
    slot: int | None
    lease: Lease | None
    retention: Retention
    """What is asked for the block."""
    started_at: float


class Sources:
    """Claims and frees the sources of writes."""

    def __init__(self, resident: ResidentBlocks, arena: Arena, shelves: dict[Tier, Shelf]) -> None:
        self._resident = resident
        self._arena = arena
        self._shelves = shelves

    def claim(self, target: Tier, block_hash: BlockHash, depth: int, now: float) -> Write | None:
        """A block's bytes: its DRAM row when NVMe is the target and there is DRAM, else its slot of HBM. None: gone."""
        slot = self._resident.find(block_hash)
        asked = PLAIN if slot is None else self._resident.retention_of(slot)
        dram = self._shelves.get(Tier.DRAM)
        if target is not Tier.NVME or dram is None:
            if slot is None:
                return None
            self._resident.hold([slot])
            return Write(block_hash, depth, slot, None, asked, now)
        records = dram.find([block_hash])
        lease = dram.acquire(records)[0] if records else None
        if lease is None:
            return None
        # A pin that was over DRAM's budget, or a request that DRAM's row does not know of yet, still counts on NVMe.
        return Write(block_hash, depth, None, lease, retention_of(lease.record).raised(asked), now)

    def item(self, write: Write, leased: bool) -> WriteItem:
        """What a shelf is given to write; `leased`: from HBM, to be leased once it is there."""
        if write.lease is not None:
            dram = self._shelves[Tier.DRAM]
            row, intact = dram.view(write.lease), functools.partial(dram.intact, write.lease)
            return WriteItem(write.block_hash, write.depth, row, write.lease.record.sums, write.retention, intact)
        assert write.slot is not None
        place = self._arena.view(write.slot)
        return WriteItem(write.block_hash, write.depth, place, None, write.retention, leased=leased)

    def free(self, write: Write) -> Tier:
        """Let go of the source of a write; returns the tier it was in."""
        if write.lease is not None:
            self._shelves[Tier.DRAM].release([write.lease])
            return Tier.DRAM
        assert write.slot is not None
        self._resident.release([write.slot])
        return Tier.HBM
