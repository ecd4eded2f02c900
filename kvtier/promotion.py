"""Promotion: bringing the sealed blocks of a prefix into HBM, asynchronously, without blocking who runs.

Two sequences that want the same block share one arrival. Trouble is a miss: a block that fails on DRAM is tried on
NVMe, then lost. What is sooner computed than read is left out (`CostModel`), and nobody waits longer than that takes.
Owned by the store, runs on the engine thread; the shelves' workers move the bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.block import BlockHash, Tier
from kvtier.cost import NO_WORK, CostModel, LoadPolicy, Span, Work
from kvtier.fetch import Arrival, Fetch
from kvtier.lane import Lane
from kvtier.metrics import Metrics
from kvtier.record import Record
from kvtier.resident import ResidentBlocks
from kvtier.retention import retention_of
from kvtier.shelf import ReadItem, Shelf, ShelfDone, ShelfOutcome
from kvtier.tiers.arena import Arena

WINDOW_BLOCKS = 64
"""Blocks of a chain that a shelf is asked for at once, so that one which alternates between tiers costs no more."""


class _Chain:
    """What one shelf has of a chain, asked for a window at a time."""

    def __init__(self, shelf: Shelf, hashes: Sequence[BlockHash]) -> None:
        self._shelf = shelf
        self._hashes = hashes
        self._start = 0
        self._run: list[Record] = []

    def at(self, place: int) -> Record | None:
        """The record of one block."""
        if not self._start <= place < self._start + len(self._run):
            self._start = place
            self._run = self._shelf.find(self._hashes[place : place + WINDOW_BLOCKS])
        return self._run[place - self._start] if self._run else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one block of a chain is: in a slot (resident or arriving), or cold, as a record on a shelf."""

    tier: Tier
    slot: int | None
    record: Record | None


