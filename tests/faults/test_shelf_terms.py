"""What shelves make of priority, expiry, pins, quota and write budget, alone and at a keeper alike."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.block import Tier
from kvtier.eviction import POLICIES
from kvtier.keeper.frames import frame
from kvtier.keeper.opening import SharedShelves
from kvtier.keeper.wire import PROTOCOL_VERSION, Stop
from kvtier.metrics import Metrics
from kvtier.record import tenant_digest
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import Shelf, WriteItem
from kvtier.store import Store
from kvtier.terms import STANDARD, Terms
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.header import is_header_of_plainly, pack_plainly
from tests.own_time import own_time
from tests.rows import (
    IO,
    LAYOUT,
    NAMESPACE,
    NVME_BYTES,
    SLOT_BYTES,
    Bell,
    ShelfUser,
    block_hashes,
    dram_user,
    filled,
    nvme_user,
    payload,
)

HASHES = block_hashes(80)
SLOTS = 16
TENANT = tenant_digest("someone")
PINNED = Retention(pinned=True)


class User:
    """A shelf, alone or shared, that is written to until what is wanted is there or nothing comes of it any more."""

    def __init__(self, user: ShelfUser, others: Sequence[Shelf] = ()) -> None:
        self.user = user
        self.shelf = user.shelf
        self._others = others

    def put(self, hashes: Sequence[bytes], retention: Retention = PLAIN, give_up_s: float = 60.0) -> int:
        """Write a chain in its order, a block at a time, until one is not taken; how many were there at some time."""
        written = 0
        for block_hash in hashes:
            end = time.monotonic() + give_up_s
            while not self.shelf.holds(block_hash) and time.monotonic() < end:
                self.user.now = time.monotonic()
                if not any(self.user.write([block_hash], None, retention)):
                    self.poll()
            written += self.shelf.holds(block_hash)
            if time.monotonic() >= end:
                return written
        return written

    def held(self, hashes: Sequence[bytes]) -> int:
        """How many are there and read right."""
        return self.user.hits(hashes)

    def count(self, name: str) -> int:
        """A number of the shelf's."""
        return self.shelf.stats()[name]

    def until(self, true: Callable[[], bool], wait_s: float = 60.0) -> bool:
        """Poll until something is so."""
        end = time.monotonic() + wait_s
        while not true():
            if time.monotonic() >= end:
                return False
            self.poll()
        return True

    def poll(self) -> None:
        """Let the shelf do what it does by itself."""
        time.sleep(0.005)
        for shelf in (self.shelf, *self._others):
            shelf.poll(time.monotonic())


class Opener:
    """Opens shelves of one form on one cache directory."""

    def __init__(self, shared: bool, path: Path) -> None:
        self.shared = shared
        self.path = path
        self._ends: list[Callable[[], None]] = []
        self._keepers: set[int] = set()

    def open(self, tier: Tier, terms: Terms = STANDARD) -> User:
        """The shelf of a tier; a shared one has the other beside it."""
        if not self.shared:
            user = dram_user(SLOTS, terms=terms) if tier is Tier.DRAM else nvme_user(self.path, terms=terms)
            self._ends.append(lambda: _end(user.shelf))
            return User(user)
        return User(*self.seated(tier, terms)[:2])

    def seated(self, tier: Tier, terms: Terms = STANDARD) -> tuple[ShelfUser, Sequence[Shelf], SharedShelves, Bell]:
        """The same, with the seat at the keeper."""
        bell = Bell()
        budgets = (SLOTS * SLOT_BYTES, NVME_BYTES)
        shared = SharedShelves(LAYOUT, NAMESPACE, self.path, budgets, IO, bell, 0.0, "lru", terms=(terms, terms))
        assert shared.try_open(60), shared.refusal
        shelves = dict(shared.shelves)

        def end() -> None:
            for shelf in shelves.values():
                _end(shelf)
            keeper = shared.seat.keeper_process
            shared.close()
            self._keepers.add(keeper)

        self._ends.append(end)
        others = [shelf for other, shelf in shelves.items() if other is not tier]
        return ShelfUser(shelves[tier], bell), others, shared, bell

    def close(self) -> None:
        """Close all that is open; the keeper has left then, too."""
        while self._ends:
            self._ends.pop()()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.path / "keeper.sock"))
            link.sendall(frame(Stop(PROTOCOL_VERSION)))
        end = time.monotonic() + 60
        while any(map(_runs, self._keepers)):
            assert time.monotonic() < end, "a keeper does not leave"
            time.sleep(0.01)
        self._keepers.clear()


