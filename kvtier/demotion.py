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
from kvtier.copy_leases import CopyLeases
from kvtier.metrics import Metrics
from kvtier.record import Lease
from kvtier.resident import ResidentBlocks
from kvtier.shelf import Shelf, ShelfDone, ShelfOutcome
from kvtier.source import Sources, Write
from kvtier.tiers.arena import Arena
from kvtier.writing_back import WritingBack

WISHES_MAX = 65536
"""Wishes that may wait per target tier; a later one is dropped and counted."""
BATCH_ROWS = 64
RETRY_S, RETRY_SHARE, RETRY_MAX_S = 0.1, 0.1, 5.0
"""A shelf that has refused a write is asked again after this long, then after this share of the time for which it has
taken nothing, or once one of its writes has ended."""
STUCK_S = 1.0
"""At the end: what moves for so long no more is left behind."""
PAUSE_S = 0.001


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
        self.copy_leases = CopyLeases(shelves)
        """On rows of DRAM that wait for NVMe."""
        self._writing_back = WritingBack(shelves)
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
        self.copy_leases.settle(now)
        if self._policy is NvmePolicy.BACK:
            for record in self._writing_back.due(now):
                self.wish(Tier.NVME, record.block_hash, record.depth)
        for tier in (Tier.NVME, Tier.DRAM):  # a lease keeps a row that a DRAM write would evict
            while (
                self._wishes[tier]
                and (now >= self._retry_at[tier] or self._shelves[tier].supplied)
                and self._start(tier, now)
            ):
                pass
        self.copy_leases.settle(now)

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

    def completed(self, tier: Tier, done: ShelfDone, now: float) -> None:
        """A write to a shelf has ended, well or not; its source is free again."""
        write = self._writes.pop((tier, done.ticket))
        self._writing[tier].discard(write.block_hash)
        source = self._sources.free(write)
        self._retry_at[tier] = self._retry_at[source] = 0.0  # a lease given back makes room on DRAM
        self._stands_since.pop(tier, None)
        if tier is Tier.DRAM:
            self.copy_leases.arrived(write.block_hash, done.lease, now)
            self._go_on(write, now, there=done.outcome in (ShelfOutcome.DONE, ShelfOutcome.DUPLICATE))
        elif done.outcome in (ShelfOutcome.DONE, ShelfOutcome.DUPLICATE):
            self.copy_leases.copied(write.block_hash, now)
        else:
            self.copy_leases.end(write.block_hash)
        if done.outcome is ShelfOutcome.DUPLICATE:
            self._shelves[tier].retain([write.block_hash], write.retention)
        if done.outcome is ShelfOutcome.STALE:  # the source changed meanwhile; what is still there can be copied anew
            self.wish(tier, write.block_hash, write.depth)
        if done.outcome is ShelfOutcome.DONE:
            if write.block_hash not in self._wishes[Tier.NVME]:  # else its row in DRAM must not go next
                self._age(write.block_hash)
            self._metrics.moved(source, tier, 1, done.moved_bytes)
            self._metrics.transfer_seconds.observe(done.duration_ns / 1e9, source.value, tier.value)

    def take_over(self, lease: Lease, now: float) -> bool:
        """Take a lease on a row of DRAM over if that waits for NVMe, until it is there; False: it is not taken."""
        kept = self.copy_leases
        taken = self._awaits(lease.record.block_hash) and kept.may_keep(now) and not kept.is_full
        if taken:
            kept.keep(lease, now)
        return taken

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
        return {"writing_blocks": self.writing_count, "waiting_writes": waiting, "dropped_writes": self.dropped_count}

    def leased(self) -> set[BlockHash]:
        """Blocks whose rows in DRAM are kept for their copies."""
        return {write.block_hash for write in self._writes.values() if write.lease is not None}

    def awaited(self, tier: Tier) -> set[BlockHash]:
        """Blocks that are being written to a shelf, or wait for that."""
        return self._writing[tier] | self._wishes[tier].keys()

    def _awaits(self, block_hash: BlockHash) -> bool:
        return block_hash in self._wishes[Tier.NVME] or block_hash in self._writing[Tier.NVME]

    def _start(self, tier: Tier, now: float) -> bool:
        """Submit one batch of wishes; False if the shelf takes no more for now.

        What it refused goes on waiting, behind the others: its tenant's quota may be why.
        """
        wishes, shelf = self._wishes[tier], self._shelves[tier]
        writes, refused, more = self._claim(tier, now)
        items = [self._sources.item(write, self.copy_leases.expects(write.block_hash)) for write in writes]
        for write, ticket in zip(writes, shelf.write(items, now), strict=True):
            block_hash = write.block_hash
            if ticket is not None:
                self._writes[(tier, ticket)] = write
                self._writing[tier].add(block_hash)
                self._stands_since.pop(tier, None)
            else:
                self._sources.free(write)
                self.copy_leases.arrived(block_hash, None, now)
                if not shelf.holds(block_hash):
                    refused.append(block_hash)
                    continue
                shelf.retain([block_hash], write.retention)
                if tier is Tier.DRAM:
                    self._go_on(write, now, there=True)
            del wishes[block_hash]
        for block_hash in refused:
            wishes[block_hash] = wishes.pop(block_hash)
            self._age(block_hash)
        if refused or not more:
            stands_s = now - self._stands_since.setdefault(tier, now)
            self._retry_at[tier] = now + min(max(RETRY_S, RETRY_SHARE * stands_s), RETRY_MAX_S)
            return False
        return True

    def _claim(self, tier: Tier, now: float) -> tuple[list[Write], list[BlockHash], bool]:
        """Sources of the next wishes, those that have to wait for theirs, and whether more could be started now.

        On DRAM, what is to go on to NVMe waits while as many rows as may be are kept for that: it would evict them.
        """
        wishes, dram = self._wishes[tier], self._shelves.get(Tier.DRAM)
        writes, waiting = list[Write](), list[BlockHash]()
        batch = min(BATCH_ROWS, self._shelves[tier].write_room)
        keeps = tier is Tier.DRAM and self.copy_leases.may_keep(now)
        for block_hash, depth in list(itertools.islice(wishes.items(), batch)):
            leased = keeps and block_hash in self._onward
            if leased and self.copy_leases.is_full:
                return writes, waiting, False
            write = self._sources.claim(tier, block_hash, depth, now)
            if write is not None:
                writes.append(write)
                if leased:
                    self.copy_leases.expect(block_hash)
            elif tier is Tier.NVME and dram is not None and dram.holds(block_hash):
                waiting.append(block_hash)  # the row has gone, and the books have yet to hear of it
            else:
                del wishes[block_hash]
                self._renew(tier, block_hash, depth, now)
        return writes, waiting, batch > 0

    def _go_on(self, write: Write, now: float, there: bool) -> None:
        """A write to DRAM is over: if the row is `there` and wanted on NVMe, it goes on."""
        block_hash = write.block_hash
        if block_hash in self._onward:
            self._onward.discard(block_hash)
            if self._shelves[Tier.DRAM].holds(block_hash):
                self.wish(Tier.NVME, block_hash, write.depth)
            elif there:  # for a moment
                self._renew(Tier.NVME, block_hash, write.depth, now)
        if not self._awaits(block_hash):
            self.copy_leases.end(block_hash)

    def _age(self, block_hash: BlockHash) -> None:
        """Its rows are as old as the block, or writing late would make them outlive its parents."""
        if (slot := self._resident.find(block_hash)) is not None:
            for shelf in self._shelves.values():
                shelf.stamp([block_hash], self._resident.last_use(slot))

    def _renew(self, tier: Tier, block_hash: BlockHash, depth: int, now: float) -> None:
        """The source of a write is gone. DRAM's may come again from HBM, and is kept this time: so not for ever."""
        if tier is Tier.NVME and self.copy_leases.may_keep(now) and self._resident.find(block_hash) is not None:
            self.wish(tier, block_hash, depth)
        else:
            self._drop(block_hash)

    def _drop(self, block_hash: BlockHash) -> None:
        self.dropped_count += 1
        self._onward.discard(block_hash)
