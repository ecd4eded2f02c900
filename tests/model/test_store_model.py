"""Random operations on a whole store against an oracle that knows only this: a slot handed out as a hit holds exactly
the bytes of its hash, nothing is found once it has expired, no tenant has more than its share, nobody changes a row
that is held, and every book adds up after every step.

Real arena, real DRAM and NVMe slabs, real directories; faults come from the seam below the I/O engine, from rows that
are corrupted behind the store's back, and from transfers that hang past every deadline.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes import LAYOUT, NAMESPACE, TENANTS, SteppedTiers, keystream, random_retention

from kvtier.block import BlockHash, Tier
from kvtier.config import IoConfig
from kvtier.cost import CostModel
from kvtier.demotion import NvmePolicy
from kvtier.eviction import POLICIES, LeastRecentlyUsed
from kvtier.io.base import Operation
from kvtier.io.faulty import Call, FaultyCalls, seeded_faults
from kvtier.metrics import Metrics
from kvtier.promotion import Fetch
from kvtier.retention import Retention
from kvtier.shelves import open_dram_shelf, open_nvme_shelf
from kvtier.store import Store
from kvtier.terms import SlotLimits
from kvtier.tiers.hbm import HbmArena
from tests.rows import directory_of

HBM, DRAM, NVME = 10, 8, 24
LIMITS = SlotLimits(pins_max=2, tenant_max=6)
STEPS = 3000


@dataclass
class Holder:
    """What a sequence is to the store: a run of held slots, all sealed but perhaps the last one."""

    chain: list[BlockHash]
    retention: Retention
    private: bool
    """Keeps its own rows, as one that reads nothing."""
    slots: list[int] = field(default_factory=list)
    unsealed: int | None = None


class Oracle:
    """Drives a store and judges every byte that it hands out."""

    def __init__(self, store: Store, arena: HbmArena, seed: int) -> None:
        self.store = store
        self.arena = arena
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.chains = make_chains(self.chance)
        self.holders: list[Holder] = []
        self.fetches: list[tuple[Holder, Fetch]] = []
        self.draining: Tier | None = None
        self.hits: Counter[Tier] = Counter()
        self.refused = self.expired = self.pinned = 0
        self.polled_at = self.now
        self.expiry_s: dict[BlockHash, float] = {}
        """The latest that any request has asked for a block that may be somewhere."""
        self.fresh: set[BlockHash] = set()
        """Sealed since the last poll."""

    def step(self) -> None:
        """One random operation, then every check."""
        operations = [
            self.fetch,
            self.settle,
            self.extend,
            self.release,
            self.abandon,
            self.poll,
            self.wait,
            self.drain,
            self.retain,
        ]
        self.chance.choices(operations, weights=[5, 6, 8, 4, 1, 8, 2, 1, 1])[0]()
        self.check()

    def fetch(self) -> None:
        if len(self.holders) + len(self.fetches) >= 4:
            return
        chain = self.chance.choice(self.chains)
        wanted = self.chance.randrange(0, len(chain) + 1)
        total = min(HBM, wanted + self.chance.randrange(0, 3))
        fetch = self.store.fetch(chain[:wanted], total, self.now)
        if fetch is None:
            self.refused += 1
            return
        assert len(fetch.slots) <= wanted
        assert len(set(fetch.slots)) == len(fetch.slots)
        for block_hash in chain[: len(fetch.slots)]:
            assert self.expiry_s[block_hash] > self.polled_at or block_hash in self.fresh, "what had expired was found"
        retention = random_retention(self.chance, self.now)
        self.fetches.append((Holder(chain, retention, private=self.chance.random() < 0.1), fetch))

    def settle(self) -> None:
        ready = [item for item in self.fetches if item[1].is_ready(self.now)]
        if not ready:
            return
        holder, fetch = self.chance.choice(ready)
        self.fetches.remove((holder, fetch))
        slots, origins = self.store.settle(fetch)
        assert len(slots) == len(origins)
        for slot, block_hash, origin in zip(slots, holder.chain, origins, strict=False):
            assert self.holds(slot, block_hash), f"a hit from {origin} holds other bytes than its hash says"
            self.hits[origin] += 1
        holder.slots = list(slots)
        self.holders.append(holder)

    def extend(self) -> None:
        """Compute the next block of a holder: allocate, write, later seal."""
        growing = [holder for holder in self.holders if len(holder.slots) < len(holder.chain)]
        if not growing:
            return
        holder = self.chance.choice(growing)
        if holder.unsealed is None:
            slots = self.store.allocate(1)
            if slots is not None:
                holder.unsealed = slots[0]
                self.arena.view(slots[0])[:] = keystream(holder.chain[len(holder.slots)])
            return
        depth, slot, holder.unsealed = len(holder.slots), holder.unsealed, None
        if not (holder.private and self.store.is_resident(holder.chain[depth])):
            slot = self.store.seal(slot, holder.chain[depth], depth, self.now, holder.retention)
            self.note(holder.chain[depth], holder.retention)
            self.fresh.add(holder.chain[depth])
        holder.slots.append(slot)

    def retain(self) -> None:
        """A request finds the first blocks of a chain and asks something for them."""
        chain = self.chance.choice(self.chains)
        wanted, retention = chain[: self.chance.randrange(1, len(chain) + 1)], random_retention(self.chance, self.now)
        self.store.retain(wanted, retention)
        if retention.asks:
            for block_hash in wanted:
                self.note(block_hash, retention)

    def note(self, block_hash: BlockHash, retention: Retention) -> None:
        """Somebody asks something for a block: it may be found for so long."""
        self.expiry_s[block_hash] = max(self.expiry_s.get(block_hash, 0.0), retention.expiry_s or math.inf)

    def release(self) -> None:
        if self.holders:
            holder = self.holders.pop(self.chance.randrange(len(self.holders)))
            self.store.release([*holder.slots, *([] if holder.unsealed is None else [holder.unsealed])])

    def abandon(self) -> None:
        if self.fetches:
            self.store.abandon(self.fetches.pop(self.chance.randrange(len(self.fetches)))[1])

    def poll(self) -> None:
        self.store.poll(self.now)
        self.polled_at = self.now
        self.fresh.clear()
        for block_hash in [] if self.store.busy else list(self.expiry_s):
            on_shelf = any(shelf.holds(block_hash) for shelf in self.store._shelves.values())
            if not on_shelf and not self.store.is_resident(block_hash):
                self.expired += self.expiry_s.pop(block_hash) <= self.now
        if self.draining is not None and self.store.drain(self.draining, give_up=self.chance.random() < 0.02):
            self.draining = None

    def wait(self) -> None:
        self.now += self.chance.choice([0.001, 0.1, 3.0])

    def drain(self) -> None:
        if self.draining is None:
            self.draining = self.chance.choice([Tier.HBM, Tier.DRAM])

    def check(self) -> None:
        held = Counter(slot for holder in self.holders for slot in holder.slots)
        held.update(holder.unsealed for holder in self.holders if holder.unsealed is not None)
        held.update(slot for _, fetch in self.fetches for slot in fetch.slots)
        self.store.check(held)
        for shelf in self.store._shelves.values():
            directory = directory_of(shelf)
            assert max(map(directory.tenant_slots, TENANTS[1:])) <= (
                directory._limits.tenant_max or directory.slot_count
            )
            self.pinned += directory.pinned > 0
        for holder in self.holders:
            for slot, block_hash in zip(holder.slots, holder.chain, strict=False):
                assert self.holds(slot, block_hash), "a held row was changed"

    def holds(self, slot: int, block_hash: BlockHash) -> bool:
        return self.arena.view(slot) == keystream(block_hash)

    def let_go(self) -> None:
        """Give everything back."""
        while self.fetches:
            self.abandon()
        while self.holders:
            self.release()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of day is the oracle's."""
    made = Clock()
    monkeypatch.setattr(time, "time", made)
    return made