def _runs(process: int) -> bool:
    """Whether a process has not ended, though perhaps nobody has asked for its end yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _end(shelf: Shelf) -> None:
    shelf.check()
    shelf.close(60.0)


@pytest.fixture(params=["alone", "shared"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    made = Opener(request.param == "shared", tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Opener]:
    made = Opener(True, tmp_path / "cache")
    yield made
    made.close()


def test_pins_stay_within_their_budget_and_until_they_are_taken_back(opener: Opener) -> None:
    user = opener.open(Tier.DRAM, Terms(pin_share=0.25))
    assert user.put(HASHES[:6], PINNED) == 6
    assert [record.pinned for record in user.shelf.find(HASHES[:6])] == [True] * 4 + [False] * 2
    assert user.put(HASHES[20:60]) == 40
    assert user.held(HASHES[:4]) == 4 and user.held(HASHES[4:6]) == 0
    assert user.until(lambda: user.count("pinned") == 4) and user.count("pins_refused") == 2
    assert [record.pinned for record in user.shelf.find(HASHES[:4])] == [True] * 4
    user.shelf.unpin(HASHES[:4])
    assert user.until(lambda: user.count("pinned") == 0)
    user.put(HASHES[20:60])
    assert user.held(HASHES[:4]) == 0


def test_a_chain_that_a_later_request_asks_more_for_stays_longer(opener: Opener) -> None:
    user = opener.open(Tier.DRAM)
    assert user.put(HASHES[:4], Retention(priority=-5)) == 4
    user.shelf.retain(HASHES[:4], Retention(priority=7))
    user.shelf.retain(HASHES[:4], Retention(priority=3))
    assert user.until(lambda: [record.priority for record in user.shelf.find(HASHES[:4])] == [7] * 4)
    user.put(HASHES[20:60])
    assert user.held(HASHES[:4]) == 4, "read right though their headers say something else"


def test_what_is_asked_while_a_row_is_written_counts_once_it_is_there(opener: Opener) -> None:
    user = opener.open(Tier.DRAM)
    user.put(HASHES[10:12])
    tickets: list[int | None] = [None]
    while tickets == [None]:
        tickets = user.shelf.write([WriteItem(HASHES[0], 0, filled(HASHES[0]))], time.monotonic())
        user.poll() if tickets == [None] else None
    user.shelf.retain(HASHES[:1], Retention(priority=5))
    user.shelf.retain(HASHES[:1], PINNED)
    user.user.finish(tickets)
    assert user.until(lambda: [record[5:7] for record in user.shelf.find(HASHES[:1])] == [(5, 0)])
    assert user.until(lambda: user.count("pinned") == 1)


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_a_row_past_its_time_is_hidden_and_its_slot_free(opener: Opener, tier: Tier) -> None:
    user = opener.open(tier)
    later = int(time.time()) + 3600
    assert user.put(HASHES[:3], Retention(expiry_s=later)) == 3
    past = Retention(expiry_s=1)
    assert user.until(lambda: bool(user.user.write(HASHES[3:6], None, past)) and user.count("expired") >= 3)
    assert user.until(lambda: not any(map(user.shelf.holds, HASHES[3:6])))
    assert user.held(HASHES[:6]) == 3
    user.shelf.retain(HASHES[:2], Retention(expiry_s=later - 1))
    user.shelf.retain(HASHES[:1], Retention(priority=1))
    assert user.until(lambda: [r.expiry_s for r in user.shelf.find(HASHES[:3])] == [0, later, later])


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_a_tenant_at_its_quota_pays_with_its_own_rows(opener: Opener, tier: Tier) -> None:
    user = opener.open(tier, Terms(tenant_bytes=4 * SLOT_BYTES + 1))
    assert user.put(HASHES[:6]) == 6
    for start in range(20, 40, 2):
        assert user.put(HASHES[start : start + 2], Retention(tenant=TENANT)) == 2
        assert sum(map(user.shelf.holds, HASHES[20:40])) <= 4
    assert user.held(HASHES[:6]) == 6 and user.held(HASHES[36:40]) == 4 and user.held(HASHES[20:36]) == 0
    pinned = Retention(tenant=TENANT, pinned=True)
    user.shelf.retain(HASHES[36:40], pinned)
    assert user.until(lambda: user.count("pinned") == 4)
    assert user.put(HASHES[40:41], Retention(tenant=TENANT), 0.3) == 0, "all it has is pinned"
    assert user.count("quota_refused") > 0 and user.held(HASHES[:6]) == 6


def test_the_write_budget_holds_across_a_restart(opener: Opener) -> None:
    terms = Terms(write_bytes_day=10 * SLOT_BYTES + 1)
    user = opener.open(Tier.NVME, terms)
    assert user.put(HASHES[:10]) == 10 and user.put(HASHES[10:20], give_up_s=1.5) == 0
    assert user.until(lambda: user.count("write_budget_refused") > 0)
    opener.close()
    user = opener.open(Tier.NVME, terms)
    assert user.put(HASHES[10:12], give_up_s=0.5) == 0
    assert user.held(HASHES[:20]) == 10
    opener.close()
    user = opener.open(Tier.NVME, Terms(write_bytes_day=12 * SLOT_BYTES))
    assert user.put(HASHES[10:12]) == 2 and user.put(HASHES[12:20], give_up_s=1.5) == 0


@pytest.mark.parametrize("broken", ["journal", "nvme.slab"])
def test_damage_does_not_give_a_day_s_writes_anew(opener: Opener, broken: str) -> None:
    user = opener.open(Tier.NVME, Terms(write_bytes_day=10 * SLOT_BYTES))
    assert user.put(HASHES[:10]) == 10 and user.put(HASHES[10:20], give_up_s=0.5) == 0
    opener.close()
    [file] = opener.path.glob(f"*/{broken}")
    with file.open("r+b") as data:
        data.write(bytes(64))
    user = opener.open(Tier.NVME, Terms(write_bytes_day=12 * SLOT_BYTES))
    assert user.held(HASHES[:20]) == (10 if broken == "journal" else 0)
    assert user.put(HASHES[20:22]) == 2 and user.put(HASHES[22:30], give_up_s=0.5) == 0


def test_pins_and_priorities_come_back_with_the_journal_and_what_has_expired_does_not(opener: Opener) -> None:
    user = opener.open(Tier.NVME)
    assert user.put(HASHES[:3], PINNED) == 3
    for later_s in (2, 8, 32):  # in time to be there for a moment, on a crowded machine, too
        soon = int(time.time()) + later_s
        if user.put(HASHES[3:5], Retention(expiry_s=soon), later_s) == 2:
            break
    user.shelf.retain(HASHES[:2], Retention(priority=9))
    assert user.until(lambda: [record.priority for record in user.shelf.find(HASHES[:3])] == [9, 9, 0])
    opener.close()
    while time.time() < soon + 0.1:
        time.sleep(0.05)
    user = opener.open(Tier.NVME)
    assert user.until(lambda: user.count("pinned") == 3)
    assert [record.priority for record in user.shelf.find(HASHES[:3])] == [9, 9, 0]
    assert user.held(HASHES[:5]) == 3 and not user.shelf.holds(HASHES[3])


def test_a_keeper_that_takes_over_keeps_pins_priorities_and_the_budget(keeper: Opener) -> None:
    terms = Terms(write_bytes_day=30 * SLOT_BYTES)
    for tier in (Tier.DRAM, Tier.NVME):
        user = User(*(seat := keeper.seated(tier, terms))[:2])
        shared = seat[2]
        assert user.put(HASHES[:2], PINNED) == 2 and user.put(HASHES[2:4]) == 2
        user.shelf.retain(HASHES[2:4], Retention(priority=9, expiry_s=0))
        assert user.until(lambda user=user: user.shelf.find(HASHES[:4])[3:] != [] and _priority(user) == 9)
        before = shared.seat.keeper_process
        os.kill(before, signal.SIGKILL)
        assert user.until(lambda before=before, shared=shared: shared.seat.keeper_process != before)
        assert user.until(lambda user=user: user.count("pinned") == 2)
        assert user.until(lambda shared=shared: all(books.current for books in shared.books.values()))
        assert user.held(HASHES[:4]) == 4 and _priority(user) == 9
        slots = SLOTS if tier is Tier.DRAM else user.shelf.slot_count
        if tier is Tier.DRAM:
            assert user.put(HASHES[20 : 20 + 2 * slots]) == 2 * slots
        else:
            assert user.put(HASHES[20:45]) == 25, "of 30, four were spent before"
            assert user.put(HASHES[45:70], give_up_s=1.5) in (0, 1), "a slot that the dead keeper granted stays charged"
        assert user.held(HASHES[:4]) == 4
        keeper.close()


def _priority(user: User) -> int:
    return user.shelf.find(HASHES[:4])[3].priority


def test_engines_share_a_tenants_quota(keeper: Opener) -> None:
    terms = Terms(tenant_bytes=4 * SLOT_BYTES)
    a, b = (User(*keeper.seated(Tier.DRAM, terms)[:2]) for _ in range(2))
    mine = Retention(tenant=TENANT)
    assert a.put(HASHES[:3], mine) == 3 and b.put(HASHES[10:13], mine) == 3
    assert b.until(lambda: sum(map(b.shelf.holds, HASHES[:13])) <= 4)
    assert b.held(HASHES[10:13]) == 3


def test_the_first_engines_terms_count_and_a_line_says_so(keeper: Opener) -> None:
    a = User(*keeper.seated(Tier.DRAM, Terms(pin_share=0.25))[:2])
    b = User(*keeper.seated(Tier.DRAM, Terms(pin_share=1.0))[:2])
    assert b.put(HASHES[:6], PINNED) == 6 and a.until(lambda: a.count("pinned") == 4)
    log = (keeper.path / "keeper.log").read_text()
    assert log.count("other pins, quotas or write budget") == 1


def test_a_tenants_blocks_go_down_as_soon_as_there_is_room_though_nobody_else_stirs(keeper: Opener) -> None:
    user, _, shared, bell = keeper.seated(Tier.DRAM)
    arena = HbmArena(LAYOUT, 8)
    store = Store(LAYOUT, arena, POLICIES["lru"], Metrics())
    for shelf in shared.shelves.values():
        store.add_shelf(shelf)
    slots = store.allocate(5)
    assert slots is not None
    for slot, block_hash in zip(slots, HASHES, strict=False):
        arena.view(slot)[:] = payload(block_hash)
    for depth, slot in enumerate(slots):
        store.seal(slot, HASHES[depth], depth, time.monotonic(), Retention(tenant=TENANT))
    with own_time() as clock:
        while not all(map(user.shelf.holds, HASHES[:5])):
            store.poll(time.monotonic())
            waited = clock.seconds
            bell.wait(10.0)  # as the loop sleeps, that has nothing else to do
            assert clock.seconds - waited < 4.0, "nothing woke the engine"
        assert clock.seconds < 4.0 and user.hits(HASHES[:5]) == 5
    store.release(slots)


def test_rows_and_a_journal_of_an_older_version_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as older:
        older.setattr("kvtier.tiers.header.HEADER_VERSION", 1)
        older.setattr("kvtier.tiers.header._pack", pack_plainly)  # the one in C++ has the version built in
        older.setattr("kvtier.tiers.header._is_header_of", is_header_of_plainly)
        older.setattr("kvtier.replay.JOURNAL_VERSION", 1)
        user = nvme_user(tmp_path / "cache")
        user.write(HASHES[:4])
        assert user.hits(HASHES[:4]) == 4
        user.shelf.close(60.0)
    with caplog.at_level(logging.WARNING):
        user = nvme_user(tmp_path / "cache")
    assert user.hits(HASHES[:4]) == 0
    said = [entry.message for entry in caplog.records if "journal" in entry.message]
    assert said == ["NVMe journal is foreign: 0 blocks found again from row headers"]
    user.write(HASHES[:4])
    assert user.hits(HASHES[:4]) == 4
    user.shelf.close(60.0)
