"""Random operations on the directory against an oracle that keeps plain sets and sorts them: after each, `check()`.

Pins, priorities, expiry and quota included. A failure names its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvtier.directory import Directory, PublishOutcome
from kvtier.record import NO_TENANT, Grant, Lease, Record, tenant_digest
from kvtier.retention import Retention
from kvtier.terms import SlotLimits
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
    ranks: dict[bytes, int] = field(default_factory=dict)
    """Of each ready block its priority, or a higher one of a block that was once touched behind it."""
    writing: dict[Grant, bytes] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    dropped: list[Record] = field(default_factory=list)
    generation: int = 0
    pins_refused: int = 0

    def leased(self, record: Record) -> bool:
        return any(lease.record[1:3] == record[1:3] for lease in self.leases)

    def pin(self, pins_max: int) -> bool:
        granted = sum(record.pinned for record in self.ready.values()) < pins_max
        self.pins_refused += not granted
        return granted

    def used_by(self, tenant: bytes) -> int:
        held = [record.tenant for record in [*self.ready.values(), *self.dropped]]
        return [*held, *self.writing.values()].count(tenant)

    def hide(self, record: Record) -> None:
        del self.ready[record.block_hash]
        if self.leased(record):
            self.dropped.append(record)

    def free_count(self) -> int:
        return self.slot_count - len(self.ready) - len(self.writing) - len(self.dropped)

    def evictable(self) -> list[Record]:
        idle = [record for record in self.ready.values() if not self.leased(record) and not record.pinned]
        return sorted(idle, key=lambda r: (self.ranks[r.block_hash], self.used_at[r.block_hash][0], -r.depth))

    def coldest_keys(self, records: list[Record]) -> list[tuple[float, ...]]:
        return [(self.ranks[r.block_hash], self.used_at[r.block_hash][0], -r.depth) for r in records]


class Machine:
    """One run: the same random operation on both."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.slots = self.chance.randint(2, 14)
        self.pins_max = self.chance.choice([0, 1, 2, self.slots // 4])
        self.tenant_max = self.chance.choice([None, None, 1, 3, self.slots // 2])
        limits = SlotLimits(min(self.pins_max, self.slots), self.tenant_max)
        self.pins_max = limits.pins_max
        self.directory = Directory(self.slots, limits=limits)
        self.oracle = Oracle(self.slots)
        self.now = 0.0
        self.unix_s = 1_000
        self.hits = self.pins = self.expired = self.evicted_for_quota = self.refused_by_quota = 0
        self.waiting: dict[bytes, int] = {}
        self.asked = self.not_asked = 0

    def step(self) -> None:
        self.now += self.chance.choice([0.0, 1.0])
        operation = self.chance.choice(
            2 * [self.reserve]
            + 5 * [self.publish]
            + 2 * [self.find]
            + 3 * [self.release]
            + 2 * [self.ask]
            + [self.abandon, self.touch, self.acquire, self.drop, self.coldest, self.retain, self.unpin, self.expire]
        )
        operation()
        self.directory.check()
        self.pins = max(self.pins, self.directory.pinned)
        oracle = self.oracle
        assert {record.block_hash: record for record in self.directory.records()} == oracle.ready
        assert self.directory.used_slots == self.slots - oracle.free_count()
        assert self.directory.pins_refused == oracle.pins_refused
        assert self.directory.quota_shortage.refused == self.refused_by_quota
        for tenant in TENANTS:
            used = self.directory.tenant_slots(tenant)
            assert used == oracle.used_by(tenant)
            assert tenant == NO_TENANT or self.tenant_max is None or used <= self.tenant_max, "a quota does not hold"

    def ask(self) -> None:
        """All or none: `has_room` says beforehand whether `reserve` would give that many, and changes nothing."""
        count, tenant = self.chance.randint(1, self.slots), self.chance.choice(TENANTS)
        oracle, idle = self.oracle, self.oracle.evictable()
        missing = 0
        if tenant != NO_TENANT and self.tenant_max is not None:
            own = sum(record.tenant == tenant for record in idle)
            missing = max(0, count - max(0, self.tenant_max - oracle.used_by(tenant) + own))
        waiting = self.waiting.get(tenant, 0)
        self.refused_by_quota += max(0, missing - waiting)
        self.waiting[tenant] = max(waiting, missing) if missing else 0
        expected = missing == 0 and count <= oracle.free_count() + len(idle)
        assert self.directory.has_room(count, tenant) == expected
        self.asked += expected
        self.not_asked += not expected
        if expected:
            self.reserve(count, tenant)

    def reserve(self, least: int = 0, tenant: bytes | None = None) -> None:
        count = least or self.chance.randint(0, 3)
        tenant = self.chance.choice(TENANTS) if tenant is None else tenant
        oracle, before = self.oracle, self.oracle.evictable()
        free, own, wanted = oracle.free_count(), list[Record](), count
        if tenant != NO_TENANT and self.tenant_max is not None:
            used = oracle.used_by(tenant)
            own = [record for record in before if record.tenant == tenant][: max(0, used + count - self.tenant_max)]
            wanted = min(count, self.tenant_max - used + len(own))
            self.evicted_for_quota += len(own)
        waiting = self.waiting.get(tenant, 0)
        self.refused_by_quota += max(0, count - wanted - waiting)
        self.waiting[tenant] = max(waiting, count - wanted) if wanted < count else 0
        grants = self.directory.reserve(count, tenant)
        rest = [record for record in before if record not in own]
        assert len(grants) == min(wanted, free + len(own) + len(rest)) >= least, "fewer than there was room for"
        rest = rest[: max(0, len(grants) - free - len(own))]
        gone = [record for record in before if self.directory.find([record.block_hash]) != [record]]
        expected = sorted(oracle.coldest_keys(own + rest))
        assert sorted(oracle.coldest_keys(gone)) == expected, "not the coldest"
        assert sum(record.tenant == tenant for record in gone) >= len(own), "a quota was made good by others"
        for record in gone:
            del self.oracle.ready[record.block_hash]
        for grant in grants:
            assert grant.generation > self.oracle.generation, "a generation came twice"
            self.oracle.generation = grant.generation
            assert grant.slot not in {held.slot for held in self.oracle.writing}, "a slot was given twice"
            assert grant.slot not in {record.slot for record in [*oracle.ready.values(), *oracle.dropped]}
            self.oracle.writing[grant] = tenant

    def publish(self) -> None:
        if not self.oracle.writing:
            return
        grant, tenant = self.chance.choice(list(self.oracle.writing.items()))
        stale = self.chance.random() < 0.2
        depth, priority, pinned = self.chance.randint(0, 5), self.chance.randint(0, 1), self.chance.random() < 0.2
        expiry_s = self.chance.choice([0, 0, self.unix_s + self.chance.randint(1, 30)])
        generation = grant.generation - 1 if stale else grant.generation
        record = Record(
            self.chance.choice(HASHES), grant.slot, generation, depth, b"sum", priority, expiry_s, tenant, pinned
        )
        ((outcome, answer),) = self.directory.publish([record], self.now)
        if stale:
            assert (outcome, answer) == (PublishOutcome.STALE, None)
            return
        del self.oracle.writing[grant]
        if record.block_hash in self.oracle.ready:
            assert (outcome, answer) == (PublishOutcome.DUPLICATE, self.oracle.ready[record.block_hash])
        else:
            record = record._replace(pinned=pinned and self.oracle.pin(self.pins_max))
            assert (outcome, answer) == (PublishOutcome.PUBLISHED, record)
            self.oracle.ready[record.block_hash] = record
            self.oracle.used_at[record.block_hash] = (self.now, 0)
            self.oracle.ranks[record.block_hash] = record.priority

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
        highest = -100
        for block_hash in reversed(wanted):
            if block_hash in self.oracle.ready:
                self.oracle.used_at[block_hash] = (self.now, 0)
                self.oracle.ranks[block_hash] = highest = max(self.oracle.ranks[block_hash], highest)

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
            self.oracle.dropped = [record for record in self.oracle.dropped if self.oracle.leased(record)]

    def drop(self) -> None:
        records = self.some_records()
        there = [record for record in records if record in self.oracle.ready.values()]
        assert self.directory.drop(records) == there
        for record in there:
            self.oracle.hide(record)

    def retain(self) -> None:
        wanted = self.chance.sample(HASHES, 4)
        expiry_s = self.chance.choice([0, self.unix_s + self.chance.randint(1, 30)])
        asked = Retention(self.chance.randint(-1, 2), expiry_s, self.chance.random() < 0.5)
        self.directory.retain(wanted, asked)
        for block_hash in wanted if asked.asks else ():
            has = self.oracle.ready.get(block_hash)
            if has is not None:
                pinned = has.pinned or (asked.pinned and self.oracle.pin(self.pins_max))
                later_s = 0 if 0 in (has.expiry_s, expiry_s) else max(has.expiry_s, expiry_s)
                raised = has._replace(priority=max(has.priority, asked.priority), expiry_s=later_s, pinned=pinned)
                self.oracle.ready[block_hash] = raised
                if raised.priority != has.priority:
                    self.oracle.ranks[block_hash] = raised.priority

    def unpin(self) -> None:
        wanted = self.chance.sample(HASHES, 3)
        self.directory.unpin(wanted)
        for block_hash in wanted:
            if block_hash in self.oracle.ready:
                self.oracle.ready[block_hash] = self.oracle.ready[block_hash]._replace(pinned=False)

    def expire(self) -> None:
        self.unix_s += self.chance.randint(0, 10)
        late_s = self.unix_s - self.chance.choice([0, 0, 20])
        due = [record for record in self.oracle.ready.values() if 0 < record.expiry_s <= late_s]
        assert sorted(self.directory.expire(late_s)) == sorted(due)
        for record in due:
            self.oracle.hide(record)
        self.expired += len(due)
        assert self.directory.expired == self.expired

    def coldest(self) -> None:
        count = self.chance.randint(0, 4)
        coldest = self.directory.coldest(count)
        expected = self.oracle.evictable()
        assert self.oracle.coldest_keys(coldest) == self.oracle.coldest_keys(expected[:count])
        assert {*coldest} <= {*expected}


@pytest.mark.parametrize("block", range(10))
def test_the_directory_agrees_with_the_oracle_whatever_happens(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block * 10, block * 10 + 10):
        machine = Machine(seed)
        try:
            for _ in range(500):
                machine.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        seen["hits"] += machine.hits
        seen["evictions"] += machine.directory.evictions
        seen["pins"] += machine.pins
        seen["refused pins"] += machine.directory.pins_refused
        seen["expired"] += machine.expired
        seen["evicted for a quota"] += machine.evicted_for_quota
        seen["refused by a quota"] += machine.refused_by_quota
        seen["had room"] += machine.asked
        seen["had none"] += machine.not_asked
    assert min(seen.values()) > 5 and seen["hits"] > 60, f"the run must do it all, or it proves nothing: {seen}"
