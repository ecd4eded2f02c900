"""Demotion: copies of sealed blocks on their way down, DRAM when a block seals, NVMe by policy, and drains on request.

Wishes are queued by hash only, so a waiting wish holds no memory of any tier; a wish whose block is gone is dropped.
While a write is in flight its source is held: a slot of HBM, or a lease on a DRAM row. Owned by the store, runs on the
engine thread; the shelves' workers move the bytes.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

from kvtier.block import BlockHash, Tier
from kvtier.metrics import Metrics
from kvtier.resident import ResidentBlocks
from kvtier.shelf import Lease, Record, Shelf, ShelfDone, ShelfOutcome, WriteItem
from kvtier.tiers.hbm import HbmArena

WISHES_MAX = 65536
"""Wishes that may wait per target tier; a later one is dropped and counted."""
BATCH_ROWS = 64
RETRY_S = 0.1
"""A shelf that has refused a write is asked again after this long, or once one of its writes has ended."""
BACK_S = 0.02
BACK_ROWS = 256
"""With policy `back`, this many of the coldest DRAM rows are looked at so often."""
BACK_SHARE = 0.9
"""With policy `back`, DRAM rows are copied to NVMe once this share of the DRAM shelf is used."""


class NvmePolicy(enum.Enum):
    """When rows are written to NVMe."""

    THROUGH = "through"
    """Once they are sealed."""
    SELECTIVE = "selective"
    """Once they have been used again."""
    BACK = "back"
    """When DRAM is about to let them go."""


@dataclass(frozen=True, slots=True)
class _Write:
    block_hash: BlockHash
    depth: int
    slot: int | None
    lease: Lease | None
    started_at: float


class Demoter:
    """Queues, starts and completes the writes to the shelves."""

    def __init__(
        self,
        resident: ResidentBlocks,
        arena: HbmArena,
        shelves: dict[Tier, Shelf],
        policy: NvmePolicy,
        metrics: Metrics,
    ) -> None:
        self._resident = resident
        self._arena = arena
        self._shelves = shelves
        self._policy = policy
        self._metrics = metrics
        self._wishes: dict[Tier, dict[BlockHash, int]] = {Tier.DRAM: {}, Tier.NVME: {}}
        self._writes: dict[tuple[Tier, int], _Write] = {}
        self._writing: dict[Tier, set[BlockHash]] = {Tier.DRAM: set(), Tier.NVME: set()}
        self._retry_at = {Tier.DRAM: 0.0, Tier.NVME: 0.0}
        self._back_at = 0.0
        self.dropped_count = 0

    @property
    def writing_count(self) -> int:
        """Rows being written."""
        return len(self._writes)

    def frees_slots(self, since: float) -> bool:
        """A write started after `since` is all that holds some slot of HBM: it becomes evictable when the write ends."""
        return any(
            write.started_at > since and write.slot is not None and self._resident.holds(write.slot) == 1
            for write in self._writes.values()
        )

    @property
    def wish_count(self) -> int:
        """Rows waiting to be written."""
        return sum(len(wishes) for wishes in self._wishes.values())

    def sealed(self, block_hash: BlockHash, depth: int) -> None:
        """A block has just become immutable in HBM (computed, or promoted from NVMe)."""
        self.wish(Tier.DRAM, block_hash, depth)
        if self._policy is NvmePolicy.THROUGH:
            self.wish(Tier.NVME, block_hash, depth)

    def used(self, block_hash: BlockHash, depth: int) -> None:
        """A sealed block has been matched by a later sequence."""
        if self._policy is NvmePolicy.SELECTIVE:
            self.wish(Tier.NVME, block_hash, depth)

    def wish(self, tier: Tier, block_hash: BlockHash, depth: int) -> None:
        """Ask for a copy on `tier`; nothing happens if it is there, being made, or the tier is off."""
        shelf = self._shelves.get(tier)
        if shelf is None or block_hash in self._writing[tier] or shelf.holds(block_hash):
            return
        wishes = self._wishes[tier]
        if len(wishes) >= WISHES_MAX:
            self.dropped_count += 1
            return
        wishes.setdefault(block_hash, depth)

    def pump(self, now: float) -> None:
        """Start as many wished writes as the shelves take, and wish for what the policy wants."""
        self._wish_back(now)
        for tier in (Tier.DRAM, Tier.NVME):
            while self._wishes[tier] and now >= self._retry_at[tier] and self._start(tier, now):
                pass

    def completed(self, tier: Tier, done: ShelfDone) -> None:
        """A write to a shelf has ended, well or not; its source is free again."""
        write = self._writes.pop((tier, done.ticket))
        self._writing[tier].discard(write.block_hash)
        self._retry_at[tier] = 0.0
        source = self._free(write)
        if done.outcome is ShelfOutcome.DONE:
            slot = self._resident.find(write.block_hash)
            if slot is not None:  # the row is as old as the block, or writing late would make it outlive its parents
                self._shelves[tier].stamp([write.block_hash], self._resident.last_use(slot))
            self._metrics.moved(source, tier, 1, done.moved_bytes)
            self._metrics.transfer_seconds.observe(done.duration_ns / 1e9, source.value, tier.value)

    def drain(self, tier: Tier, give_up: bool) -> bool:
        """Push what nobody holds in `tier` one tier down and let go of it there; True once nothing is left to push.

        Called again after each completion. `give_up` lets go of what could not be copied.
        """
        assert tier is not Tier.NVME
        return self._drain_hbm(give_up) if tier is Tier.HBM else self._drain_dram(give_up)

    def holds(self) -> list[int]:
        """One entry for each hold on a slot of HBM that writes have (for `Store.check`)."""
        return [write.slot for write in self._writes.values() if write.slot is not None]

    def _start(self, tier: Tier, now: float) -> bool:
        """Submit one batch of wishes; False if the shelf takes no more for now: what it refused goes on waiting."""
        wishes, shelf = self._wishes[tier], self._shelves[tier]
        writes: list[_Write] = []
        for block_hash, depth in list(itertools.islice(wishes.items(), BATCH_ROWS)):
            write = self._source(tier, block_hash, depth, now)
            if write is None:
                del wishes[block_hash]
                self.dropped_count += 1
            else:
                writes.append(write)
        tickets = shelf.write([self._item(write) for write in writes], now)
        refused = False
        for write, ticket in zip(writes, tickets, strict=True):
            if ticket is not None:
                self._writes[(tier, ticket)] = write
                self._writing[tier].add(write.block_hash)
            else:
                self._free(write)
                if not shelf.holds(write.block_hash):
                    refused = True
                    continue
            del wishes[write.block_hash]
        if refused:
            self._retry_at[tier] = now + RETRY_S
        return not refused

    def _source(self, tier: Tier, block_hash: BlockHash, depth: int, now: float) -> _Write | None:
        """Hold the bytes of a block: its DRAM row when NVMe is the target, else its slot of HBM."""
        if tier is Tier.NVME and (lease := self._lease(block_hash)) is not None:
            return _Write(block_hash, depth, None, lease, now)
        slot = self._resident.find(block_hash)
        if slot is None:
            return None
        self._resident.hold([slot])
        return _Write(block_hash, depth, slot, None, now)

    def _lease(self, block_hash: BlockHash) -> Lease | None:
        dram = self._shelves.get(Tier.DRAM)
        if dram is None or not (records := dram.find([block_hash])):
            return None
        return dram.acquire(records)[0]

    def _item(self, write: _Write) -> WriteItem:
        if write.lease is not None:
            dram = self._shelves[Tier.DRAM]
            return WriteItem(write.block_hash, write.depth, dram.view(write.lease), write.lease.record.sums)
        assert write.slot is not None
        return WriteItem(write.block_hash, write.depth, self._arena.view(write.slot), None)

    def _free(self, write: _Write) -> Tier:
        """Let go of the source of a write; returns the tier it was in."""
        if write.lease is not None:
            self._shelves[Tier.DRAM].release([write.lease])
            return Tier.DRAM
        assert write.slot is not None
        self._resident.release([write.slot])
        return Tier.HBM

    def _wish_back(self, now: float) -> None:
        """Policy `back`: keep the coldest DRAM rows copied, a bounded number ahead of their eviction."""
        dram, nvme = self._shelves.get(Tier.DRAM), self._shelves.get(Tier.NVME)
        if self._policy is not NvmePolicy.BACK or dram is None or nvme is None or now < self._back_at:
            return
        self._back_at = now + BACK_S
        excess = min(dram.used_count - int(BACK_SHARE * dram.slot_count), BACK_ROWS)
        if excess > 0:
            for record in dram.coldest(excess):
                self.wish(Tier.NVME, record.block_hash, record.depth)

    def _drain_hbm(self, give_up: bool) -> bool:
        below = [tier for tier in (Tier.DRAM, Tier.NVME) if tier in self._shelves]
        idle = self._resident.coldest(self._resident.slot_count)
        gone, waiting = [], 0
        for slot in idle:
            block_hash = self._resident.hash_of(slot)
            assert block_hash is not None
            if not below or give_up or any(self._shelves[tier].holds(block_hash) for tier in below):
                gone.append(slot)
            else:
                self.wish(below[0], block_hash, self._resident.depth_of(slot))
                waiting += 1
        self._resident.evict(gone)
        return give_up or (waiting == 0 and not self.holds())

    def _drain_dram(self, give_up: bool) -> bool:
        dram, nvme = self._shelves.get(Tier.DRAM), self._shelves.get(Tier.NVME)
        if dram is None:
            return True
        gone: list[Record] = []
        waiting = 0
        for record in dram.coldest(dram.slot_count):
            if nvme is None or give_up or nvme.holds(record.block_hash):
                gone.append(record)
            else:
                self.wish(Tier.NVME, record.block_hash, record.depth)
                waiting += 1
        dram.drop(gone, "evicted")
        leased = any(write.lease is not None for write in self._writes.values())
        coming = self._wishes[Tier.DRAM] or self._writing[Tier.DRAM]
        return give_up or (waiting == 0 and not leased and not coming)
