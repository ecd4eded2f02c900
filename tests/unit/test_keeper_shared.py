"""Shared shelves in one process: two engines' worth of books over one keeper, and what each may think of the other."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from kvtier.block import KVLayout, Tier
from kvtier.byte_text import needed_text
from kvtier.cache_directory import layout_name
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.keeper.client import QUEUE_MAX
from kvtier.keeper.desk import Desk
from kvtier.keeper.frames import frame
from kvtier.keeper.opening import SharedShelves
from kvtier.keeper.uses import CHAINS_MAX
from kvtier.keeper.wire import NVME, Held, Join
from kvtier.record import NO_TENANT, tenant_digest
from kvtier.replay import JournalShape
from kvtier.retention import Retention
from kvtier.shelf import ShelfOutcome, WriteItem
from kvtier.terms import STANDARD, Terms
from kvtier.tiers.header import HEADER_BYTES
from kvtier.tiers.slab import SLAB_NAME
from kvtier.tiers.superblock import SUPERBLOCK_BYTES
from tests.rows import (
    IO,
    LAYOUT,
    NAMESPACE,
    NVME_BYTES,
    SLOT_BYTES,
    Bell,
    ShelfUser,
    block_hashes,
    filled,
    nvme_user,
    payload,
)

OTHER_LAYOUT = KVLayout(layers=5, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32")
HASHES = block_hashes(120)


class Engine:
    """The shelves of one engine, and a user for each."""

    def __init__(
        self,
        path: Path,
        dram_bytes: int,
        nvme_bytes: int,
        calls: FaultyCalls | None,
        layout: KVLayout,
        nvme_terms: Terms,
    ) -> None:
        self.bell = Bell()
        budgets, terms = (dram_bytes, nvme_bytes), (STANDARD, nvme_terms)
        self.shared = SharedShelves(
            layout, NAMESPACE, path, budgets, IO, self.bell, 0.3, "lru", terms=terms, calls=calls
        )
        self.users: dict[Tier, ShelfUser] = {}

    def open(self, wait_s: float = 60.0) -> bool:
        """Whether the shelves are there."""
        if self.shared.try_open(wait_s):
            self.users = {tier: ShelfUser(shelf, self.bell) for tier, shelf in self.shared.shelves.items()}
        return bool(self.users)

    def write(self, tier: Tier, hashes: list[bytes]) -> None:
        """Write until all are there."""
        user, end = self.users[tier], time.monotonic() + 60
        while left := [h for h in hashes if not user.shelf.holds(h)]:
            assert time.monotonic() < end
            user.now = time.monotonic()
            if not any(user.write(left[:8])):
                self.poll(0.02)

    def knows(self, tier: Tier, hashes: list[bytes]) -> bool:
        """Wait until all are known here."""
        return self.until(lambda: all(map(self.users[tier].shelf.holds, hashes)))

    def until(self, true: Callable[[], bool], wait_s: float = 60.0) -> bool:
        """Poll until something is so."""
        end = time.monotonic() + wait_s
        while not true():
            if time.monotonic() >= end:
                return False
            self.poll(0.01)
        return True

    def poll(self, wait_s: float = 0.0) -> None:
        """Let the shelves do what they do by themselves."""
        self.bell.wait(wait_s)
        for user in self.users.values():
            user.shelf.poll(time.monotonic())

    def close(self) -> None:
        """Close all."""
        for user in self.users.values():
            user.shelf.check()
            user.shelf.close(60.0)
        self.shared.close()


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start_one(
        dram_bytes: int = 64 * SLOT_BYTES,
        nvme_bytes: int = NVME_BYTES,
        calls: FaultyCalls | None = None,
        layout: KVLayout = LAYOUT,
        opened: bool = True,
        nvme_terms: Terms = STANDARD,
    ) -> Engine:
        engines.append(Engine(tmp_path / "cache", dram_bytes, nvme_bytes, calls, layout, nvme_terms))
        assert not opened or engines[-1].open(), engines[-1].shared.refusal
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.close()


def test_a_row_that_is_written_twice_at_once_is_there_once(start: Start) -> None:
    a, b = start(), start()
    for engine in (a, b):
        assert engine.until(lambda engine=engine: len(engine.shared.books[Tier.DRAM].held()) > 0)
    tickets = [
        engine.users[Tier.DRAM].shelf.write([WriteItem(HASHES[0], 0, filled(HASHES[0]))], time.monotonic())
        for engine in (a, b)
    ]
    ends = [engine.users[Tier.DRAM].finish(ticket)[0] for engine, ticket in zip((a, b), tickets, strict=True)]
    assert {end.outcome for end in ends if end is not None} == {ShelfOutcome.DONE, ShelfOutcome.DUPLICATE}
    assert a.users[Tier.DRAM].hits(HASHES[:1]) == b.users[Tier.DRAM].hits(HASHES[:1]) == 1


def test_a_copy_from_a_row_that_was_replaced_meanwhile_does_not_count(start: Start) -> None:
    calls = FaultyCalls()
    a, b = start(16 * SLOT_BYTES, calls=calls), start(16 * SLOT_BYTES)
    a.write(Tier.DRAM, HASHES[:4])
    dram, nvme = a.users[Tier.DRAM].shelf, a.users[Tier.NVME].shelf
    items, leases = [], dram.acquire(dram.find(HASHES[:2]))
    for lease in leases:
        assert lease is not None
        intact = functools.partial(dram.intact, lease)
        items.append(WriteItem(lease.record.block_hash, 0, dram.view(lease), lease.record.sums, intact=intact))
    (good,) = a.users[Tier.NVME].finish(nvme.write(items[:1], time.monotonic()))
    assert good is not None and good.outcome is ShelfOutcome.DONE
    calls.inject([Fault(Call.WRITE, calls.count(Call.WRITE) + 1, Effect.HANG, sticky=True)])
    assert a.until(lambda: len(a.shared.books[Tier.NVME].held()) > 0)
    tickets = nvme.write(items[1:], time.monotonic())
    assert tickets[0] is not None
    b.write(Tier.DRAM, HASHES[20:28])
    assert not dram.intact(leases[1]) if leases[1] is not None else False
    calls.release()
    (stale,) = a.users[Tier.NVME].finish(tickets)
    assert stale is not None and stale.outcome is ShelfOutcome.STALE
    assert not nvme.holds(HASHES[1]) and a.users[Tier.NVME].hits(HASHES[:1]) == 1


def test_a_slot_whose_write_hangs_is_nobody_elses_though_its_engine_closes(start: Start) -> None:
    calls = FaultyCalls()
    a, b = start(calls=calls), start()
    nvme = a.users[Tier.NVME].shelf
    assert a.until(lambda: len(a.shared.books[Tier.NVME].held()) > 0)
    before = calls.count(Call.WRITE)
    calls.inject([Fault(Call.WRITE, before + 1, Effect.HANG, sticky=True)])
    assert nvme.write([WriteItem(HASHES[0], 0, filled(HASHES[0]))], time.monotonic())[0] is not None
    assert a.until(lambda: calls.count(Call.WRITE) > before)
    for user in a.users.values():
        user.shelf.close(0.05)
    a.close()
    left, mine = b.users[Tier.NVME].shelf, b.shared.books[Tier.NVME]
    assert b.until(lambda: left.used_count == len(mine.held()) + 1), "all else is given back"
    assert not b.until(lambda: left.used_count <= len(mine.held()), 0.6)
    calls.release()


def test_so_many_uses_at_once_do_not_overrun_the_line(start: Start) -> None:
    engine = start()
    books, line = engine.shared.books[Tier.DRAM], engine.shared.link.line
    for _ in range(5 * CHAINS_MAX):
        engine.users[Tier.DRAM].shelf.touch(HASHES[:1], time.monotonic())
        engine.users[Tier.DRAM].shelf.touch([], time.monotonic())
    assert 0 < len(books._uses) <= CHAINS_MAX < QUEUE_MAX // 2
    assert engine.until(lambda: not books._uses) and engine.shared.link.line == line


def test_a_mirror_that_lags_costs_a_miss_and_no_wrong_row(start: Start) -> None:
    a, b = start(16 * SLOT_BYTES), start(16 * SLOT_BYTES)
    a.write(Tier.DRAM, HASHES[:10])
    assert b.knows(Tier.DRAM, HASHES[:10])
    old = b.users[Tier.DRAM].shelf.find(HASHES[:10])
    a.write(Tier.DRAM, HASHES[20:30])
    done = b.users[Tier.DRAM].read(old)
    outcomes = [end.outcome for end in done if end is not None]
    assert ShelfOutcome.STALE in outcomes and set(outcomes) <= {ShelfOutcome.STALE, ShelfOutcome.DONE}
    assert b.users[Tier.DRAM].shelf.stats()["bad_row"] == 0


def test_a_damaged_row_is_dropped_for_everybody(start: Start, tmp_path: Path) -> None:
    a, b = start(), start()
    a.write(Tier.NVME, HASHES[:3])
    assert b.knows(Tier.NVME, HASHES[:3])
    (record,) = a.users[Tier.NVME].shelf.find(HASHES[1:2])
    with open(tmp_path / "cache" / layout_name(LAYOUT) / SLAB_NAME, "r+b") as file:
        file.seek(SUPERBLOCK_BYTES + record.slot * SLOT_BYTES + 5000)
        file.write(b"damage")
    assert a.users[Tier.NVME].hits(HASHES[:3]) == 2
    assert b.until(lambda: not b.users[Tier.NVME].shelf.holds(HASHES[1]))
    assert a.users[Tier.NVME].shelf.stats()["bad_row"] == 1 and b.users[Tier.NVME].hits(HASHES[:3]) == 2


def test_uses_by_one_engine_keep_rows_from_anothers_eviction(start: Start) -> None:
    a, b = start(24 * SLOT_BYTES), start(24 * SLOT_BYTES)
    a.write(Tier.DRAM, HASHES[:12])
    assert b.knows(Tier.DRAM, HASHES[:12])
    user = b.users[Tier.DRAM]
    user.shelf.touch(HASHES[:4], time.monotonic() + 1)
    assert b.until(lambda: not b.shared.books[Tier.DRAM]._uses)
    row = user.reply(user.shelf.holdings.ask_rows(1, NO_TENANT)).grants  # the keeper hears one thing after the other
    user.shelf.holdings.give_rows(row or ())
    a.write(Tier.DRAM, HASHES[20:32])
    assert b.users[Tier.DRAM].hits(HASHES[:4]) == 4 and b.users[Tier.DRAM].hits(HASHES[4:12]) < 8
    evictions = [engine.users[Tier.DRAM].shelf.stats()["evictions"] for engine in (a, b)]
    assert sum(evictions) >= 4, "each eviction is told by the engine that it was for"


def test_tenants_are_told_apart(start: Start) -> None:
    a = start()
    shelf = a.users[Tier.DRAM].shelf
    item = WriteItem(HASHES[0], 0, filled(HASHES[0]), retention=Retention(tenant=tenant_digest("someone")))
    tickets: list[int | None] = [None]
    assert a.until(lambda: (tickets.__setitem__(0, shelf.write([item], 0.0)[0]) or tickets[0]) is not None)
    a.users[Tier.DRAM].finish(tickets)
    (record,) = shelf.find(HASHES[:1])
    assert any(record.tenant) and a.users[Tier.DRAM].hits(HASHES[:1]) == 1


def test_two_layouts_share_one_budget(start: Start) -> None:
    a = start(40 * SLOT_BYTES)
    b = start(40 * SLOT_BYTES, layout=OTHER_LAYOUT, opened=False)
    assert not b.open(60.0) or Tier.DRAM not in b.users
    assert any("tiers.dram.bytes" in note for note in b.shared.seat.notes), b.shared.refusal
    a.write(Tier.DRAM, HASHES[:5])
    assert a.users[Tier.DRAM].hits(HASHES[:5]) == 5


def test_another_layout_is_not_given_what_the_first_ones_journal_will_grow_into(start: Start) -> None:
    a = start(nvme_bytes=4 * NVME_BYTES)
    b = start(nvme_bytes=4 * NVME_BYTES, layout=OTHER_LAYOUT, opened=False)
    assert not b.open(60.0)
    [note] = [note for note in b.shared.seat.notes if note.startswith("NVMe")]
    sums = (
        rf"tiers\.nvme\.bytes: 4\.0 MiB, one block needs a budget of [\d.]+ MiB, .* hold {needed_text(most_bytes(a))}, "
    )
    assert re.search(sums, note), note
    assert "raise it" in note and "another tiers.nvme.path" in note
    a.write(Tier.NVME, HASHES[:5])
    assert a.users[Tier.NVME].hits(HASHES[:5]) == 5


def test_two_layouts_at_their_longest_fit_the_total_of_the_first_engine(start: Start) -> None:
    first = start(nvme_bytes=NVME_BYTES, layout=OTHER_LAYOUT)
    slot_count = first.users[Tier.NVME].shelf.slot_count
    keeper = first.shared.seat.keeper_process
    first.close()
    first.users.clear()
    end = time.monotonic() + 60
    while Path(f"/proc/{keeper}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    a = start(nvme_bytes=4 * NVME_BYTES)
    b = start(nvme_bytes=4 * NVME_BYTES, layout=OTHER_LAYOUT)
    assert b.users[Tier.NVME].shelf.slot_count >= slot_count, "the first engine has left it what it had"
    assert 3 * NVME_BYTES < most_bytes(a) + most_bytes(b) <= 4 * NVME_BYTES


def most_bytes(engine: Engine) -> int:
    """What an engine's NVMe layout may come to take of the disk."""
    slab = engine.shared.seat.slabs[NVME].slab
    slice_count = (slab.slot_bytes - HEADER_BYTES) // LAYOUT.slice_bytes
    return slab.total_bytes + JournalShape(slab.epoch, slab.slot_count, slice_count).total_bytes_max


