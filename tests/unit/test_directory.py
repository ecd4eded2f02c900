"""The books of a shelf: reservations, publication, leases, drops, eviction order, and what the log is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.directory import Directory, PublishOutcome
from kvtier.record import NO_TENANT, Grant, Record, tenant_digest
from tests.rows import block_hashes

HASHES = block_hashes(20)


def put(directory: Directory, hashes: Sequence[bytes], now: float = 0.0, first_depth: int = 0) -> list[Record]:
    """Reserve and publish one chain."""
    grants = directory.reserve(len(hashes))
    records = [
        Record(block_hash, *grant, first_depth + place, b"sum")
        for place, (block_hash, grant) in enumerate(zip(hashes, grants, strict=True))
    ]
    assert {outcome for outcome, _ in directory.publish(records, now)} <= {PublishOutcome.PUBLISHED}
    directory.check()
    return records


def test_a_reserved_slot_shows_nothing_until_it_is_published() -> None:
    directory = Directory(4)
    (grant,) = directory.reserve(1)
    assert directory.find(HASHES[:1]) == [] and not directory.holds(HASHES[0]) and directory.used_slots == 1
    record = Record(HASHES[0], *grant, 0, b"sum")
    assert directory.publish([record], 0.0) == [(PublishOutcome.PUBLISHED, record)]
    assert directory.find(HASHES[:1]) == [record] and directory.holds(HASHES[0]) and len(directory) == 1
    directory.check()


def test_find_answers_the_leading_run_only() -> None:
    directory = Directory(8)
    records = put(directory, HASHES[:2]) + put(directory, HASHES[3:5])
    assert directory.find(HASHES[:5]) == records[:2]
    assert directory.find(HASHES[2:5]) == []


def test_a_duplicate_keeps_the_first_row_and_frees_the_second_slot() -> None:
    directory = Directory(4)
    first, second = directory.reserve(2)
    kept = Record(HASHES[0], *first, 0, b"sum")
    directory.publish([kept], 0.0)
    assert directory.publish([Record(HASHES[0], *second, 0, b"sum")], 0.0) == [(PublishOutcome.DUPLICATE, kept)]
    assert directory.used_slots == 1
    directory.check()


def test_publishing_without_the_reservation_is_stale() -> None:
    directory = Directory(1)
    (grant,) = directory.reserve(1)
    directory.abandon([grant])
    assert directory.publish([Record(HASHES[0], *grant, 0, b"sum")], 0.0) == [(PublishOutcome.STALE, None)]
    (later,) = directory.reserve(1)
    assert later.slot == grant.slot and later.generation > grant.generation
    assert directory.publish([Record(HASHES[0], *grant, 0, b"sum")], 0.0) == [(PublishOutcome.STALE, None)]
    assert directory.publish([Record(HASHES[0], 7, 1, 0, b"sum")], 0.0) == [(PublishOutcome.STALE, None)]
    directory.abandon([grant])
    assert directory.used_slots == 1, "a stale grant gives nobody's slot back"
    directory.check()


def test_generations_never_repeat() -> None:
    directory = Directory(2, generation_floor=100)
    seen = []
    for _ in range(5):
        grants = directory.reserve(2)
        seen += [grant.generation for grant in grants]
        directory.abandon(grants)
    assert seen == list(range(101, 111))


def test_a_full_shelf_evicts_the_coldest_and_children_before_parents() -> None:
    directory = Directory(6)
    put(directory, HASHES[:3], now=1.0)
    put(directory, HASHES[3:6], now=2.0)
    directory.touch(HASHES[:3], 3.0)
    for expected in (5, 4, 3, 2, 1):
        assert [record.block_hash for record in directory.coldest(1)] == [HASHES[expected]]
        assert len(directory.reserve(1)) == 1 and not directory.holds(HASHES[expected])
        directory.check()
    assert directory.holds(HASHES[0]) and directory.evictions == 5


def test_higher_priority_stays_longer() -> None:
    directory = Directory(2)
    first, second = directory.reserve(2)
    directory.publish([Record(HASHES[0], *first, 0, b"sum", priority=1)], 1.0)
    directory.publish([Record(HASHES[1], *second, 0, b"sum")], 2.0)
    directory.reserve(1)
    assert directory.holds(HASHES[0]) and not directory.holds(HASHES[1])


def test_less_than_asked_is_an_outcome_and_what_is_leased_or_written_stays() -> None:
    directory = Directory(3)
    records = put(directory, HASHES[:2])
    leases = [lease for lease in directory.acquire(records[:1]) if lease is not None]
    assert len(directory.reserve(3)) == 2, "one is leased"
    assert directory.reserve(1) == [], "two are written"
    assert directory.find(HASHES[:1]) == records[:1]
    directory.release(leases)
    directory.check()
    assert len(directory.reserve(1)) == 1


def test_leases_are_counted() -> None:
    directory = Directory(1)
    records = put(directory, HASHES[:1])
    first, second = directory.acquire(records * 2)
    assert first is not None and second is not None
    directory.release([first])
    assert directory.reserve(1) == []
    directory.release([second])
    with pytest.raises(AssertionError):
        directory.release([second])
    assert len(directory.reserve(1)) == 1


def test_a_lease_on_what_was_replaced_is_refused() -> None:
    directory = Directory(1)
    (old,) = put(directory, HASHES[:1])
    (new,) = put(directory, HASHES[1:2])
    assert old.slot == new.slot
    assert directory.acquire([old]) == [None]
    assert directory.drop([old]) == [] and directory.holds(HASHES[1])


def test_a_dropped_row_is_hidden_at_once_and_freed_with_its_last_lease() -> None:
    directory = Directory(1)
    records = put(directory, HASHES[:1])
    (lease,) = directory.acquire(records)
    assert lease is not None and directory.drop(records) == records
    assert directory.find(HASHES[:1]) == [] and directory.acquire(records) == [None] and directory.reserve(1) == []
    directory.check()
    directory.release([lease])
    assert directory.used_slots == 0
    directory.check()


def test_slots_are_charged_to_whoever_reserved_them() -> None:
    directory = Directory(4)
    tenant = tenant_digest("someone")
    grants = directory.reserve(2, tenant)
    directory.reserve(1)
    assert (directory.tenant_slots(tenant), directory.tenant_slots(NO_TENANT)) == (2, 1)
    record = Record(HASHES[0], *grants[0], 0, b"sum", tenant=tenant)
    directory.publish([record], 0.0)
    directory.abandon(grants[1:])
    directory.check()
    assert directory.tenant_slots(tenant) == 1
    directory.drop([record])
    assert directory.tenant_slots(tenant) == 0
    directory.check()


def test_restored_rows_are_there_and_the_later_of_two_wins() -> None:
    records = [Record(HASHES[0], 2, 7, 0, b"a"), Record(HASHES[1], 0, 5, 1, b"b"), Record(HASHES[0], 1, 9, 0, b"c")]
    directory = Directory(4, generation_floor=20)
    directory.restore(records, 1.0)
    directory.check()
    assert directory.find(HASHES[:2]) == [records[2], records[1]] and directory.used_slots == 2
    assert directory.reserve(1)[0].generation == 21
    assert [record.block_hash for record in directory.coldest(2)] == [HASHES[1], HASHES[0]]


class Listener:
    """A `ChangeLog` that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []

    def reserved(self, grants: Sequence[Grant]) -> None:
        self.heard.append(("reserved", list(grants)))

    def published(self, records: Sequence[Record]) -> None:
        self.heard.append(("published", list(records)))

    def dropped(self, records: Sequence[Record]) -> None:
        self.heard.append(("dropped", list(records)))


def test_the_log_is_told_of_each_change_that_happened_and_of_no_other() -> None:
    listener = Listener()
    directory = Directory(2, log=listener)
    grants = directory.reserve(5)
    records = [Record(HASHES[0], *grant, 0, b"sum") for grant in grants]
    directory.publish(records, 0.0)
    directory.drop([records[1], records[0]])
    directory.drop(records)
    assert directory.reserve(0) == []
    assert listener.heard == [("reserved", grants), ("published", records[:1]), ("dropped", records[:1])]
