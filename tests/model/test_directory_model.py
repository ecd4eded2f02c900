"""Random operations on the directory against an oracle that keeps plain sets and sorts them: after each, `check()`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvtier.directory import Directory, PublishOutcome
from kvtier.record import NO_TENANT, Grant, Lease, Record, tenant_digest
from tests.rows import block_hashes

HASHES = block_hashes(20)
TENANTS = [NO_TENANT, tenant_digest("a"), tenant_digest("b")]


@dataclass
class Oracle:
    """What must be true, kept the slow and obvious way."""

    slot_count: int
    ready: dict[bytes, Record] = field(default_factory=dict)
    used_at: dict[bytes, tuple[float, int]] = field(default_factory=dict)
    """(last use, order of becoming a candidate) of each ready block."""
    writing: dict[Grant, bytes] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    dropped: set[Record] = field(default_factory=set)
    generation: int = 0

    def leased(self, record: Record) -> bool:
        return any(lease.record == record for lease in self.leases)

    def free_count(self) -> int:
        return self.slot_count - len(self.ready) - len(self.writing) - len(self.dropped)

    def evictable(self) -> list[Record]:
        idle = [record for record in self.ready.values() if not self.leased(record)]
        return sorted(idle, key=lambda r: (r.priority, self.used_at[r.block_hash][0], -r.depth))

    def coldest_keys(self, records: list[Record]) -> list[tuple[float, ...]]:
        return [(r.priority, self.used_at[r.block_hash][0], -r.depth) for r in records]


class Machine:
    """One run: the same random operation on both."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.slots = self.chance.randint(1, 14)
        self.directory = Directory(self.slots)
        self.oracle = Oracle(self.slots)
        self.now = 0.0
        self.hits = 0

    def step(self) -> None:
        self.now += self.chance.choice([0.0, 1.0])
        operation = self.chance.choice(
            2 * [self.reserve]
            + 5 * [self.publish]
            + 2 * [self.find]
            + 3 * [self.release]
            + [self.abandon, self.touch, self.acquire, self.drop, self.coldest]
        )
        operation()
        self.directory.check()
        oracle = self.oracle
        assert {record.block_hash: record for record in self.directory.records()} == oracle.ready
        assert self.directory.used_slots == self.slots - oracle.free_count()
        for tenant in TENANTS:
            held = [r.tenant for r in oracle.ready.values()] + [r.tenant for r in oracle.dropped]
            assert self.directory.tenant_slots(tenant) == [*held, *oracle.writing.values()].count(tenant)

    def reserve(self) -> None:
        count, tenant = self.chance.randint(0, 3), self.chance.choice(TENANTS)
        before = self.oracle.evictable()
        free = self.oracle.free_count()
        grants = self.directory.reserve(count, tenant)
        assert len(grants) == min(count, free + len(before))
        evicted = len(grants) - min(len(grants), free)
        gone = [record for record in before if self.directory.find([record.block_hash]) != [record]]
        assert len(gone) == evicted
        assert sorted(self.oracle.coldest_keys(gone)) == self.oracle.coldest_keys(before[:evicted]), "not the coldest"
        for record in gone:
            del self.oracle.ready[record.block_hash]
        for grant in grants:
            assert grant.generation > self.oracle.generation, "a generation came twice"
            self.oracle.generation = grant.generation
            assert grant.slot not in {held.slot for held in self.oracle.writing}, "a slot was given twice"
            assert grant.slot not in {record.slot for record in [*self.oracle.ready.values(), *self.oracle.dropped]}
            self.oracle.writing[grant] = tenant

    def publish(self) -> None:
        if not self.oracle.writing:
            return
        grant, tenant = self.chance.choice(list(self.oracle.writing.items()))
        stale = self.chance.random() < 0.2
        depth, priority = self.chance.randint(0, 5), self.chance.randint(0, 1)
        generation = grant.generation - 1 if stale else grant.generation
        record = Record(self.chance.choice(HASHES), grant.slot, generation, depth, b"sum", priority, 0, tenant)
        ((outcome, answer),) = self.directory.publish([record], self.now)
        if stale:
            assert (outcome, answer) == (PublishOutcome.STALE, None)
            return
        del self.oracle.writing[grant]
        if record.block_hash in self.oracle.ready:
            assert (outcome, answer) == (PublishOutcome.DUPLICATE, self.oracle.ready[record.block_hash])
        else:
            assert (outcome, answer) == (PublishOutcome.PUBLISHED, record)
            self.oracle.ready[record.block_hash] = record
            self.oracle.used_at[record.block_hash] = (self.now, 0)

    def abandon(self) -> None:
        if self.oracle.writing:
            grant = self.chance.choice(list(self.oracle.writing))
            self.directory.abandon([grant, grant])
            del self.oracle.writing[grant]

    def find(self) -> None:
        wanted = self.chance.sample(HASHES, 6)
        if self.chance.random() < 0.5:
            wanted.sort(key=lambda block_hash: block_hash not in self.oracle.ready)
        run = 0
        while run < 6 and wanted[run] in self.oracle.ready:
            run += 1
        assert self.directory.find(wanted) == [self.oracle.ready[block_hash] for block_hash in wanted[:run]]
        for block_hash in wanted:
            assert self.directory.holds(block_hash) == (block_hash in self.oracle.ready)
        self.hits += run

    def touch(self) -> None:
        wanted = self.chance.sample(HASHES, 6)
        self.directory.touch(wanted, self.now)
        for block_hash in wanted:
            if block_hash in self.oracle.ready:
                self.oracle.used_at[block_hash] = (self.now, 0)

    def some_records(self) -> list[Record]:
        known = [*self.oracle.ready.values(), *self.oracle.dropped]
        picked = self.chance.sample(known, min(len(known), 2))
        return [record._replace(generation=record.generation - self.chance.choice([0, 0, 0, 1])) for record in picked]

    def acquire(self) -> None:
        records = self.some_records()
        for record, lease in zip(records, self.directory.acquire(records), strict=True):
            assert (lease is not None) == (record in self.oracle.ready.values())
            if lease is not None:
                assert lease.record == record
                self.oracle.leases.append(lease)

    def release(self) -> None:
        if self.oracle.leases:
            lease = self.oracle.leases.pop(self.chance.randrange(len(self.oracle.leases)))
            self.directory.release([lease])
            if lease.record in self.oracle.dropped and not self.oracle.leased(lease.record):
                self.oracle.dropped.discard(lease.record)

    def drop(self) -> None:
        records = self.some_records()
        there = [record for record in records if record in self.oracle.ready.values()]
        assert self.directory.drop(records) == there
        for record in there:
            del self.oracle.ready[record.block_hash]
            if self.oracle.leased(record):
                self.oracle.dropped.add(record)

    def coldest(self) -> None:
        count = self.chance.randint(0, 4)
        coldest = self.directory.coldest(count)
        expected = self.oracle.evictable()
        assert self.oracle.coldest_keys(coldest) == self.oracle.coldest_keys(expected[:count])
        assert {*coldest} <= {*expected}


@pytest.mark.parametrize("block", range(10))
def test_the_directory_agrees_with_the_oracle_whatever_happens(block: int) -> None:
    hits = evictions = 0
    for seed in range(block * 10, block * 10 + 10):
        machine = Machine(seed)
        for _ in range(500):
            machine.step()
        hits += machine.hits
        evictions += machine.directory.evictions
    assert hits > 100 and evictions > 50, "the run must find and evict, or it proves nothing"
