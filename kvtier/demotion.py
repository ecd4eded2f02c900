"""Demotion: copies of sealed blocks on their way down, to DRAM when a block seals, to NVMe by policy.

Wishes are queued by hash only, so a waiting wish holds no memory of any tier; a wish whose block is gone is dropped.
While a write is in flight its source is held (`Sources`). With a DRAM shelf, NVMe is written from its rows alone, so
that a hung disk keeps no HBM. Owned by the store, runs on the engine thread.
"""

from __future__ import annotations

import enum
import itertools
import math
import time
from collections.abc import Callable

from kvtier.block import BlockHash, Tier
from kvtier.metrics import Metrics
from kvtier.resident import ResidentBlocks
from kvtier.shelf import Shelf, ShelfDone, ShelfOutcome
from kvtier.source import Sources, Write
from kvtier.tiers.arena import Arena

WISHES_MAX = 65536
"""Wishes that may wait per target tier; a later one is dropped and counted."""
BATCH_ROWS = 64
RETRY_S, RETRY_SHARE, RETRY_MAX_S = 0.1, 0.1, 5.0
"""A shelf that has refused a write is asked again after this long, then after this share of the time for which it has
taken nothing, or once one of its writes has ended."""
STUCK_S = 1.0
"""At the end: what moves for so long no more is left behind."""
PAUSE_S = 0.001
BACK_S = 0.1
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