def test_an_engine_that_shares_with_nobody_is_waited_for_and_its_rows_are_warm(start: Start, tmp_path: Path) -> None:
    alone = nvme_user(tmp_path / "cache")
    alone.write(HASHES[:10])
    shared = start(opened=False)
    assert not shared.open(0.5) and "another" not in shared.shared.seat.notes
    alone.shelf.close(60.0)
    assert shared.open(60.0) and shared.users[Tier.NVME].hits(HASHES[:10]) == 10


def test_opening_and_closing_leaks_nothing(start: Start) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    keep = start()
    before = (0, 0)
    for turn in range(5):
        engine = start()
        engine.write(Tier.NVME, HASHES[:3])
        engine.close()
        engine.users.clear()
        if turn == 1:
            before = held()
    assert keep.until(lambda: all(now <= then for now, then in zip(held(), before, strict=True))), (held(), before)


def test_the_keeper_has_no_torch_and_lets_go_of_foreign_descriptors(start: Start) -> None:
    foreign = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(foreign, True)
    try:
        keeper = start().shared.seat.keeper_process
    finally:
        os.close(foreign)
    assert "torch" not in Path(f"/proc/{keeper}/maps").read_text()
    links = [os.readlink(f"/proc/{keeper}/fd/{number}") for number in os.listdir(f"/proc/{keeper}/fd")]
    assert links.count("/dev/null") == 1, links
    assert os.getsid(keeper) != os.getsid(0)