class Promoter:
    """Starts, joins and completes the reads of fetches."""

    def __init__(
        self, resident: ResidentBlocks, arena: Arena, shelves: dict[Tier, Shelf], costs: CostModel, metrics: Metrics
    ) -> None:
        self._resident = resident
        self._arena = arena
        self._shelves = shelves
        self._costs = costs
        self._metrics = metrics
        self._lanes = {tier: Lane(tier) for tier in (Tier.DRAM, Tier.NVME)}
        self._by_hash: dict[BlockHash, Arrival] = {}
        self._arrivals: set[Arrival] = set()
        """Those, and late ones in whose place another tier is read."""
        self._by_ticket: dict[tuple[Tier, int], Arrival] = {}
        self.late_counts = dict.fromkeys(Tier, 0)
        """Blocks that came too late for their sequence, by the tier they were read from."""

    @property
    def arriving_count(self) -> int:
        """Blocks under way."""
        return len(self._arrivals)

    def frees_slots(self, since: float) -> bool:
        """A read started after `since` for nobody any more is under way: its slot becomes evictable when it ends."""
        return any(a.started_at > since and self._resident.holds(a.slot) == 1 for a in self._arrivals)

    def fetch(
        self, hashes: Sequence[BlockHash], block_total: int, now: float, backlog: Work = NO_WORK, first: int = 0
    ) -> Fetch | None:
        """Claim the leading run of `hashes` that is sooner had from HBM and the shelves than computed; start reading.

        `block_total`: slots the sequence will want in all; None is returned, with nothing claimed, unless that many
        could be had now. `hashes[i]` must be at depth `first` + i. `backlog`: what is computed before this sequence.
        """
        found = self._find(hashes, now)
        queued = {tier: lane.live for tier, lane in self._lanes.items()}
        choice = self._costs.choose(self._spans(found), queued, backlog, first)
        plan, left = found[: choice.blocks], found[choice.blocks :]
        near = [place.slot for place in plan if place.slot is not None]
        self._resident.hold(near)
        fresh_count = len(plan) - len(near)
        if self._resident.available_count < max(block_total - len(near), fresh_count):
            self._resident.release(near)
            return None
        fresh = self._resident.allocate(fresh_count)
        assert fresh is not None
        fetch = Fetch(self._lanes, now + choice.limit_s, choice.patience_s)
        reads: dict[Tier, list[tuple[Arrival, Record]]] = {}
        for number, place in enumerate(plan):
            slot = place.slot if place.slot is not None else fresh.pop()
            if place.record is not None:
                arrival = self._arrive(first + number, slot, place.tier, place.record, now)
                reads.setdefault(place.tier, []).append((arrival, place.record))
                self._resident.hold([slot])
            joined = self._by_hash.get(hashes[number])
            if joined is not None and joined.slot != slot:
                joined = None  # computed meanwhile: it is resident, though a late read of it is still under way
            fetch.slots.append(slot)
            fetch.origins.append(None if joined else Tier.HBM)
            if joined:
                fetch.wait_for(number, joined)
        if first == 0:  # else they would look warmer than their parents
            self._resident.touch([s for s, origin in zip(fetch.slots, fetch.origins, strict=True) if origin], now)
        for tier, items in reads.items():
            self._submit(tier, items, now)
        self._count(plan, "load")
        self._count(left, "recompute")
        if self._resident.available_count > block_total - len(plan):
            self._probe(first + choice.blocks, left, now)
            self._probe_silent(hashes[:WINDOW_BLOCKS], first, now)
        return fetch

    def settle(self, fetch: Fetch) -> tuple[list[int], list[Tier]]:
        """End a fetch: slots and origins of the leading run that is there, its holds now the caller's."""
        fetch.closed = True
        for arrival in fetch.pending.values():
            self.late_counts[arrival.tier] += 1
            self._lanes[arrival.tier].give_up(0 if arrival.late else 1)
            arrival.late = True
        for tier, count in fetch.awaited.items():
            if count and fetch.silent_at(tier) <= fetch.limit and not self._is_awaited(tier):
                self._shelves[tier].cancel_reads()  # what waits in the queue would keep its slots of HBM
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
        self._learn(arrival, done, now)
        if done.outcome is not ShelfOutcome.DONE:
            self._retry_or_lose(arrival, now)
            return None
        self._forget(arrival)
        block_hash, depth = arrival.block_hash, arrival.depth
        for fetch, place in arrival.waiting:
            if not fetch.closed:
                fetch.slots[place] = self._resident.seal(arrival.slot, block_hash, depth, now, arrival.retention)
                fetch.origins[place] = tier
                fetch.wait_no_longer(place)
        self._resident.release([self._resident.seal(arrival.slot, block_hash, depth, now, arrival.retention)])
        self._metrics.moved(tier, Tier.HBM, 1, done.moved_bytes)
        self._metrics.transfer_seconds.observe(done.duration_ns / 1e9, tier.value, Tier.HBM.value)
        return block_hash, depth

    def holds(self) -> list[int]:
        """One entry for each hold that arrivals have (for `Store.check`)."""
        return [arrival.slot for arrival in self._arrivals]

    def check(self) -> None:
        """Assert that lanes and arrivals agree."""
        live = Counter(arrival.tier for arrival in self._arrivals if not arrival.late)
        assert {tier: lane.live for tier, lane in self._lanes.items()} == {tier: live[tier] for tier in self._lanes}

    def _is_awaited(self, tier: Tier) -> bool:
        """Whether somebody has more patience with a tier, and what waits in its queue may be his."""
        waiting = (fetch for arrival in self._arrivals for fetch, _ in arrival.waiting)
        return any(fetch.awaited[tier] > 0 and not fetch.closed for fetch in waiting)

    def _find(self, hashes: Sequence[BlockHash], now: float) -> list[_Place]:
        """Where the leading run of blocks is, each in the nearest tier that has it.

        A silent tier is asked last, and a late read of it waited for only if no other tier has the block. A read that
        has hung longer than anybody would wait for it, or whose block has expired, ends the run.
        """
        found: list[_Place] = []
        nearest = sorted(self._shelves.items(), key=lambda pair: self._lanes[pair[0]].silent)
        chains = [(tier, _Chain(shelf, hashes)) for tier, shelf in nearest]
        for depth, block_hash in enumerate(hashes):
            slot = self._resident.find(block_hash)
            if slot is not None:
                found.append(_Place(Tier.HBM, slot, None))
                continue
            cold = next(((tier, record) for tier, chain in chains if (record := chain.at(depth)) is not None), None)
            arrival = self._by_hash.get(block_hash)
            if arrival is not None and not (arrival.late and cold is not None and cold[0] is not arrival.tier):
                if now - arrival.started_at >= self._costs.deadline_s or arrival.retention.is_over(time.time()):
                    break
                found.append(_Place(arrival.tier, arrival.slot, None))
                continue
            if cold is None:
                break
            found.append(_Place(cold[0], None, cold[1]))
        return found

    def _spans(self, found: Sequence[_Place]) -> list[Span]:
        """Runs of one tier each; a tier that gives nothing ends the list, unless it is to be read in any case."""
        spans: list[Span] = []
        always = self._costs.policy is LoadPolicy.ALWAYS
        for place in found:
            if not always and place.tier in self._lanes and self._lanes[place.tier].silent:
                break
            cold = int(place.record is not None)
            if spans and spans[-1].tier is place.tier:
                _, blocks, before = spans[-1]
                spans[-1] = Span(place.tier, blocks + 1, before + cold)
            else:
                spans.append(Span(place.tier, 1, cold))
        return spans

    def _arrive(self, depth: int, slot: int, tier: Tier, record: Record, now: float) -> Arrival:
        """A block that is about to be read; the caller gives the arrival a hold on its slot."""
        arrival = Arrival(record.block_hash, depth, slot, tier, retention_of(record), now)
        self._by_hash[record.block_hash] = arrival
        self._arrivals.add(arrival)
        return arrival

    def _probe(self, first: int, left: Sequence[_Place], now: float) -> None:
        """Read one block of what is computed instead, for nobody, so that a tier that was slow once gets its chance."""
        for depth, place in enumerate(left, first):
            if place.record is not None:
                self._read_one(place.tier, depth, place.record, now)
                return

    def _probe_silent(self, hashes: Sequence[BlockHash], first: int, now: float) -> None:
        """The same for a silent tier whose blocks another tier gives meanwhile, with one that is not under way."""
        for tier, shelf in self._shelves.items():
            if not self._lanes[tier].silent:
                continue
            for depth, block_hash in enumerate(hashes, first):
                if block_hash not in self._by_hash and (records := shelf.find([block_hash])):
                    self._read_one(tier, depth, records[0], now)
                    break

    def _read_one(self, tier: Tier, depth: int, record: Record, now: float) -> None:
        if self._lanes[tier].probe_due(now) and (slots := self._resident.allocate(1)):
            arrival = self._arrive(depth, slots[0], tier, record, now)
            self._submit(tier, [(arrival, record)], now)

    def _submit(self, tier: Tier, items: Sequence[tuple[Arrival, Record]], now: float) -> None:
        tickets = self._shelves[tier].read([ReadItem(record, self._arena.view(one.slot)) for one, record in items])
        taken = len(tickets) - tickets.count(None)
        lane = self._lanes[tier]
        batch = lane.start(taken, self._costs.read_s(tier, lane.live + taken), now) if taken else None
        for (arrival, _), ticket in zip(items, tickets, strict=True):
            if ticket is None:
                self._retry_or_lose(arrival, now)
            else:
                arrival.batch = batch
                self._by_ticket[(tier, ticket)] = arrival

    def _learn(self, arrival: Arrival, done: ShelfDone, now: float) -> None:
        """A read has ended; with the last one of a batch the estimates learn how long it took."""
        batch = arrival.batch
        assert batch is not None
        ended_at = done.ended_ns / 1e9 if done.ended_ns else now
        well = done.outcome is ShelfOutcome.DONE
        if self._lanes[arrival.tier].end(batch, arrival.late, well, ended_at, now):
            took_s = batch.ended_at - batch.started_at
            self._costs.learn_read(arrival.tier, batch.rows, took_s)
            self._metrics.load_time_ratio.observe(took_s / batch.expected_s, arrival.tier.value)

    def _count(self, places: Sequence[_Place], decision: str) -> None:
        for tier, blocks in Counter(place.tier for place in places if place.record is not None).items():
            self._metrics.load_decisions.add(blocks, tier.value, decision)

    def _retry_or_lose(self, arrival: Arrival, now: float) -> None:
        """Read a block that failed on DRAM from NVMe if anyone waits for it, else tell them that it is lost."""
        waiting = [(fetch, place) for fetch, place in arrival.waiting if not fetch.closed]
        for fetch, place in waiting:
            fetch.wait_no_longer(place)
        nvme = self._shelves.get(Tier.NVME)
        if waiting and arrival.tier is Tier.DRAM and nvme is not None and (records := nvme.find([arrival.block_hash])):
            arrival.tier, arrival.retention = Tier.NVME, retention_of(records[0])
            arrival.late, arrival.waiting = False, []
            for fetch, place in waiting:
                fetch.wait_for(place, arrival)
            self._submit(Tier.NVME, [(arrival, records[0])], now)
            return
        self._forget(arrival)
        self._resident.release([arrival.slot])

    def _forget(self, arrival: Arrival) -> None:
        self._arrivals.discard(arrival)
        if self._by_hash.get(arrival.block_hash) is arrival:
            del self._by_hash[arrival.block_hash]
