"""The store: all that the scheduler sees of the tiers.

Owns the books of HBM, the arena and the shelves, and turns their completions into placements. Everything runs on the
engine thread and returns at once; `wake` (given to the shelves) tells the engine when polling is worthwhile. Knows
neither sequences nor tensors.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvtier.block import BlockHash, KVLayout, Tier
from kvtier.demotion import Demoter, NvmePolicy
from kvtier.eviction import PolicyMaker
from kvtier.metrics import Metrics
from kvtier.promotion import Fetch, Promoter
from kvtier.resident import ResidentBlocks
from kvtier.shelf import Shelf, ShelfOperation
from kvtier.tiers.hbm import HbmArena

RETRY_S = 5.0
"""How often a shelf that could not be opened is tried again."""

LATE_CLOSE_S = 10.0
"""How long the opener of a shelf that nobody wants any more gives its journal to end, so that the lock is given up."""

OVERDUE_S = 1.0
"""Nobody waits for the slot of a transfer that is under way longer."""

ShelfOpener = Callable[[], Shelf | None]


class Store:
    """Blocks over three tiers. Slots handed out carry holds; give every one back with `release`."""

    def __init__(
        self,
        layout: KVLayout,
        arena: HbmArena,
        eviction: PolicyMaker,
        metrics: Metrics,
        policy: NvmePolicy = NvmePolicy.THROUGH,
        fetch_deadline_s: float = 5.0,
        spare_count: int = 0,
    ) -> None:
        """`spare_count`: slots of HBM that transfers hung in a disk may keep for good."""
        assert 0 <= spare_count < arena.slot_count
        self.layout = layout
        self.metrics = metrics
        self._arena = arena
        self._shelves: dict[Tier, Shelf] = {}
        self._resident = ResidentBlocks(arena.slot_count, eviction)
        self._promoter = Promoter(self._resident, arena, self._shelves, fetch_deadline_s, metrics)
        self._demoter = Demoter(self._resident, arena, self._shelves, policy, metrics)
        self._spare_count = spare_count
        self._openers: dict[Tier, ShelfOpener] = {}
        self._opened: queue.SimpleQueue[tuple[Tier, Shelf | None]] = queue.SimpleQueue()
        self._opening = False
        self._closed = False
        self._close_lock = threading.Lock()
        self._ends: list[Callable[[], None]] = []
        self._retry_at = 0.0
        self._shelf_totals: dict[tuple[str, str], int] = {}
        self._evicted_seen = 0

    def add_shelf(self, shelf: Shelf) -> None:
        """Use a shelf from now on. DRAM comes before NVMe: nearer tiers are asked first."""
        assert shelf.tier not in self._shelves and not (shelf.tier is Tier.DRAM and Tier.NVME in self._shelves)
        self._shelves[shelf.tier] = shelf

    def retry_later(self, tier: Tier, opener: ShelfOpener) -> None:
        """A shelf that could not be opened: a thread calls `opener` every `RETRY_S` until it returns one."""
        self._openers[tier] = opener

    def on_close(self, end: Callable[[], None]) -> None:
        """Call `end` once the shelves are closed."""
        self._ends.append(end)

    @property
    def slot_count(self) -> int:
        """Slots of HBM."""
        return self._resident.slot_count

    @property
    def usable_count(self) -> int:
        """Slots that one sequence can count on, whatever hangs."""
        return self._resident.slot_count - self._spare_count

    @property
    def available_count(self) -> int:
        """Slots that could be allocated now."""
        return self._resident.available_count

    def capacities(self) -> dict[str, int]:
        """Blocks that each tier can hold."""
        shelves = {tier.value: shelf.slot_count for tier, shelf in list(self._shelves.items())}
        return {Tier.HBM.value: self.slot_count, **shelves}

    @property
    def transfer_count(self) -> int:
        """Rows being read or written, whose slots are held until they are done."""
        return self._promoter.arriving_count + self._demoter.writing_count

    @property
    def busy(self) -> bool:
        """Transfers are in flight, so a completion will come."""
        return self.transfer_count > 0

    def awaits_slots(self, now: float) -> bool:
        """A transfer that alone holds a slot of HBM, and is not overdue, is in flight: waiting a little gives slots."""
        since = now - OVERDUE_S
        return self._promoter.frees_slots(since) or self._demoter.frees_slots(since)

    def address(self, slot: int) -> int:
        """Base address of a slot's row."""
        return self._arena.address(slot)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots of HBM with one hold each, or None."""
        return self._resident.allocate(count)

    def release(self, slots: Sequence[int]) -> None:
        """Give one hold on each slot back."""
        self._resident.release(slots)

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A sequence lets go of this chain: all of it was last used now, so its last blocks are evicted first."""
        slots = [slot for block_hash in hashes if (slot := self._resident.find(block_hash)) is not None]
        self._resident.stamp(slots, now)
        for shelf in self._shelves.values():
            shelf.stamp(hashes, now)

    def fetch(self, hashes: Sequence[BlockHash], block_total: int, now: float) -> Fetch | None:
        """Claim the longest known prefix of `hashes`, reading what is cold; see `Promoter.fetch`."""
        fetch = self._promoter.fetch(hashes, block_total, now)
        if fetch is not None:
            known = hashes[: len(fetch.slots)]
            for shelf in self._shelves.values():
                shelf.touch(hashes, now)  # what lies behind a gap is wanted, too
            for depth, block_hash in enumerate(known):
                self._demoter.used(block_hash, depth)
        return fetch

    def settle(self, fetch: Fetch) -> tuple[list[int], list[Tier]]:
        """Slots and origins of the leading run that arrived; the holds are now the caller's."""
        return self._promoter.settle(fetch)

    def abandon(self, fetch: Fetch) -> None:
        """Give a fetch up with all its holds."""
        self._promoter.abandon(fetch)

    def seal(self, slot: int, block_hash: BlockHash, depth: int, now: float) -> int:
        """A held block is full: index it and write it through. Returns the slot that holds the content from now on."""
        kept = self._resident.seal(slot, block_hash, depth, now)
        if kept == slot:
            self._demoter.sealed(block_hash, depth)
        return kept

    def poll(self, now: float) -> None:
        """Turn completions into placements and misses, start waiting writes, retry shelves that are away."""
        for tier, shelf in self._shelves.items():
            for done in shelf.poll(now):
                if done.operation is ShelfOperation.WRITE:
                    self._demoter.completed(tier, done)
                    continue
                arrived = self._promoter.completed(tier, done, now)
                if arrived is not None and tier is Tier.NVME:
                    self._demoter.wish(Tier.DRAM, *arrived)
        self._demoter.pump(now)
        if self._openers:
            self._retry_shelves(now)

    def drain(self, tier: Tier, give_up: bool = False) -> bool:
        """Push what nobody holds in HBM or DRAM one tier down; call after each poll until it returns True."""
        return self._demoter.drain(tier, give_up)

    def publish_metrics(self) -> None:
        """Bring gauges and shelf counters of the metrics up to date."""
        metrics = self.metrics
        used: Iterable[tuple[Tier, int, int]] = [
            (Tier.HBM, self._resident.used_count, self.slot_count),
            *((tier, shelf.used_count, shelf.slot_count) for tier, shelf in self._shelves.items()),
        ]
        for tier, used_blocks, capacity_blocks in used:
            metrics.tier_used_blocks.set(used_blocks, tier.value)
            metrics.tier_capacity_blocks.set(capacity_blocks, tier.value)
            metrics.tier_used_bytes.set(used_blocks * self.layout.row_bytes, tier.value)
            metrics.tier_capacity_bytes.set(capacity_blocks * self.layout.row_bytes, tier.value)
        self._count_evictions(Tier.HBM, self._resident.evicted_count)
        for tier, shelf in self._shelves.items():
            stats = shelf.stats()
            self._count_evictions(tier, stats["evictions"])
            for reason in SHELF_REASONS:
                grown = self._growth((tier.value, reason), stats[reason])
                if grown:
                    metrics.shelf_failures.add(grown, tier.value, reason)
            late = self._growth((tier.value, "late"), stats["late"] + self._promoter.late_counts[tier])
            if late:
                metrics.shelf_failures.add(late, tier.value, "late")

    def stats(self) -> dict[str, int]:
        """Plain numbers of the moment, for `Engine.stats`."""
        values = {
            "hbm_blocks_used": self._resident.used_count,
            "hbm_blocks_total": self.slot_count,
            "hbm_blocks_sealed": self._resident.sealed_count,
            "hbm_evictions": self._resident.evicted_count,
            "arriving_blocks": self._promoter.arriving_count,
            "writing_blocks": self._demoter.writing_count,
            "waiting_writes": self._demoter.wish_count,
            "dropped_writes": self._demoter.dropped_count,
        }
        for tier, shelf in list(self._shelves.items()):
            values |= {f"{tier.value}_{name}": value for name, value in shelf.stats().items()}
        return values

    def check(self, held: Counter[int] | None = None) -> None:
        """Assert all books; with `held` (holds of sequences and fetches by slot) also that none is lost."""
        if held is not None:
            held = held + Counter(self._promoter.holds()) + Counter(self._demoter.holds())
        self._resident.check(held)
        for shelf in self._shelves.values():
            shelf.check()

    def close(self, deadline_s: float) -> None:
        """Let transfers end, up to the deadline, and close the shelves, then the arena."""
        end = time.monotonic() + deadline_s
        with self._close_lock:
            self._closed = True
        while not self._opened.empty():
            tier, opened = self._opened.get()
            if opened is not None:
                self._shelves[tier] = opened
        for shelf in self._shelves.values():
            shelf.close(max(0.0, end - time.monotonic()))
        for hang_up in self._ends:
            hang_up()
        self._arena.close()

    def _retry_shelves(self, now: float) -> None:
        """Take in what an opener has opened, and send the next one off: opening may wait for a disk."""
        while not self._opened.empty():
            tier, shelf = self._opened.get()
            self._opening = False
            if shelf is not None:
                del self._openers[tier]
                self.add_shelf(shelf)
        if self._openers and not self._opening and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            self._opening = True
            tier, opener = next(iter(self._openers.items()))
            self._openers[tier] = self._openers.pop(tier)  # the next one's turn comes next
            threading.Thread(target=self._open, args=(tier, opener), name="kvtier-opener", daemon=True).start()

    def _open(self, tier: Tier, opener: ShelfOpener) -> None:
        """Opener thread: a shelf opened for a store that has been closed meanwhile is closed again."""
        shelf = None
        try:
            shelf = opener()
        finally:
            with self._close_lock:
                late = self._closed
                if not late:
                    self._opened.put((tier, shelf))
            if late and shelf is not None:
                shelf.close(LATE_CLOSE_S)

    def _growth(self, key: tuple[str, str], total: int) -> int:
        grown = total - self._shelf_totals.get(key, 0)
        self._shelf_totals[key] = total
        return grown

    def _count_evictions(self, tier: Tier, total: int) -> None:
        grown = self._growth((tier.value, "evictions"), total)
        if grown:
            self.metrics.evicted_blocks.add(grown, tier.value)
            self.metrics.evicted_bytes.add(grown * self.layout.row_bytes, tier.value)


SHELF_REASONS = ("bad_row", "short_read", "io_error", "no_space")