def test_bytes_are_read_in_place_and_by_copy_alike(start: Start) -> None:
    a = start()
    a.write(Tier.DRAM, HASHES[:2])
    shelf = a.users[Tier.DRAM].shelf
    (lease, _) = shelf.acquire(shelf.find(HASHES[:2]))
    assert lease is not None and bytes(shelf.view(lease)) == payload(HASHES[0])


def test_an_engine_that_holds_more_than_fits_a_message_keeps_all_of_it_under_the_next_keeper(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []

    def short_frame(message: Struct) -> bytes:
        if isinstance(message, (Held, Join)):
            parts.append(len(message.grants) + len(message.leases))
            assert parts[-1] <= 2 * 7, "this is too long"
        return frame(message)

    monkeypatch.setattr("kvtier.keeper.client.frame", short_frame)
    monkeypatch.setattr("kvtier.keeper.link.HELD_MAX", 7)
    a, b = start(), start()
    for tier in (Tier.DRAM, Tier.NVME):
        a.write(tier, HASHES[:20])
        holdings = a.users[tier].shelf.holdings
        reply = a.users[tier].reply(holdings.ask_leases(a.users[tier].shelf.find(HASHES[:20])))
        assert reply.leases is not None and None not in reply.leases and len(reply.leases) == 20
        grants = a.users[tier].reply(holdings.ask_rows(12, NO_TENANT, 12)).grants
        assert grants is not None and len(grants) == 12
    parts.clear()
    before = a.shared.seat.keeper_process
    os.kill(before, signal.SIGKILL)
    for engine in (a, b):
        assert engine.until(lambda engine=engine: seated(engine, before), 60.0)
    assert sum(parts) >= 2 * (20 + 12) and len(parts) >= 64 // 14
    for tier in (Tier.DRAM, Tier.NVME):
        for first in range(20, 60, 4):
            b.write(tier, HASHES[first : first + 4])
        assert a.users[tier].hits(HASHES[:20]) == 20 == b.users[tier].hits(HASHES[:20]), "leased rows stay"


def seated(engine: Engine, but_keeper: int) -> bool:
    """Whether an engine has joined another keeper, and knows all that is there."""
    joined = engine.shared.link.line is not None and engine.shared.seat.keeper_process != but_keeper
    return joined and all(books.current for books in engine.shared.books.values())


def test_engines_that_write_nothing_leave_a_small_write_budget_alone(start: Start, tmp_path: Path) -> None:
    terms = Terms(write_bytes_day=100 * SLOT_BYTES)
    for _ in range(2):
        books = (engine := start(nvme_bytes=8 * NVME_BYTES, nvme_terms=terms)).shared.books[Tier.NVME]
        assert engine.until(lambda books=books: len(books._stock) > 0)
    with Desk(tmp_path / "cache") as desk:
        nvme = desk.overview().layouts[0].tiers[1]
    assert nvme.slots > 4 * 32 and nvme.written_bytes_max == 100 * SLOT_BYTES
    assert nvme.written_bytes == 2 * SLOT_BYTES, "one slot in stock each"