class Clock:
    """Unix seconds; the same numbers as the store's monotonic ones."""

    oracle: Oracle | None = None

    def __call__(self) -> float:
        return self.oracle.now if self.oracle is not None else 1000.0


def make_chains(chance: random.Random) -> list[list[BlockHash]]:
    """Chains that share their beginnings, as conversations do."""
    chains: list[list[BlockHash]] = []
    for number in range(7):
        base = chance.choice(chains)[: chance.randrange(1, 4)] if chains and number % 2 else []
        own = [hashlib.sha256(chance.randbytes(16)).digest() for _ in range(7 - len(base))]
        chains.append(base + own)
    return chains


def random_mishap(tiers: SteppedTiers, chance: random.Random) -> None:
    """Corrupt a byte anywhere in a slab, or let a lane hang or move again."""
    tier = chance.choice([Tier.DRAM, Tier.NVME])
    kind = chance.randrange(4)
    if kind == 0:
        slab = tiers.slabs[tier]
        tiers.corrupt(tier, chance.randrange(slab.slot_count), chance.randrange(slab.slot_bytes))
    elif kind == 1:
        tiers.io[tier].hanging = {chance.choice([Operation.READ, Operation.WRITE])}
    else:
        tiers.io[tier].hanging = set()


QUICK = set(zip(NvmePolicy, POLICIES, strict=True))
"""Each policy once."""


