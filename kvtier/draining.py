"""Drains: pushing what nobody holds in a tier one tier down, and letting go of it there, because somebody asks for it.

Wishes for copies and looks again after each completion whether they are there; what comes after the first look stays.
Owned by the store, on the engine thread.
"""

from __future__ import annotations

from collections import Counter

from kvtier.block import BlockHash, Tier
from kvtier.demotion import Demoter
from kvtier.record import Record
from kvtier.resident import ResidentBlocks
from kvtier.shelf import Shelf


class Draining:
    """See the module."""

    def __init__(self, resident: ResidentBlocks, shelves: dict[Tier, Shelf], demoter: Demoter) -> None:
        self._resident = resident
        self._shelves = shelves
        self._demoter = demoter
        self._left: dict[Tier, set[BlockHash]] = {}
        """Of each tier that is being drained."""

    def __len__(self) -> int:
        return len(self._left)

    def forget(self, tier: Tier) -> None:
        """A shelf is lost: there is nothing to drain."""
        self._left.pop(tier, None)

    def drain(self, tier: Tier, give_up: bool) -> bool:
        """Push what nobody holds in `tier` one tier down and let go of it there; True once nothing is left to push.

        Called again after each completion; what comes after the first call stays. `give_up` lets go of what could not
        be copied.
        """
        assert tier is not Tier.NVME
        if tier is not Tier.HBM and tier not in self._shelves:
            return True
        left = self._left.get(tier)
        if left is None:
            left = self._left[tier] = self._resident_idle() if tier is Tier.HBM else self._shelved(tier)
        self._drain_hbm(left, give_up) if tier is Tier.HBM else self._drain_dram(left, give_up)
        if left and not give_up:
            return False
        del self._left[tier]
        return True

    def _resident_idle(self) -> set[BlockHash]:
        """Sealed blocks of HBM that no sequence holds; those only a write still holds count."""
        slots = self._resident.coldest(self._resident.slot_count)
        slots += [slot for slot, count in Counter(self._demoter.holds()).items() if self._resident.holds(slot) == count]
        return {block_hash for slot in slots if (block_hash := self._resident.hash_of(slot)) is not None}

    def _shelved(self, tier: Tier) -> set[BlockHash]:
        """Blocks on a shelf, those on their way to it included."""
        shelf = self._shelves[tier]
        there = {record.block_hash for record in shelf.coldest(shelf.slot_count)}
        kept = self._demoter.leased() | self._demoter.copy_leases.blocks()
        return there | kept | self._demoter.awaited(tier)

    def _drain_hbm(self, left: set[BlockHash], give_up: bool) -> None:
        below = [tier for tier in (Tier.DRAM, Tier.NVME) if tier in self._shelves]
        writing = Counter(self._demoter.holds())
        gone: list[int] = []
        for block_hash in list(left):
            slot = self._resident.find(block_hash)
            copied = not below or give_up or any(self._shelves[tier].holds(block_hash) for tier in below)
            if slot is None or self._resident.holds(slot) > writing[slot]:  # a sequence has taken it again
                left.discard(block_hash)
            elif not copied:
                self._demoter.wish(below[0], block_hash, self._resident.depth_of(slot))
            elif self._resident.holds(slot) == 0:
                gone.append(slot)
                left.discard(block_hash)
        self._resident.evict(gone)

    def _drain_dram(self, left: set[BlockHash], give_up: bool) -> None:
        dram, nvme = self._shelves[Tier.DRAM], self._shelves.get(Tier.NVME)
        awaited, leased = self._demoter.awaited(Tier.DRAM), self._demoter.leased()
        gone: list[Record] = []
        for block_hash in list(left):
            records = dram.find([block_hash])
            if not records:
                if block_hash not in awaited:
                    left.discard(block_hash)
            elif nvme is not None and not give_up and not nvme.holds(block_hash):
                self._demoter.wish(Tier.NVME, block_hash, records[0].depth)
            elif block_hash not in leased:
                gone += records
                left.discard(block_hash)
        dram.drop(gone, "evicted")
