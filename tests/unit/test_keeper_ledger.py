"""The keeper's books of one shelf: every claim has one owner, the table tells it, and nothing that is said can hurt."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from kvtier.directory import PublishOutcome, SlotState
from kvtier.errors import ShelfError
from kvtier.eviction import LeastRecentlyUsed
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.mirror import Mirror
from kvtier.keeper.slot_table import NOBODY, SlotTable
from kvtier.keeper.wire import Gone
from kvtier.record import NO_TENANT, Grant, Record, tenant_digest
from kvtier.retention import Retention
from kvtier.terms import SlotLimits
from kvtier.tiers.header import MAGIC
from kvtier.tiers.slab import Slab, make_dram_slab
from kvtier.write_budget import WriteBudget
from tests.rows import LAYOUT, SLOT_BYTES, block_hashes

SLOTS = 16
HASHES = block_hashes(60)
TENANT = tenant_digest("someone")
RETAINING = ("retain", "unpin", "expire")


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = make_dram_slab(SLOT_BYTES, SLOTS)
    yield made
    made.close()


def fresh(slab: Slab, table: SlotTable | None = None, limits: SlotLimits | None = None) -> Ledger:
    ledger = Ledger(0, slab, LAYOUT.layers, table or SlotTable.make(SLOTS), None, 0, LeastRecentlyUsed, limits)
    if table is None:
        ledger.restore([], [], 0.0)
    return ledger


def record(grant: Grant, number: int) -> Record:
    return Record(HASHES[number], *grant, depth=number, sums=bytes(8 * LAYOUT.layers))


def put(ledger: Ledger, owner: int, numbers: range) -> list[Record]:
    grants = ledger.reserve(owner, len(numbers), NO_TENANT)
    records = [record(grant, number) for grant, number in zip(grants, numbers, strict=True)]
    outcomes = ledger.publish(owner, records, False, 0.0)
    assert outcomes == [PublishOutcome.PUBLISHED] * len(numbers)
    return records


def test_a_reservation_belongs_to_its_owner_alone(slab: Slab) -> None:
    ledger = fresh(slab)
    (grant,) = ledger.reserve(3, 1, NO_TENANT)
    row = record(grant, 0)
    assert ledger.publish(4, [row], False, 0.0) == [PublishOutcome.STALE]
    ledger.abandon(4, [grant])
    assert list(ledger.table.entries())[grant.slot][:4] == (grant.generation, 0, SlotState.WRITING, 3)
    assert ledger.publish(3, [row], False, 0.0) == [PublishOutcome.PUBLISHED]
    assert ledger.publish(3, [row], False, 0.0) == [PublishOutcome.PUBLISHED], "asked again, the same answer"
    assert list(ledger.table.entries())[grant.slot][2:4] == (SlotState.READY, NOBODY)
    ledger.check()


def test_nonsense_is_stale_and_changes_nothing(slab: Slab) -> None:
    ledger = fresh(slab)
    (grant,) = ledger.reserve(0, 1, NO_TENANT)
    good = record(grant, 0)
    bad = [good._replace(slot=SLOTS), good._replace(generation=99), good._replace(sums=bytes(8))]
    assert ledger.publish(0, bad, False, 0.0) == [PublishOutcome.STALE] * 3
    ledger.abandon(0, [(SLOTS + 5, 1), (0, 77)])
    ledger.drop([(SLOTS, 1), (grant.slot, grant.generation)])
    ledger.release(0, [(0, 1), (SLOTS, 2)])
    assert ledger.acquire(0, [(SLOTS, 1), (grant.slot, grant.generation)]) == [False, False]
    stolen = good._replace(tenant=bytes(range(16)))
    assert ledger.publish(0, [stolen], False, 0.0) == [PublishOutcome.PUBLISHED]
    assert ledger.records() == [good], "the tenant is whoever reserved it"
    ledger.check()


def test_a_lease_has_one_bit_an_owner_and_keeps_the_row(slab: Slab) -> None:
    ledger = fresh(slab)
    records = put(ledger, 0, range(SLOTS))
    claim = (records[0].slot, records[0].generation)
    assert ledger.acquire(1, [claim, claim]) == [True, True] and ledger.acquire(5, [claim]) == [True]
    assert list(ledger.table.entries())[claim[0]].leases == 1 << 1 | 1 << 5
    ledger.drop([claim])
    assert len(ledger.reserve(2, SLOTS, NO_TENANT)) == SLOTS - 1
    ledger.release(1, [claim])
    assert ledger.reserve(2, 1, NO_TENANT) == []
    ledger.forget(5)
    assert len(ledger.reserve(2, 1, NO_TENANT)) == 1
    ledger.check()


def test_a_publication_with_a_lease_cannot_be_evicted_in_between(slab: Slab) -> None:
    ledger = fresh(slab)
    (grant,) = ledger.reserve(1, 1, NO_TENANT)
    ledger.publish(1, [record(grant, 0)], True, 0.0)
    assert len(ledger.reserve(2, SLOTS, NO_TENANT)) == SLOTS - 1
    ledger.check()


def test_rows_are_granted_all_or_none_and_nothing_goes_for_those_that_are_not(slab: Slab) -> None:
    ledger = fresh(slab, limits=SlotLimits(SLOTS, 4))
    records = put(ledger, 0, range(10))
    ledger.acquire(1, [(records[0].slot, records[0].generation)])
    assert ledger.reserve(1, 5, NO_TENANT, least=SLOTS) == [] and ledger.evictions == 0
    assert ledger.reserve(1, 3, TENANT, least=5) == [] and ledger.evictions == 0 and len(ledger) == 10
    assert len(ledger.reserve(1, 3, TENANT, least=4)) == 3
    assert len(ledger.reserve(1, 5, NO_TENANT, least=12)) == 5 and len(ledger) == 8
    assert len(ledger.reserve(1, 9, NO_TENANT, least=1)) == 7, "fewer than that will do"
    ledger.check()


def test_who_joins_keeps_what_it_names_and_nothing_else(slab: Slab) -> None:
    ledger = fresh(slab)
    grants = ledger.reserve(1, 4, NO_TENANT)
    others = ledger.reserve(2, 2, NO_TENANT)
    ledger.reconcile(1, [tuple(grants[0]), (9, 999)], [])
    assert ledger.used_slots == 3 and ledger.owners() == {1, 2}
    row = record(grants[1], 1)
    assert ledger.publish(1, [row], False, 0.0) == [PublishOutcome.STALE]
    ledger.forget(2)
    assert ledger.used_slots == 1 and len(others) == 2
    ledger.check()


def test_a_granted_slots_header_is_gone_before_the_grant_is_known(slab: Slab) -> None:
    ledger = fresh(slab)
    assert slab.mapping is not None
    for slot in range(SLOTS):
        slab.mapping[slab.offset(slot) : slab.offset(slot) + len(MAGIC)] = MAGIC
    for slot, _ in ledger.reserve(0, 5, NO_TENANT):
        assert slab.mapping[slab.offset(slot) : slab.offset(slot) + len(MAGIC)] == bytes(len(MAGIC))


def test_what_the_write_budget_gave_for_nothing_comes_back(slab: Slab) -> None:
    budget = WriteBudget(6 * SLOT_BYTES, SLOT_BYTES, 0.0, 0.0)
    table = SlotTable.make(SLOTS)
    ledger = Ledger(1, slab, LAYOUT.layers, table, None, 0, LeastRecentlyUsed, None, budget)
    ledger.restore([], [], 0.0)
    grants = ledger.reserve(0, 8, NO_TENANT)
    assert len(grants) == 6 and ledger.numbers().counts.write_budget_refused == 2
    ledger.abandon(0, grants[:2])
    assert ledger.reserve(0, 1, NO_TENANT) == [], "they may have been written to"
    ledger.abandon(1, grants[2:4], unused=True)
    assert ledger.reserve(0, 1, NO_TENANT) == [], "not by who does not have them"
    ledger.abandon(0, [*grants[2:4], *grants[2:4]], unused=True)
    assert len(ledger.reserve(0, 8, NO_TENANT)) == 2, "each once"
    ledger.expire(25 * 3600.0, 25 * 3600.0)
    assert len(ledger.reserve(0, 4, NO_TENANT)) == 4
    ledger.check()


def test_a_table_with_impossible_numbers_is_refused() -> None:
    for priority, expiry_s, pinned in ((101, 0, 0), (0, 1 << 40, 0), (0, 0, 2)):
        table = SlotTable.make(SLOTS)
        table.put(3, 1, 0, SlotState.READY, NOBODY, NO_TENANT, priority, expiry_s, bool(pinned))
        if pinned:
            table._map[3 * 48 + 27] = pinned
        with pytest.raises(ShelfError):
            list(table.entries())


def test_a_table_must_be_memory_of_the_right_length_that_cannot_shrink(slab: Slab) -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SLOTS * 40)
    with pytest.raises(ShelfError):
        SlotTable(loose, SLOTS, writable=True)
    with pytest.raises(ShelfError):
        SlotTable(os.dup(SlotTable.make(SLOTS).descriptor), SLOTS + 1, writable=False)
    with pytest.raises(ShelfError):
        SlotTable(os.open("/dev/null", os.O_RDWR), SLOTS, writable=False)
    with pytest.raises(OSError):
        os.ftruncate(slab.descriptor, 0)


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_keep_books_table_and_mirror_in_step_and_survive_takeovers(slab: Slab, seed: int) -> None:
    chance = random.Random(seed)
    limits = SlotLimits(pins_max=3, tenant_max=5)
    ledger, mirror = fresh(slab, limits=limits), Mirror(SLOTS)
    as_written: dict[int, Record] = {}
    granted: dict[int, list[Grant]] = {owner: [] for owner in range(4)}
    leased: dict[int, set[tuple[int, int]]] = {owner: set() for owner in range(4)}
    published = taken_over = pinned = expired = 0
    for step in range(400):
        owner, now = chance.randrange(4), float(step)
        action = chance.choice(
            ["reserve", "publish", "publish", "abandon", "drop", "acquire", "release", "forget", "over", *RETAINING]
        )
        if action == "reserve":
            granted[owner] += ledger.reserve(owner, chance.randrange(1, 6), chance.choice([NO_TENANT, TENANT]))
        elif action == "publish" and granted[owner]:
            grant = granted[owner].pop(chance.randrange(len(granted[owner])))
            number = chance.randrange(len(HASHES))
            known = any(one.block_hash == HASHES[number] for one in ledger.records())
            asks = {"priority": chance.randrange(3), "expiry_s": chance.choice([0, step + 10, step + 10])}
            row = record(grant, number)._replace(pinned=chance.random() < 0.2, **asks)
            as_written[grant.slot] = row
            (outcome,) = ledger.publish(owner, [row], False, now)
            assert outcome is (PublishOutcome.DUPLICATE if known else PublishOutcome.PUBLISHED)
            published += not known
        elif action == "abandon" and granted[owner]:
            ledger.abandon(owner, [granted[owner].pop()])
        elif action == "drop" and ledger.records():
            ledger.drop([chance.choice(ledger.records())[1:3]])
        elif action == "acquire" and ledger.records():
            claim = chance.choice(ledger.records())[1:3]
            assert ledger.acquire(owner, [claim]) == [True]
            leased[owner].add(claim)
        elif action == "release" and leased[owner]:
            ledger.release(owner, [leased[owner].pop()])
        elif action == "forget" and chance.random() < 0.3:
            ledger.forget(owner)
            granted[owner], leased[owner] = [], set()
        elif action == "over" and chance.random() < 0.3:
            before, table = ledger.records(), ledger.table
            records = [as_written[one.slot]._replace(tenant=one.tenant) for one in before]
            again = SlotTable(os.dup(table.descriptor), SLOTS, writable=True)
            entries = list(again.entries())
            ledger = Ledger(0, slab, LAYOUT.layers, again, None, 10_000 * step, LeastRecentlyUsed, limits)
            ledger.restore(records, entries, now)
            assert sorted(ledger.records()) == sorted(before), "what rows were raised to is lost"
            taken_over += 1
        elif action == "retain":
            asked = Retention(chance.randrange(-1, 5), step + 20, chance.random() < 0.5)
            ledger.retain(chance.sample(HASHES, 20), asked)
        elif action == "unpin":
            ledger.unpin(chance.sample(HASHES, 10))
        elif action == "expire":
            here = ledger.records()
            ledger.expire(step, step)
            gone = [one for one in here if 0 < one.expiry_s <= step]
            assert sorted(ledger.records()) == sorted(one for one in here if one not in gone)
            expired += len(gone)
        for change in ledger.take_changes():
            if isinstance(change, Gone):
                mirror.remove(change.slots)
            else:
                mirror.add(change.rows)
        ledger.check()
        mirror.check()
        assert {one.block_hash: one for one in ledger.records()} == {
            one.block_hash: one for one in mirror.oldest(SLOTS)
        }
        pinned = max(pinned, sum(one.pinned for one in ledger.records()))
        taken = [entry.tenant for entry in ledger.table.entries() if entry.state is not SlotState.FREE]
        assert taken.count(TENANT) <= 5, "over the quota"
        held = sum(map(len, granted.values()))
        rows = {one[1:3] for one in ledger.records()}
        orphans = set().union(*leased.values()) - rows
        assert ledger.used_slots == held + len(rows) + len(orphans), action
    assert published > 10 and taken_over > 2 and pinned > 1 and expired > 0