@pytest.mark.parametrize(
    ("seed", "eviction", "policy"),
    [
        pytest.param(seed, eviction, policy, marks=[] if (policy, eviction) in QUICK else pytest.mark.long)
        for seed, eviction in enumerate(POLICIES)
        for policy in NvmePolicy
    ],
)
def test_every_hit_holds_its_bytes_whatever_happens_below(
    policy: NvmePolicy, seed: int, eviction: str, tmp_path: Path, clock: Clock
) -> None:
    late = policy is list(NvmePolicy)[seed]  # HBM is a device's, to which copies come late
    print("seed", seed, policy, eviction, late)
    calls = FaultyCalls(seeded_faults(seed, count=60, nth_max=600))
    tiers = SteppedTiers(
        tmp_path, HBM, DRAM, NVME, policy, calls, seed, queue_max=6, fetch_deadline_s=2.0, eviction=POLICIES[eviction],
        limits=LIMITS, late=late,
    )  # fmt: skip
    oracle = clock.oracle = Oracle(tiers.store, tiers.arena, seed)
    chance = random.Random(seed + 1)
    for _ in range(STEPS):
        oracle.step()
        tiers.step(chance.randrange(0, 4))
        if chance.random() < 0.05:
            random_mishap(tiers, chance)
    for io in tiers.io.values():
        io.hanging.clear()
    oracle.let_go()
    for _ in range(10):
        oracle.now += 10.0
        tiers.settle(oracle.now)
    oracle.check()
    stats = tiers.store.stats()
    assert min(oracle.hits[tier] for tier in Tier) > 0, oracle.hits
    assert oracle.refused > 0, "HBM was never full"
    assert min(oracle.expired, oracle.pinned, stats["hbm_expired"]) > 0, "nothing was pinned or expired"
    assert stats["dram_bad_row"] + stats["nvme_bad_row"] > 0, "no corrupted row was ever read"
    assert stats["dram_io_error"] + stats["nvme_io_error"] + stats["nvme_no_space"] > 0, "no fault ever struck"
    assert tiers.store.available_count == HBM
    assert tiers.late is None or tiers.late.late_count > 100, "no copy was late"
    assert (stats["arriving_blocks"], stats["writing_blocks"], stats["waiting_writes"]) == (0, 0, 0)
    tiers.close()


@pytest.mark.parametrize(("seed", "faulty"), [(0, True), (2, False), pytest.param(1, True, marks=pytest.mark.long)])
def test_the_same_holds_with_real_threads_and_a_journal(seed: int, faulty: bool, tmp_path: Path, clock: Clock) -> None:
    """Without faults rows move as in production: those of DRAM within memory, those of NVMe by io_uring."""
    print("seed", seed)
    arena, metrics = HbmArena(LAYOUT, HBM), Metrics()
    store = Store(LAYOUT, arena, LeastRecentlyUsed, metrics, NvmePolicy.THROUGH, CostModel(LAYOUT, 2.0))
    io = IoConfig(readers=2, writers=2, in_flight_max=8)
    calls = FaultyCalls(seeded_faults(seed, count=40, nth_max=800)) if faulty else None
    slot_bytes = LAYOUT.row_bytes + 4096
    store.add_shelf(open_dram_shelf(LAYOUT, NAMESPACE, DRAM * slot_bytes, io, lambda: None, calls=calls))
    nvme = open_nvme_shelf(LAYOUT, NAMESPACE, tmp_path / "cache", 1 << 19, io, lambda: None, calls=calls)
    store.add_shelf(nvme)
    oracle = clock.oracle = Oracle(store, arena, seed)
    for _ in range(STEPS):
        oracle.step()
    oracle.let_go()
    end = time.monotonic() + 60
    while (store.busy or store.stats()["waiting_writes"]) and time.monotonic() < end:
        oracle.now += 10.0
        store.poll(oracle.now)
        time.sleep(0.001)
    oracle.check()
    assert min(oracle.hits[tier] for tier in Tier) > 0, oracle.hits
    assert calls is None or calls.count(Call.READ) > 100
    assert store.available_count == HBM
    store.close(60.0)
