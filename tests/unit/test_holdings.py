"""Rows and leases that are held of a shelf: all asked for or none, kept whatever comes, given back, judged in place."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.block import Tier
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.record import NO_TENANT, Grant, Lease, Record, tenant_digest
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import ShelfDone, ShelfOutcome, WriteItem
from kvtier.terms import STANDARD, Terms
from kvtier.ticket import Reply, ShelfOperation
from tests.rows import LAYOUT, SLOT_BYTES, ShelfUser, block_hashes, dram_user, filled, nvme_user, payload

HASHES = block_hashes(40)
NVME_BYTES_OF_12 = 12 * SLOT_BYTES + 85_000
Make = Callable[..., ShelfUser]


@pytest.fixture(params=[Tier.DRAM, Tier.NVME], ids=["dram", "nvme"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Opens a shelf of exactly 12 slots; in the end nothing must be held, and all are checked and closed."""
    made: list[ShelfUser] = []

    def open_one(calls: FaultyCalls | None = None, terms: Terms = STANDARD) -> ShelfUser:
        if request.param is Tier.DRAM:
            made.append(dram_user(12, calls, terms=terms))
        else:
            made.append(nvme_user(tmp_path / str(len(made)), NVME_BYTES_OF_12, calls, terms=terms))
        assert made[-1].shelf.slot_count == 12
        return made[-1]

    yield open_one
    for user in made:
        assert len(user.shelf.holdings) == 0, "something is still held"
        user.shelf.check()
        user.shelf.close(60.0)


def answer(user: ShelfUser, number: int) -> Reply:
    """The one reply that is there."""
    user.shelf.poll(user.now)
    [reply] = user.shelf.holdings.replies()
    assert reply.number == number
    return reply


def rows(user: ShelfUser, count: int, tenant: bytes = NO_TENANT) -> list[Grant] | None:
    reply = answer(user, user.shelf.holdings.ask_rows(count, tenant))
    assert reply.leases is None and (reply.grants is None or len(set(reply.grants)) == count)
    return reply.grants


def leases(user: ShelfUser, records: list[Record]) -> list[Lease | None]:
    reply = answer(user, user.shelf.holdings.ask_leases(records))
    assert reply.grants is None and reply.leases is not None
    return reply.leases


def write_into(
    user: ShelfUser, hashes: list[bytes], grants: list[Grant], retention: Retention = PLAIN
) -> list[ShelfDone | None]:
    items = [
        WriteItem(block_hash, depth, filled(block_hash), None, retention, grant=grant)
        for depth, (block_hash, grant) in enumerate(zip(hashes, grants, strict=True))
    ]
    return user.finish(user.shelf.write(items, user.now))


def outcomes(done: list[ShelfDone | None]) -> list[ShelfOutcome | None]:
    return [None if end is None else end.outcome for end in done]


def taken(done: list[ShelfDone | None]) -> list[Lease]:
    return [end.lease for end in done if end is not None and end.lease is not None]


def test_rows_are_given_all_or_none_and_nobody_else_gets_them(make: Make) -> None:
    user = make()
    user.write(HASHES[:12])
    assert rows(user, 13) is None and user.hits(HASHES[:12]) == 12, "what cannot be had evicts nothing"
    held = rows(user, 7)
    assert held is not None and user.hits(HASHES[:12]) == 5 and len(user.shelf.holdings) == 7
    assert rows(user, 6) is None and user.hits(HASHES[:12]) == 5
    assert outcomes(user.write(HASHES[20:28])) == [ShelfOutcome.DONE] * 5 + [None] * 3, "seven are held"
    user.shelf.holdings.give_rows(held)
    assert outcomes(user.write(HASHES[28:36])) == [ShelfOutcome.DONE] * 8


