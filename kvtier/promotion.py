"""Promotion: bringing the sealed blocks of a prefix into HBM, asynchronously, without blocking who runs.

A `Fetch` is one sequence's claim on a run of blocks: some resident already, some arriving from a shelf. Two sequences
that want the same block share one arrival. Trouble is a miss: a block that fails on DRAM is tried on NVMe, then lost.
Owned by the store, runs on the engine thread; the shelves' workers move the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.block import BlockHash, Tier
from kvtier.metrics import Metrics
from kvtier.resident import ResidentBlocks
from kvtier.shelf import ReadItem, Record, Shelf, ShelfDone, ShelfOutcome
from kvtier.tiers.hbm import HbmArena


@dataclass(eq=False, slots=True)
class Fetch:
    """Blocks on their way to one sequence, first to last. Every listed slot carries one hold that the fetch owns."""

    slots: list[int]
    origins: list[Tier | None]
    """Where each block came from; None while it is under way or once it is lost."""
    pending: set[int]
    """Places still under way."""
    sources: dict[int, Tier]
    """For each place that was cold: the tier it is, or was, read from."""
    deadline: float
    """Monotonic seconds after which what is still pending counts as a miss."""
    closed: bool = False

    def is_ready(self, now: float) -> bool:
        """Nothing to wait for any more: all arrived or lost, or the deadline has passed."""
        return not self.pending or now >= self.deadline


@dataclass(eq=False, slots=True)
class _Arrival:
    """One block being read into one slot; holds that slot itself until the read has completed."""

    block_hash: BlockHash
    depth: int
    slot: int
    tier: Tier
    started_at: float
    waiting: list[tuple[Fetch, int]] = field(default_factory=list)


class Promoter:
    """Starts, joins and completes the reads of fetches."""

    def __init__(
        self, resident: ResidentBlocks, arena: HbmArena, shelves: dict[Tier, Shelf], deadline_s: float, metrics: Metrics
    ) -> None:
        self._resident = resident
        self._arena = arena
        self._shelves = shelves
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._by_hash: dict[BlockHash, _Arrival] = {}
        self._by_ticket: dict[tuple[Tier, int], _Arrival] = {}
        self.late_counts = dict.fromkeys(Tier, 0)
        """Blocks that came too late for their sequence, by the tier they were read from."""

    @property
    def arriving_count(self) -> int:
        """Blocks under way."""
        return len(self._by_hash)

    def frees_slots(self, since: float) -> bool:
        """A read started after `since` for nobody any more is under way: its slot becomes evictable when it ends."""
        return any(a.started_at > since and self._resident.holds(a.slot) == 1 for a in self._by_hash.values())

    def fetch(self, hashes: Sequence[BlockHash], block_total: int, now: float) -> Fetch | None:
        """Claim the longest run of `hashes` that HBM and the shelves hold, and start reading what is cold.

        `block_total`: slots the sequence will want in all; None is returned, with nothing claimed, unless that many
        could be had now. `hashes[i]` must be at depth i.
        """
        plan = self._plan(hashes, now)
        near = [slot for slot, _ in plan if slot is not None]
        self._resident.hold(near)
        fresh_count = len(plan) - len(near)
        if self._resident.available_count < max(block_total - len(near), fresh_count):
            self._resident.release(near)
            return None
        fresh = self._resident.allocate(fresh_count)
        assert fresh is not None
        fetch = Fetch([], [], set(), {}, now + self._deadline_s)
        reads: dict[Tier, list[tuple[_Arrival, Record]]] = {}
        for depth, (slot, record) in enumerate(plan):
            if record is not None:
                tier, cold = record
                slot = fresh.pop()
                arrival = _Arrival(hashes[depth], depth, slot, tier, now)
                self._by_hash[hashes[depth]] = arrival
                self._resident.hold([slot])
                reads.setdefault(tier, []).append((arrival, cold))
            assert slot is not None
            joined = self._by_hash.get(hashes[depth])
            if joined is not None and joined.slot != slot:
                joined = None  # computed meanwhile: it is resident, though a late read of it is still under way
            fetch.slots.append(slot)
            fetch.origins.append(None if joined else Tier.HBM)
            if joined:
                joined.waiting.append((fetch, depth))
                fetch.pending.add(depth)
                fetch.sources[depth] = joined.tier
        self._resident.touch([s for s, origin in zip(fetch.slots, fetch.origins, strict=True) if origin], now)
        for tier, items in reads.items():
            self._submit(tier, items)
        return fetch

    def settle(self, fetch: Fetch) -> tuple[list[int], list[Tier]]:
        """End a fetch: slots and origins of the leading run that is there, its holds now the caller's."""
        fetch.closed = True
        for place in fetch.pending:
            self.late_counts[fetch.sources[place]] += 1
        run = 0
        while run < len(fetch.slots) and fetch.origins[run] is not None:
            run += 1
        self._resident.release(fetch.slots[run:])
        return fetch.slots[:run], [origin for origin in fetch.origins[:run] if origin is not None]

    def abandon(self, fetch: Fetch) -> None:
        """Give every hold of a fetch back; reads in flight complete on their own and leave the block in HBM."""
        fetch.closed = True
        self._resident.release(fetch.slots)

    def completed(self, tier: Tier, done: ShelfDone, now: float) -> tuple[BlockHash, int] | None:
        """A read of a shelf has ended. Returns (hash, depth) of a block that is now resident, None for a miss."""
        arrival = self._by_ticket.pop((tier, done.ticket))
        if done.outcome is not ShelfOutcome.DONE:
            self._retry_or_lose(arrival)
            return None
        del self._by_hash[arrival.block_hash]
        for fetch, place in arrival.waiting:
            if not fetch.closed:
                fetch.slots[place] = self._resident.seal(arrival.slot, arrival.block_hash, arrival.depth, now)
                fetch.origins[place] = tier
                fetch.pending.discard(place)
        self._resident.release([self._resident.seal(arrival.slot, arrival.block_hash, arrival.depth, now)])
        self._metrics.moved(tier, Tier.HBM, 1, done.moved_bytes)
        self._metrics.transfer_seconds.observe(done.duration_ns / 1e9, tier.value, Tier.HBM.value)
        return arrival.block_hash, arrival.depth

    def holds(self) -> list[int]:
        """One entry for each hold that arrivals have (for `Store.check`)."""
        return [arrival.slot for arrival in self._by_hash.values()]

    def _plan(self, hashes: Sequence[BlockHash], now: float) -> list[tuple[int | None, tuple[Tier, Record] | None]]:
        """For each block of the leading run either its slot (resident or arriving) or its record on a shelf.

        A read that has hung longer than anybody would wait for it ends the run.
        """
        plan: list[tuple[int | None, tuple[Tier, Record] | None]] = []
        while len(plan) < len(hashes):
            block_hash = hashes[len(plan)]
            slot = self._resident.find(block_hash)
            if slot is None and (arrival := self._by_hash.get(block_hash)) is not None:
                if now - arrival.started_at >= self._deadline_s:
                    break
                slot = arrival.slot
            if slot is not None:
                plan.append((slot, None))
                continue
            cold = self._cold_run(hashes[len(plan) :])
            if not cold:
                break
            plan.extend((None, found) for found in cold)
        return plan

    def _cold_run(self, hashes: Sequence[BlockHash]) -> list[tuple[Tier, Record]]:
        """Records of the leading run on the nearest shelf that has the first block, up to one that is nearer still."""
        nearer: list[Shelf] = []
        for tier, shelf in self._shelves.items():
            run: list[tuple[Tier, Record]] = []
            for record in shelf.find(hashes):
                block_hash = record.block_hash
                if self._resident.find(block_hash) is not None or block_hash in self._by_hash:
                    break
                if any(other.holds(block_hash) for other in nearer):
                    break
                run.append((tier, record))
            if run:
                return run
            nearer.append(shelf)
        return []

    def _submit(self, tier: Tier, items: Sequence[tuple[_Arrival, Record]]) -> None:
        reads = [ReadItem(record, self._arena.view(arrival.slot)) for arrival, record in items]
        tickets = self._shelves[tier].read(reads)
        for (arrival, _), ticket in zip(items, tickets, strict=True):
            if ticket is None:
                self._retry_or_lose(arrival)
            else:
                self._by_ticket[(tier, ticket)] = arrival

    def _retry_or_lose(self, arrival: _Arrival) -> None:
        """Read a block that failed on DRAM from NVMe, else tell everyone who waits that it is lost."""
        nvme = self._shelves.get(Tier.NVME)
        if arrival.tier is Tier.DRAM and nvme is not None and (records := nvme.find([arrival.block_hash])):
            arrival.tier = Tier.NVME
            for fetch, place in arrival.waiting:
                fetch.sources[place] = Tier.NVME
            self._submit(Tier.NVME, [(arrival, records[0])])
            return
        del self._by_hash[arrival.block_hash]
        for fetch, place in arrival.waiting:
            fetch.pending.discard(place)
        self._resident.release([arrival.slot])
