"""The store: all that the scheduler sees of the tiers.

Owns the books of HBM, the arena and the shelves, and turns their completions into placements. Everything runs on the
engine thread and returns at once; `wake` (given to the shelves) tells the engine when polling is worthwhile. Knows
neither sequences nor tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.block import BlockHash, KVLayout, Tier
from kvtier.cost import NO_WORK, CostModel, Work
from kvtier.demotion import Demoter, NvmePolicy
from kvtier.draining import Draining
from kvtier.eviction import PolicyMaker
from kvtier.fetch import Fetch
from kvtier.hand_down import HandDown
from kvtier.metrics import Metrics
from kvtier.promotion import Promoter
from kvtier.reopening import Reopening, ShelfOpener, ShelfSource
from kvtier.resident import ResidentBlocks
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import Shelf
from kvtier.stager import Stager
from kvtier.store_report import StoreReport
from kvtier.ticket import ShelfOperation
from kvtier.tiers.arena import Arena
from kvtier.tiers.staging import StagingMemory

OVERDUE_S = 1.0
"""Nobody waits for the slot of a transfer that is under way longer."""


class Store:
    """Blocks over three tiers. Slots handed out carry holds; give every one back with `release`."""

    def __init__(
        self,
        layout: KVLayout,
        arena: Arena,
        eviction: PolicyMaker,
        metrics: Metrics,
        policy: NvmePolicy = NvmePolicy.THROUGH,
        costs: CostModel | None = None,
        spare_count: int = 0,
        staging: StagingMemory | None = None,
    ) -> None:
        """`spare_count`: slots that hung transfers may keep. No `costs`: all is read; no `staging`: NVMe into HBM."""
        assert 0 <= spare_count < arena.slot_count
        self.layout = layout
        self.metrics = metrics
        self._arena = arena
        self._shelves: dict[Tier, Shelf] = {}
        self._resident = ResidentBlocks(arena.slot_count, eviction)
        self.costs = costs if costs is not None else CostModel(layout)
        self._promoter = Promoter(self._resident, arena, self._shelves, self.costs, metrics)
        self._demoter = Demoter(self._resident, arena, self._shelves, policy, metrics)
        self._draining = Draining(self._resident, self._shelves, self._demoter)
        self.hand_down = HandDown(self._resident, arena, self._shelves, metrics, self._demoter)
        """What streamed sequences have on the shelves."""
        self._spare_count = spare_count
        self._sources: list[ShelfSource] = []
        self._reopening = Reopening()
        self._ends: list[Callable[[], None]] = []
        self.stager: Stager | None = None
        """Brings rows of NVMe near for passes that attend to them where they are."""
        if staging is not None:
            staging.serve(arena)
            self._ends.append(staging.close)
            self.stager = Stager(layout.layers, staging, self._shelves, self.costs.deadline_s, metrics)
            self.hand_down.allow_nvme(self.stager.blocks_max)
        self._report = StoreReport(layout, self._resident, self._shelves, metrics)

    def add_shelf(self, shelf: Shelf, opener: ShelfOpener | None = None) -> None:
        """Use a shelf from now on; should its files get lost, `opener` is asked for another.

        DRAM comes before NVMe: nearer tiers are asked first.
        """
        assert shelf.tier not in self._shelves
        shelf.serve(self._arena)
        farther = {tier: self._shelves.pop(tier) for tier in list(self._shelves) if shelf.tier is Tier.DRAM}
        self._shelves[shelf.tier] = shelf
        self._shelves |= farther
        if (dram := self._shelves.get(Tier.DRAM)) and (nvme := self._shelves.get(Tier.NVME)):
            nvme.write_from(dram)
        self._report.begin(shelf)
        if opener is not None:
            self._reopening.know(shelf.tier, opener)

    def watch(self, source: ShelfSource) -> None:
        """Use every shelf that `source` has, now or later, and part with those that are lost."""
        self._sources.append(source)

    def open_shelf(self, tier: Tier, opener: ShelfOpener, wait_s: float = 0.0) -> None:
        """Use the shelf that `opener` returns: a thread calls it every few seconds until it does, and after a loss.

        With `wait_s` the first call comes at once, and its end is waited for, but no longer.
        """
        self._reopening.want(tier, opener)
        for shelf in self._reopening.wait(wait_s) if wait_s else []:
            self.add_shelf(shelf)

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
        return self._promoter.arriving_count + self._demoter.writing_count + self.hand_down.moving_count

    @property
    def busy(self) -> bool:
        """Transfers are in flight, so a completion will come."""
        return self.transfer_count > 0

    @property
    def retry_at(self) -> float:
        """When to `poll`, though nothing is in flight, for writes that a shelf has refused; inf: there are none."""
        return self._demoter.retry_at

    def awaits_slots(self, now: float) -> bool:
        """A transfer that alone holds a slot of HBM, and is not overdue, is in flight: waiting a little gives slots."""
        since = now - OVERDUE_S
        return any(it.frees_slots(since) for it in (self._promoter, self._demoter, self.hand_down))

    def address(self, slot: int) -> int:
        """Base address of a slot's row."""
        return self._arena.address(slot)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots of HBM with one hold each, or None."""
        return self._resident.allocate(count)

    def hold(self, slots: Sequence[int]) -> None:
        """One more hold on each of these slots, which somebody holds."""
        self._resident.hold(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Give one hold on each slot back."""
        self._resident.release(slots)

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A sequence lets go of this chain: all of it was last used now, so its last blocks are evicted first."""
        slots = [slot for block_hash in hashes if (slot := self._resident.find(block_hash)) is not None]
        self._resident.stamp(slots, now)
        for shelf in self._shelves.values():
            shelf.stamp(hashes, now)

    def fetch(
        self, hashes: Sequence[BlockHash], block_total: int, now: float, backlog: Work = NO_WORK, first: int = 0
    ) -> Fetch | None:
        """Claim the known prefix of `hashes`, reading what is cold and worth it; see `Promoter.fetch`.

        `first`: blocks of the chain before `hashes`; if there are any, the use of the chain has been noted already.
        """
        fetch = self._promoter.fetch(hashes, block_total, now, backlog, first)
        if fetch is not None:
            if first == 0:
                self.note_use(hashes, now)  # what lies behind a gap is wanted, too
            for depth, block_hash in enumerate(hashes[: len(fetch.slots)], first):
                self._demoter.used(block_hash, depth)
        return fetch

    def note_use(self, hashes: Sequence[BlockHash], now: float) -> None:
        """A sequence uses this chain, as far as the shelves have it."""
        for shelf in self._shelves.values():
            shelf.touch(hashes, now)

    def settle(self, fetch: Fetch) -> tuple[list[int], list[Tier]]:
        """Slots and origins of the leading run that arrived; the holds are now the caller's."""
        return self._promoter.settle(fetch)

    def abandon(self, fetch: Fetch) -> None:
        """Give a fetch up with all its holds."""
        self._promoter.abandon(fetch)

    def is_resident(self, block_hash: BlockHash) -> bool:
        """Whether HBM has a sealed block."""
        return self._resident.find(block_hash) is not None

    def seal(self, slot: int, block_hash: BlockHash, depth: int, now: float, retention: Retention = PLAIN) -> int:
        """A held block is full: index it and write it through. Returns the slot that holds the content from now on."""
        kept = self.index(slot, block_hash, depth, now, retention)
        if kept == slot:
            self._demoter.sealed(block_hash, depth)
        return kept

    def index(self, slot: int, block_hash: BlockHash, depth: int, now: float, retention: Retention = PLAIN) -> int:
        """The same for a block that is not written through: it is handed down."""
        return self._resident.seal(slot, block_hash, depth, now, retention)

    def retain(self, hashes: Sequence[BlockHash], retention: Retention) -> None:
        """Raise what is asked for blocks wherever they are: a chain from its first on, or what continues it."""
        self._resident.retain(hashes, retention)
        for shelf in self._shelves.values():
            shelf.retain(hashes, retention)

    def poll(self, now: float) -> None:
        """Turn completions into placements and misses, let expired blocks go, start waiting writes, retry shelves."""
        for tier, shelf in self._shelves.items():
            for done in shelf.poll(now):
                if self.hand_down.completed(tier, done, now):
                    continue
                if done.operation is ShelfOperation.WRITE:
                    self._demoter.completed(tier, done, now)
                    continue
                if tier is Tier.NVME and self.stager is not None and self.stager.completed(done, now):
                    continue
                arrived = self._promoter.completed(tier, done, now)
                if arrived is not None and tier is Tier.NVME:
                    self._demoter.wish(Tier.DRAM, *arrived)
        self._resident.expire(time.time())
        self._part_with_lost_shelves()
        came = [shelf for source in self._sources for shelf in source.poll(now)]
        self._reopening.add([*came, *self._reopening.opened(now)], self.add_shelf, now)
        self.hand_down.pump(now)
        self._demoter.pump(now)
        if self.stager is not None:
            self.stager.pump(now)

    def drain(self, tier: Tier, give_up: bool = False) -> bool:
        """Push what nobody holds in HBM or DRAM one tier down; call after each poll until it returns True."""
        return self._draining.drain(tier, give_up)

    def publish_metrics(self) -> None:
        """Bring gauges and shelf counters of the metrics up to date."""
        self._report.publish(self.costs, self._promoter.late_counts)

    def stats(self) -> dict[str, int]:
        """Plain numbers of the moment, for `Engine.stats`."""
        arriving = {"arriving_blocks": self._promoter.arriving_count}
        return self._report.stats(self.costs) | arriving | self._demoter.stats()

    def check(self, held: Counter[int] | None = None) -> None:
        """Assert all books; with `held` (holds of sequences and fetches by slot) also that none is lost."""
        if held is not None:
            held = held + Counter([*self._promoter.holds(), *self._demoter.holds(), *self.hand_down.holds()])
        self._resident.check(held)
        self._promoter.check()
        if self.stager is not None:
            self.stager.check()
        self.hand_down.check()
        for shelf in self._shelves.values():
            shelf.check()

    def write_down(self, deadline_s: float) -> None:
        """Before `close`: write what waits to be written, for as long as that gets on and up to the deadline."""
        self._demoter.finish(self.poll, time.monotonic() + deadline_s)

    def close(self, deadline_s: float) -> None:
        """Let transfers end, up to the deadline, and close the shelves, then the arena."""
        end = time.monotonic() + deadline_s
        self._demoter.copy_leases.end_all()
        for shelf in [*reversed(self._shelves.values()), *self._reopening.close()]:  # NVMe is written from DRAM's rows
            shelf.close(max(0.0, end - time.monotonic()))
        for hang_up in self._ends:
            hang_up()
        self._arena.close()

    def _part_with_lost_shelves(self) -> None:
        """Let go of shelves whose files are gone, all at once, once nothing is in flight, asked or held on any."""
        if not any(shelf.is_lost for shelf in self._shelves.values()):
            return
        for shelf in self._shelves.values():
            shelf.notice_loss()  # those that are lost together leave together
        lost = [it for it in self._shelves.values() if it.is_lost and (self._sources or self._reopening.knows(it.tier))]
        if not lost or any(it.in_flight or len(it.holdings) or self.hand_down.awaits(it.tier) for it in lost):
            return
        self.publish_metrics()
        for tier in [shelf.tier for shelf in lost]:
            del self._shelves[tier]
            self._demoter.forget(tier)
            self._draining.forget(tier)
            self._report.end(tier, self._promoter.late_counts[tier])
        self._reopening.replace(lost)