def test_what_is_written_into_an_asked_row_is_leased_in_the_same_step(make: Make) -> None:
    user = make()
    held = rows(user, 3)
    assert held is not None
    done = write_into(user, HASHES[:3], held)
    assert outcomes(done) == [ShelfOutcome.DONE] * 3
    mine = taken(done)
    assert [(lease.record.block_hash, lease.record.slot) for lease in mine] == [
        (block_hash, grant.slot) for block_hash, grant in zip(HASHES[:3], held, strict=True)
    ]
    user.now += 1
    user.write(HASHES[10:22])
    assert user.hits(HASHES[:3]) == 3 and user.hits(HASHES[10:22]) == 9, "whatever comes, they stay"
    user.shelf.holdings.end_leases(mine)
    user.now += 1
    user.write(HASHES[22:34])
    assert user.hits(HASHES[:3]) == 0


def test_a_block_that_is_there_already_gives_its_row_back_and_the_first_one_can_be_leased(make: Make) -> None:
    user = make()
    held = rows(user, 2)
    assert held is not None
    items = [WriteItem(HASHES[0], 0, filled(HASHES[0]), grant=grant) for grant in held]
    [ticket, other] = user.shelf.write(items, user.now)
    assert ticket is not None and other is None, "it is being written: the second row is still the asker's"
    [first] = user.finish([ticket])
    assert first is not None and first.lease is not None
    assert user.shelf.write(items[1:], user.now) == [None]
    user.shelf.holdings.give_rows(held[1:])
    [again] = leases(user, user.shelf.find(HASHES[:1]))
    assert again == first.lease
    user.shelf.drop([again.record], "evicted")
    user.shelf.holdings.end_leases([again])
    assert user.shelf.used_count == 1, "a lease keeps even a row that was dropped"
    user.shelf.holdings.end_leases([first.lease])
    assert user.shelf.used_count == 0


def test_a_write_that_fails_gives_its_row_back_and_leases_nothing(make: Make) -> None:
    calls = FaultyCalls()
    user = make(calls)
    held = rows(user, 2)
    assert held is not None
    calls.inject([Fault(Call.WRITE, calls.count(Call.WRITE) + 1, Effect.ERROR, 5)])
    done = write_into(user, HASHES[:2], held)
    assert sorted(str(end.outcome) for end in done if end) == ["ShelfOutcome.DONE", "ShelfOutcome.IO_ERROR"]
    assert len(taken(done)) == 1 == user.shelf.used_count
    user.shelf.holdings.end_leases(taken(done))


def test_leases_keep_what_is_there_and_none_comes_for_what_is_gone(make: Make) -> None:
    user = make()
    user.write(HASHES[:12])
    records = user.shelf.find(HASHES[:12])
    user.shelf.drop(records[:1], "evicted")
    none, *mine = leases(user, records[:5])
    assert none is None and [lease.record for lease in mine if lease] == records[1:5]
    user.now += 1
    user.write(HASHES[20:32])
    assert user.hits(HASHES[1:5]) == 4 and user.hits(HASHES[5:12]) == 0
    assert rows(user, 9) is None, "leased rows are no room"
    held = rows(user, 8)
    assert held is not None and user.hits(HASHES[1:5]) == 4
    user.shelf.holdings.give_rows(held)
    user.shelf.holdings.end_leases([lease for lease in mine if lease])


def test_asked_rows_count_against_the_quota_and_push_out_the_tenants_own_rows_alone(make: Make) -> None:
    user = make(terms=Terms(tenant_bytes=4 * SLOT_BYTES))
    named = Retention(tenant=tenant_digest("someone"))
    user.write(HASHES[:6])
    user.write(HASHES[10:13], retention=named)
    assert rows(user, 5, named.tenant) is None and user.shelf.stats()["quota_refused"] == 1
    assert rows(user, 5, named.tenant) is None and user.shelf.stats()["quota_refused"] == 1
    held = rows(user, 3, named.tenant)
    assert held is not None and user.hits(HASHES[:6]) == 6 and user.hits(HASHES[10:13]) == 1
    done = write_into(user, HASHES[20:23], held, named)
    assert outcomes(done) == [ShelfOutcome.DONE] * 3
    assert rows(user, 2, named.tenant) is None, "its leased rows cannot pay"
    user.shelf.holdings.end_leases(taken(done))