class Demoter:
    """Queues, starts and completes the writes to the shelves."""

    def __init__(
        self,
        resident: ResidentBlocks,
        arena: Arena,
        shelves: dict[Tier, Shelf],
        policy: NvmePolicy,
        metrics: Metrics,
    ) -> None:
        self._resident = resident
        self._sources = Sources(resident, arena, shelves)
        self._shelves = shelves
        self._policy = policy
        self._metrics = metrics
        self._wishes: dict[Tier, dict[BlockHash, int]] = {Tier.DRAM: {}, Tier.NVME: {}}
        self._writes: dict[tuple[Tier, int], Write] = {}
        self._writing: dict[Tier, set[BlockHash]] = {Tier.DRAM: set(), Tier.NVME: set()}
        self._onward: set[BlockHash] = set()
        """On their way to DRAM, and wanted on NVMe from there."""
        self._retry_at = dict.fromkeys(Tier, 0.0)
        self._stands_since: dict[Tier, float] = {}
        """Of the shelves that have taken nothing when they were asked last: since when."""
        self._back_at = 0.0
        self.dropped_count = 0

    @property
    def writing_count(self) -> int:
        """Rows being written."""
        return len(self._writes)

    def frees_slots(self, since: float) -> bool:
        """A write started after `since` is all that holds some slot of HBM, which becomes evictable when it ends."""
        return any(
            write.started_at > since and write.slot is not None and self._resident.holds(write.slot) == 1
            for write in self._writes.values()
        )

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
        if shelf is None or shelf.holds(block_hash):
            return
        dram = self._shelves.get(Tier.DRAM)
        if tier is Tier.NVME and dram is not None and not dram.holds(block_hash):
            self._onward.add(block_hash)
            tier = Tier.DRAM
        if block_hash in self._writing[tier]:
            return
        wishes = self._wishes[tier]
        if len(wishes) >= WISHES_MAX:
            self._drop(block_hash)
            return
        wishes.setdefault(block_hash, depth)

    def pump(self, now: float) -> None:
        """Start as many wished writes as the shelves take, and wish for what the policy wants."""
        self._wish_back(now)
        for tier in (Tier.NVME, Tier.DRAM):  # a lease keeps a row that a DRAM write would evict
            while (
                self._wishes[tier]
                and (now >= self._retry_at[tier] or self._shelves[tier].supplied)
                and self._start(tier, now)
            ):
                pass

    def finish(self, poll: Callable[[float], None], end: float) -> None:
        """Call `poll`, which pumps, until all that was wished is written, nothing moves any more, or it is `end`."""
        left, moved_at = (0, 0), time.monotonic()
        while (now := time.monotonic()) < end:
            poll(now)
            before, left = left, (sum(map(len, self._wishes.values())), self.writing_count)
            if left == (0, 0) or (left == before and now - moved_at >= STUCK_S):
                return
            moved_at = moved_at if left == before else now
            time.sleep(PAUSE_S)

    def completed(self, tier: Tier, done: ShelfDone) -> None:
        """A write to a shelf has ended, well or not; its source is free again."""
        write = self._writes.pop((tier, done.ticket))
        self._writing[tier].discard(write.block_hash)
        source = self._sources.free(write)
        self._retry_at[tier] = self._retry_at[source] = 0.0  # a lease given back makes room on DRAM
        if tier is Tier.DRAM:
            self._go_on(write)
        if done.outcome is ShelfOutcome.DUPLICATE:
            self._shelves[tier].retain([write.block_hash], write.retention)
        if done.outcome is ShelfOutcome.STALE:  # the source changed meanwhile; what is still there can be copied anew
            self.wish(tier, write.block_hash, write.depth)
        if done.outcome is ShelfOutcome.DONE:
            if write.block_hash not in self._wishes[Tier.NVME]:  # else its row in DRAM must not go next
                self._age(write.block_hash)
            self._metrics.moved(source, tier, 1, done.moved_bytes)
            self._metrics.transfer_seconds.observe(done.duration_ns / 1e9, source.value, tier.value)

    def room_came(self) -> None:
        """Rows of shelves that were held are free, or may be evicted: what was refused is tried again."""
        self._retry_at = dict.fromkeys(Tier, 0.0)

    @property
    def retry_at(self) -> float:
        """When what waits is to be tried again; inf if nothing does. Before that ends of writes may come."""
        return min((self._retry_at[tier] for tier, wishes in self._wishes.items() if wishes), default=math.inf)

    def forget(self, tier: Tier) -> None:
        """A shelf is lost, with nothing in flight on it: nobody waits for its writes any more."""
        self._wishes[tier].clear()
        self._stands_since.pop(tier, None)
        self._onward.clear()  # what was on its way through DRAM, or to NVMe
        self._retry_at[tier] = 0.0

    def holds(self) -> list[int]:
        """One entry for each hold on a slot of HBM that writes have (for `Store.check`)."""
        return [write.slot for write in self._writes.values() if write.slot is not None]

    def stats(self) -> dict[str, int]:
        """Plain numbers of the moment. Any thread."""
        waiting = sum(len(wishes) for wishes in self._wishes.values())
        return {
            "writing_blocks": self.writing_count,
            "waiting_writes": waiting,
            "dropped_writes": self.dropped_count,
        }

    def leased(self) -> set[BlockHash]:
        """Blocks whose rows in DRAM are kept for their copies."""
        return {write.block_hash for write in self._writes.values() if write.lease is not None}

    def awaited(self, tier: Tier) -> set[BlockHash]:
        """Blocks that are being written to a shelf, or wait for that."""
        return self._writing[tier] | self._wishes[tier].keys()

    def _start(self, tier: Tier, now: float) -> bool:
        """Submit one batch of wishes; False if the shelf takes no more for now.

        What it refused goes on waiting, behind the others: its tenant's quota may be why.
        """
        wishes, shelf = self._wishes[tier], self._shelves[tier]
        writes: list[Write] = []
        batch = min(BATCH_ROWS, shelf.write_room)
        for block_hash, depth in list(itertools.islice(wishes.items(), batch)):
            write = self._sources.claim(tier, block_hash, depth, now)
            if write is None:
                del wishes[block_hash]
                self._drop(block_hash)
            else:
                writes.append(write)
        tickets = shelf.write([self._sources.item(write) for write in writes], now)
        refused: list[BlockHash] = []
        for write, ticket in zip(writes, tickets, strict=True):
            if ticket is not None:
                self._writes[(tier, ticket)] = write
                self._writing[tier].add(write.block_hash)
            else:
                self._sources.free(write)
                if not shelf.holds(write.block_hash):
                    refused.append(write.block_hash)
                    continue
                shelf.retain([write.block_hash], write.retention)
                if tier is Tier.DRAM:
                    self._go_on(write)
            del wishes[write.block_hash]
        for block_hash in refused:
            wishes[block_hash] = wishes.pop(block_hash)
            self._age(block_hash)
        if len(refused) < len(writes):
            self._stands_since.pop(tier, None)
        if refused or batch == 0:
            stands_s = now - self._stands_since.setdefault(tier, now)
            self._retry_at[tier] = now + min(max(RETRY_S, RETRY_SHARE * stands_s), RETRY_MAX_S)
            return False
        return True

    def _go_on(self, write: Write) -> None:
        """A write to DRAM is over: if the row is there and wanted on NVMe, it goes on."""
        if write.block_hash in self._onward:
            self._onward.discard(write.block_hash)
            if self._shelves[Tier.DRAM].holds(write.block_hash):
                self.wish(Tier.NVME, write.block_hash, write.depth)

    def _age(self, block_hash: BlockHash) -> None:
        """Its rows are as old as the block, or writing late would make them outlive its parents."""
        if (slot := self._resident.find(block_hash)) is not None:
            for shelf in self._shelves.values():
                shelf.stamp([block_hash], self._resident.last_use(slot))

    def _drop(self, block_hash: BlockHash) -> None:
        self.dropped_count += 1
        self._onward.discard(block_hash)

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