def test_rows_that_were_not_used_cost_no_write_budget(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "bounded", NVME_BYTES_OF_12, terms=Terms(write_bytes_day=5 * SLOT_BYTES))
    held = rows(user, 5)
    assert held is not None and rows(user, 1) is None
    user.shelf.holdings.give_rows(held[:4])
    assert rows(user, 5) is None
    more = rows(user, 4)
    assert more is not None and len(user.shelf.holdings) == 5
    user.shelf.holdings.give_rows([held[4], *more])
    user.shelf.check()
    user.shelf.close(60.0)


def test_leased_dram_rows_are_judged_where_they_lie_and_used_by_address() -> None:
    user = dram_user(6)
    user.write(HASHES[:4])
    mine = [lease for lease in leases(user, user.shelf.find(HASHES[:4])) if lease is not None]
    assert len(mine) == 4
    spoil(user, mine[1].record.slot, 4096 + LAYOUT.slice_bytes + 5)
    spoil(user, mine[2].record.slot, 9)
    done = user.finish(user.shelf.verify(mine))
    good, bad = ShelfOutcome.DONE, ShelfOutcome.BAD_ROW
    assert outcomes(done) == [good, bad, bad, good]
    assert {end.operation for end in done if end} == {ShelfOperation.VERIFY}
    for lease, end in zip(mine, done, strict=True):
        if end is not None and end.outcome is good:
            bytes_there = ctypes.string_at(user.shelf.address(lease), LAYOUT.row_bytes)
            assert bytes_there == payload(lease.record.block_hash)
    stats = user.shelf.stats()
    assert (stats["verifies"], stats["bad_row"], stats["reads"]) == (2, 2, 0) and user.shelf.in_flight == 0
    assert [user.shelf.holds(block_hash) for block_hash in HASHES[:4]] == [True, False, False, True]
    user.shelf.holdings.end_leases(mine)
    assert user.shelf.used_count == 2
    user.shelf.close(60.0)


def spoil(user: ShelfUser, slot: int, place: int) -> None:
    descriptor, offset = user.shelf._slab.descriptor, user.shelf._slab.offset(slot) + place
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, offset)[0] ^ 0xFF]), offset)


def test_of_a_lost_shelf_every_lease_is_lost_once_nothing_is_given_and_all_comes_back(make: Make) -> None:
    user = make()
    user.write(HASHES[:4])
    mine = [lease for lease in leases(user, user.shelf.find(HASHES[:4])) if lease is not None]
    held = rows(user, 2)
    assert held is not None and user.shelf.holdings.lost_leases() == []
    numbers = [user.shelf.holdings.ask_rows(2, NO_TENANT), user.shelf.holdings.ask_leases([mine[0].record])]
    user.shelf._files_lost = lambda: True
    user.shelf.poll(user.now)
    assert user.shelf.is_lost and user.shelf.holdings.lost_leases() == mine and user.shelf.holdings.lost_leases() == []
    assert user.shelf.holdings.replies() == [Reply(numbers[0], None, None), Reply(numbers[1], None, [None])]
    item = WriteItem(HASHES[9], 0, filled(HASHES[9]), grant=held[0])
    assert user.shelf.write([item], user.now) == [None] and len(user.shelf.holdings) == 6
    assert user.shelf.verify(mine) == [None] * 4
    user.shelf.holdings.end_leases(mine)
    user.shelf.holdings.give_rows(held)


def test_giving_back_twice_is_a_bug(make: Make) -> None:
    user = make()
    user.write(HASHES[:1])
    held, mine = rows(user, 1), leases(user, user.shelf.find(HASHES[:1]))
    assert held is not None and mine[0] is not None
    user.shelf.holdings.give_rows(held)
    user.shelf.holdings.end_leases([mine[0]])
    with pytest.raises(AssertionError, match="a row is given back twice"):
        user.shelf.holdings.give_rows(held)
    with pytest.raises(AssertionError, match="a lease is given back twice"):
        user.shelf.holdings.end_leases([mine[0]])
