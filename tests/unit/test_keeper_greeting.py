"""A keeper whose loop runs in this process: slow and failing openings, liars, dawdlers, who reports, what is let go."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_keeper_server import HELLO, Caller, later

from kvtier.block import Tier
from kvtier.cache_directory import CacheDirectory
from kvtier.errors import ConfigError, ShelfError
from kvtier.eviction import POLICIES
from kvtier.io.base import KernelCalls
from kvtier.keeper import openings
from kvtier.keeper.fields import TermsSent
from kvtier.keeper.frames import frame
from kvtier.keeper.kept import KeptLayout
from kvtier.keeper.opening import SharedShelves
from kvtier.keeper.owners import lock_byte, open_owners
from kvtier.keeper.server import Server
from kvtier.keeper.slot_table import ENTRY_BYTES, make_sealed
from kvtier.keeper.takeover import Opened, open_nvme
from kvtier.keeper.tending import Tender
from kvtier.keeper.wire import (
    OTHERS,
    PROTOCOL_VERSION,
    Granted,
    Join,
    Publish,
    Published,
    Refused,
    Reporter,
    Reserve,
    Stop,
    Touch,
    Welcome,
)
from kvtier.metrics import Metrics
from kvtier.record import NO_TENANT, Grant, tenant_digest
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import ShelfOutcome, WriteItem
from kvtier.shelves import row_format
from kvtier.store import Store
from kvtier.terms import STANDARD
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.slab import SLAB_NAME, open_nvme_slab
from tests.rows import IO, LAYOUT, NAMESPACE, NVME_BYTES, SLOT_BYTES, Bell, ShelfUser, block_hashes, filled

OTHER = msgspec.structs.replace(HELLO, layout="0" * 32)
BOTH = msgspec.structs.replace(HELLO, budgets=[64 * SLOT_BYTES, NVME_BYTES])
HASHES = block_hashes(20)
LINGER_S = 600.0


@pytest.fixture(autouse=True)
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tender]:
    """A keeper that looks after things quickly, in a thread, and leaves when it is told; what lingers in it."""
    monkeypatch.setattr("kvtier.keeper.server.TICK_S", 0.02)
    monkeypatch.setattr("kvtier.keeper.openings.RETRY_S", 0.05)
    cache = CacheDirectory(tmp_path / "cache", 0.0)
    server = Server(cache, LINGER_S)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server._tender
    stopper = CacheDirectory(tmp_path / "cache", None)
    caller = Caller(stopper)
    caller.say(Stop(PROTOCOL_VERSION))
    caller.hang_up()
    thread.join(60)
    assert not thread.is_alive(), "the keeper does not leave"
    until(lambda: not any(one.name in ("kvtier-opening", "kvtier-closing") for one in threading.enumerate()))
    stopper.close()
    cache.close()


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Callable[[], Caller]]:
    """Opens connections from a cache directory of their own; all are closed in the end."""
    opened: list[tuple[CacheDirectory, Caller]] = []

    def call_once() -> Caller:
        cache = CacheDirectory(tmp_path / "cache", None)
        opened.append((cache, Caller(cache)))
        return opened[-1][1]

    yield call_once
    for cache, caller in opened:
        caller.hang_up()
        cache.close()


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Callable[..., SharedShelves]]:
    """Engines' shelves; all are closed in the end."""
    made: list[SharedShelves] = []

    def make(dram_bytes: int = 64 * SLOT_BYTES, nvme_bytes: int = NVME_BYTES) -> SharedShelves:
        budgets = (dram_bytes, nvme_bytes)
        made.append(SharedShelves(LAYOUT, NAMESPACE, tmp_path / "cache", budgets, IO, lambda: None, 0.3, "lru"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(true: Callable[[], object], wait_s: float = 60.0) -> None:
    end = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


def test_the_linger_begins_when_an_engine_has_gone_however_short_its_visit(
    keeper: Tender, call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as between_two_looks:
        between_two_looks.setattr(keeper, "lonely", lambda *_: False)
        keeper._lonely_since = math.inf
        visitor = call()
        visitor.join()
        visitor.hang_up()
        until(lambda: keeper._lonely_since <= time.monotonic())


def test_nobody_waits_for_the_shelves_of_another_layout(
    call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = call()
    served.join()
    slow, begun, make = threading.Event(), threading.Event(), openings.open_nvme

    def slowly(*arguments: object) -> object:
        begun.set()
        assert slow.wait(60)
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(openings, "open_nvme", slowly)
    waiting, late = call(), call()
    waiting.say(msgspec.structs.replace(OTHER, budgets=[0, NVME_BYTES]))
    assert begun.wait(60)
    assert served.reserve(5, later()) == 5, "who is there is served"
    late.join()
    assert late.reserve(5, later()) == 5, "and whose shelves are open comes in"
    waiting.link.setblocking(False)
    with pytest.raises(BlockingIOError):
        waiting.link.recv(1)
    waiting.link.setblocking(True)
    slow.set()
    answer = waiting.hear()
    assert isinstance(answer, Welcome) and [tier for tier, *_ in answer.slabs] == [1]


def test_a_look_at_files_that_hangs_with_their_disk_keeps_nobody_waiting(
    call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, begun = threading.Event(), threading.Event()

    def look(_: Tender) -> bool:
        begun.set()
        return hung.wait(60)

    monkeypatch.setattr(Tender, "files_are_there", look)
    assert begun.wait(60)
    try:
        caller = call()
        caller.join()
        assert caller.reserve(5, later()) == 5
    finally:
        hung.set()


def test_a_greeting_is_answered_in_time_with_what_is_there_and_the_rest_comes_later(
    share: Callable[..., SharedShelves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.keeper.greeting.ANSWER_S", 0.1)
    slow, make = threading.Event(), openings.make_dram

    def slowly(*arguments: object) -> object:
        assert slow.wait(60)
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(openings, "make_dram", slowly)
    shared = share()
    assert shared.try_open(60)
    until(lambda: shared.poll(time.monotonic()) is not None and Tier.NVME in shared.shelves)
    assert list(shared.shelves) == [Tier.NVME] and "still being opened" in shared.refusal
    nvme = ShelfUser(shared.shelves[Tier.NVME], Bell())
    write(nvme)
    slow.set()
    until(lambda: nvme.shelf.poll(time.monotonic()) or Tier.DRAM in shared.shelves)
    dram = ShelfUser(shared.shelves[Tier.DRAM], Bell())
    write(dram)
    assert dram.hits(HASHES[:1]) == nvme.hits(HASHES[:1]) == 1


def write(user: ShelfUser) -> None:
    """Write a block as soon as there is a reservation."""
    until(lambda: user.shelf.poll(time.monotonic()) or any(user.write(HASHES[:1])) or user.shelf.holds(HASHES[0]))


def test_a_tier_that_could_not_be_had_reaches_a_running_store(
    share: Callable[..., SharedShelves], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, refused = openings.make_dram, [True]

    def fail_first(*arguments: object) -> object:
        if refused[0]:
            raise ShelfError("no memory")
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(openings, "make_dram", fail_first)
    shared = share()
    assert shared.try_open(60) and shared.seat.notes == ["DRAM: no memory"]
    store = small_store(shared)
    store.poll(time.monotonic())
    assert list(store.capacities()) == ["hbm", "nvme"]
    owner, refused[0] = shared.seat.owner, False
    until(lambda: store.poll(time.monotonic()) or "dram" in store.capacities())
    assert list(store.capacities()) == ["hbm", "dram", "nvme"], "nearer tiers are asked first"
    assert shared.seat.owner == owner and shared.seat.notes == []
    store.close(5.0)


def small_store(shared: SharedShelves) -> Store:
    store = Store(LAYOUT, HbmArena(LAYOUT, 4), POLICIES["lru"], Metrics())
    store.watch(shared)
    store.on_close(shared.close)
    return store


def test_gauges_of_a_shared_shelf_sum_up_to_what_the_host_has(share: Callable[..., SharedShelves]) -> None:
    shares = [share(), share()]
    assert all(shared.try_open(60) for shared in shares)
    stores = [small_store(shared) for shared in shares]

    def sums() -> list[float]:
        for store in stores:
            store.poll(time.monotonic())
            store.publish_metrics()
        families = [(store.metrics.tier_capacity_blocks, store.metrics.tier_used_blocks) for store in stores]
        return [sum(pair[which].value("dram") for pair in families) for which in (0, 1)]

    slots = 64
    until(lambda: sums() == [slots, shares[0].shelves[Tier.DRAM].used_count])
    assert sums()[1] > 0, "both have reservations"
    counts = {store.metrics.tier_capacity_blocks.value("nvme") for store in stores}
    assert len(counts) == 2 and 0 in counts, "NVMe, too, is reported by one"
    stores.pop(0).close(5.0)
    until(lambda: sums()[0] == slots)
    stores.pop().close(5.0)


def test_the_engine_with_the_lowest_number_reports(call: Callable[[], Caller]) -> None:
    first, second = call(), call()
    first.join()
    second.join()

    def told(caller: Caller) -> bool:
        while not isinstance(message := caller.hear(), Reporter):
            assert message is not None
        return message.reports

    assert told(first)
    first.hang_up()
    assert told(second)


def test_a_guest_that_comes_before_any_engine_does_not_set_the_terms(call: Callable[[], Caller]) -> None:
    guest, owner = call(), call()
    guest.say(msgspec.structs.replace(HELLO, budgets=[0, 0]))
    answer = guest.hear()
    assert isinstance(answer, Refused) and "no engine" in answer.reason
    tenant_bytes = 2 * SLOT_BYTES
    owner.say(msgspec.structs.replace(HELLO, terms=[TermsSent(tenant_bytes=tenant_bytes), TermsSent()]))
    welcome = owner.hear()
    assert isinstance(welcome, Welcome)
    assert lock_byte(owner.cache.hold(open_owners(owner.cache.top)), welcome.owner)
    owner.say(Join([], []))
    owner.say(Reserve(1, 0, 5, tenant_digest("acme"), later()))
    while not isinstance(granted := owner.hear(), Granted):
        assert granted is not None
    assert len(granted.grants) == 2, "the quota of the first engine holds"


def test_shelves_that_are_not_the_keepers_are_refused(call: Callable[[], Caller], tmp_path: Path) -> None:
    first = call()
    first.say(BOTH)
    welcome = first.hear()
    assert isinstance(welcome, Welcome) and len(welcome.slabs) == 2
    (slab,) = tmp_path.glob("cache/*/nvme.slab")
    length = slab.stat().st_size
    (_, dram, slots), (_, nvme, nvme_slots) = welcome.slabs
    forged = [
        ([(0, dram, slots)], [slots * SLOT_BYTES, slots * ENTRY_BYTES]),  # memory and table of its own
        ([(1, nvme, nvme_slots)], [nvme_slots * ENTRY_BYTES]),
        ([(1, nvme, 1)], [ENTRY_BYTES]),  # a slab cut to one slot
        ([(1, bytes(16), 1 << 31)], [8]),
    ]
    for epochs, sizes in forged:
        memory = [make_sealed("forged", size) for size in sizes]
        liar = call()
        liar.say_with(msgspec.structs.replace(BOTH, epochs=epochs), memory)
        answer = liar.hear()
        assert isinstance(answer, Refused) and answer.reason == OTHERS, answer
        liar.hang_up()
        for one in memory:
            os.close(one)
    for epochs in ([(0, dram, slots)], [(1, nvme, nvme_slots)] * 2, [(1, nvme, 0)]):
        with open(os.devnull) as other:
            liar = call()
            liar.say_with(msgspec.structs.replace(BOTH, epochs=epochs), [other.fileno()])
            assert liar.hear() is None, "too few descriptors, or twice the same tier, or nothing"
            liar.hang_up()
    assert slab.stat().st_size == length


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_handover_that_is_none_leaves_no_descriptor(tmp_path: Path) -> None:
    """Greeted by a liar first of all: there is nothing yet that its shelves could be compared with."""
    cache = CacheDirectory(tmp_path / "cache", None)
    assert lock_byte(cache.hold(open_owners(cache.top)), 5)
    before = 0
    for turn, sizes in enumerate([[3 * SLOT_BYTES, 40], [3 * SLOT_BYTES, 3 * ENTRY_BYTES], [7, 7]] * 4):
        memory = [make_sealed("forged", size) for size in sizes]
        if sizes[1] == 3 * ENTRY_BYTES:
            os.pwrite(memory[1], b"\xff" * ENTRY_BYTES, 0)  # right in length and no entry
        liar = Caller(cache)
        liar.say_with(msgspec.structs.replace(HELLO, owner=5, epochs=[(0, bytes(16), 3)]), memory)
        answer = liar.hear()
        assert isinstance(answer, Refused) and answer.reason == OTHERS, answer
        liar.hang_up()
        for one in memory:
            os.close(one)
        if turn == 2:
            before = descriptors()
    until(lambda: descriptors() <= before)
    cache.close()


def test_a_handover_of_fewer_slots_does_not_cut_the_slab(tmp_path: Path) -> None:
    cache = CacheDirectory(tmp_path / "cache", None)
    assert lock_byte(cache.hold(open_owners(cache.top)), 5)
    slab, _ = open_nvme_slab(cache.folder(HELLO.layout), SLOT_BYTES, 10, KernelCalls())
    os.close(slab.descriptor)
    table = make_sealed("forged", ENTRY_BYTES)
    liar = Caller(cache)
    liar.say_with(msgspec.structs.replace(HELLO, owner=5, epochs=[(1, slab.epoch, 1)]), [table])
    answer = liar.hear()
    assert isinstance(answer, Refused) and answer.reason == OTHERS, answer
    assert (tmp_path / "cache" / HELLO.layout / SLAB_NAME).stat().st_size == slab.total_bytes
    liar.hang_up()
    os.close(table)
    cache.close()


def test_who_does_not_join_is_hung_up_on_and_its_number_is_free(
    call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, dawdler = call(), call()
    dawdler.say(HELLO)
    assert isinstance(dawdler.hear(), Welcome)
    with monkeypatch.context() as hasty:
        hasty.setattr("kvtier.keeper.greeting.JOIN_S", 0.2)
        assert silent.hear_the_end() and dawdler.hear_the_end()
    assert call().join() == 0


def test_an_engine_that_has_lost_its_lock_is_dead_though_its_line_is_open(call: Callable[[], Caller]) -> None:
    """A forked child may hold the connection of a parent that is gone."""
    orphan, other = call(), call()
    orphan.join()
    assert orphan.reserve(60, later()) == 60
    other.join()
    orphan.cache.drop(orphan.lock)
    assert orphan.hear_the_end()
    until(lambda: other.reserve(60, later()) >= 60)


def test_a_use_at_an_impossible_time_is_a_use_now(call: Callable[[], Caller]) -> None:
    caller = call()
    caller.join()
    for at in (float("nan"), float("inf"), -1e300):
        caller.say(Touch(0, at, True, HASHES))
    assert caller.reserve(64, later()) == 64


def test_the_memory_of_a_layout_that_nobody_uses_goes_to_another(keeper: Tender, call: Callable[[], Caller]) -> None:
    keeper.linger_s = 0.3
    first, second = call(), call()
    first.join()
    second.say(OTHER)
    answer = second.hear()
    assert isinstance(answer, Welcome) and answer.slabs == [] and "DRAM" in answer.notes[0]
    assert lock_byte(second.cache.hold(open_owners(second.cache.top)), answer.owner)
    second.say(Join([], []))
    first.cache.drop(first.lock)
    first.hang_up()
    assert second.hear_the_end(), "hung up on, to come again"
    again = call()
    again.say(msgspec.structs.replace(OTHER, owner=answer.owner))
    answer = again.hear()
    assert isinstance(answer, Welcome) and [tier for tier, *_ in answer.slabs] == [0]


def nothing(number: int, _: list[int]) -> Published:
    return Published(number, [])


def no_answer(_: int, __: list[int]) -> Refused:
    return Refused("not now")


@pytest.mark.parametrize("lie", [nothing, no_answer])
def test_an_answer_that_is_none_is_no_answer(
    lie: Callable[..., object], share: Callable[..., SharedShelves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.keeper.published.ANSWER_S", 0.3)
    monkeypatch.setattr("kvtier.keeper.client.RETRY_S", 0.05)
    user = dram_of(share)
    with monkeypatch.context() as lying:
        lying.setattr("kvtier.keeper.answers.Published", lie)
        until(lambda: write_one(user, HASHES[0]) is ShelfOutcome.UNANSWERED)
    until(lambda: write_one(user, HASHES[1]) is ShelfOutcome.DONE)
    assert user.hits(HASHES[1:2]) == 1


def test_slots_that_there_are_not_are_never_written_to(
    share: Callable[..., SharedShelves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.keeper.client.RETRY_S", 0.05)
    user, asked = dram_of(share), Retention(tenant=tenant_digest("acme"))
    given: list[Grant] = []

    def reserve(*_: object) -> list[Grant]:
        given.append(Grant(10**6, 7))
        return given[-1:]

    with monkeypatch.context() as lying:
        lying.setattr("kvtier.keeper.ledger.Ledger.reserve", reserve)
        until(lambda: write_one(user, HASHES[0], asked) is not None or len(given) > 2)
    until(lambda: write_one(user, HASHES[0], asked) is ShelfOutcome.DONE)
    assert user.hits(HASHES[:1]) == 1


def dram_of(share: Callable[..., SharedShelves]) -> ShelfUser:
    shared = share(nvme_bytes=0)
    assert shared.try_open(60)
    return ShelfUser(shared.shelves[Tier.DRAM], Bell())


def write_one(user: ShelfUser, block_hash: bytes, asked: Retention = PLAIN) -> ShelfOutcome | None:
    """How a write ends; None if there is no slot for it now."""
    [ticket] = user.shelf.write([WriteItem(block_hash, 0, filled(block_hash), None, asked)], time.monotonic())
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end, "a write does not end"
        time.sleep(0.002)
        ended = {done.ticket: done.outcome for done in user.shelf.poll(time.monotonic())}
        if ticket is None or ticket in ended:
            return None if ticket is None else ended[ticket]


def test_late_grants_are_given_back(share: Callable[..., SharedShelves]) -> None:
    shared = share(nvme_bytes=0)
    assert shared.try_open(60)
    shelf = shared.shelves[Tier.DRAM]
    shared.link.send(Reserve(999_999, 0, 20, NO_TENANT, later()))  # as if its asker had given up
    until(lambda: shelf.poll(time.monotonic()) or shelf.used_count >= 20)
    until(lambda: shelf.poll(time.monotonic()) or shelf.used_count < 20)


def test_a_keeper_without_threads_goes_on_and_opens_its_shelves_later(
    share: Callable[..., SharedShelves], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, scarce, refused = threading.Thread.start, threading.Event(), list[str]()

    def start_if_any(thread: threading.Thread) -> None:
        if scarce.is_set() and thread.name == "kvtier-opening":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    scarce.set()
    monkeypatch.setattr(threading.Thread, "start", start_if_any)
    shared = share()
    assert shared.try_open(60) and not shared.shelves and refused
    assert "can't start new thread" in shared.refusal
    scarce.clear()
    until(lambda: shared.poll(time.monotonic()) is not None and len(shared.shelves) == 2)


def test_a_folder_that_hangs_with_its_disk_keeps_nobody_waiting(
    call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, begun, folder = threading.Event(), threading.Event(), CacheDirectory.folder

    def slowly(cache: CacheDirectory, name: str) -> int:
        begun.set()
        assert hung.wait(60)
        return folder(cache, name)

    monkeypatch.setattr(CacheDirectory, "folder", slowly)
    waiting, other = call(), call()
    waiting.say(BOTH)
    assert begun.wait(60)
    other.say(msgspec.structs.replace(OTHER, budgets=[4 * SLOT_BYTES, 0]))
    assert isinstance(other.hear(), Welcome)
    hung.set()


def test_memory_on_its_way_out_is_not_given_to_another_layout_yet(
    keeper: Tender, call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.linger_s = 0.3
    leaving, begun, close = threading.Event(), threading.Event(), Opened.close

    def slowly(opened: Opened, cache: CacheDirectory) -> bool:
        begun.set()
        assert leaving.wait(60)
        return close(opened, cache)

    monkeypatch.setattr(Opened, "close", slowly)
    first, second = call(), call()
    first.join()
    second.say(OTHER)
    answer = second.hear()
    assert isinstance(answer, Welcome) and answer.slabs == []
    assert lock_byte(second.cache.hold(open_owners(second.cache.top)), answer.owner)
    second.say(Join([], []))
    first.cache.drop(first.lock)
    first.hang_up()
    assert begun.wait(60)
    third = call()
    third.say(msgspec.structs.replace(OTHER, layout="1" * 32))
    answer = third.hear()
    assert isinstance(answer, Welcome) and answer.slabs == [] and "too little" in answer.notes[0]
    leaving.set()
    assert second.hear_the_end(), "hung up on, to come again"


def test_places_of_layouts_that_nobody_uses_go_to_others(
    keeper: Tender, call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.keeper.greeting.LAYOUTS_MAX", 4)
    keeper.linger_s = 0.1
    call().join()

    def is_welcome(number: int, nvme_bytes: int) -> bool:
        visitor = call()
        visitor.say(msgspec.structs.replace(HELLO, layout=f"{number:032x}", budgets=[0, nvme_bytes]))
        answer = visitor.hear()
        visitor.hang_up()
        assert isinstance(answer, Welcome) or (isinstance(answer, Refused) and "share" in answer.reason), answer
        return isinstance(answer, Welcome)

    for number in range(20):  # the first gets its slab, the others none
        until(partial(is_welcome, number, 1 if number else NVME_BYTES))
    until(lambda: list(keeper._house.layouts) == [HELLO.layout])


def test_a_layout_that_was_let_go_comes_back_warm(
    keeper: Tender, call: Callable[[], Caller], share: Callable[..., SharedShelves]
) -> None:
    keeper.linger_s = 0.1
    stays = call()
    stays.say(msgspec.structs.replace(OTHER, budgets=[4 * SLOT_BYTES, 0]))
    answer = stays.hear()
    assert isinstance(answer, Welcome)
    assert lock_byte(stays.cache.hold(open_owners(stays.cache.top)), answer.owner)
    stays.say(Join([], []))
    for turn in range(3):
        shared = share(dram_bytes=0)
        assert shared.try_open(60)
        until(partial(is_open, shared))
        user = ShelfUser(shared.shelves[Tier.NVME], Bell())
        until(partial(is_written, user, HASHES[turn]))
        assert user.hits(HASHES[: turn + 1]) == turn + 1
        shared.close()
        until(lambda: list(keeper._house.layouts) == [OTHER.layout])


def test_a_look_at_files_that_are_let_go_of_meanwhile_finds_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, form = CacheDirectory(tmp_path / "other", 0.0), row_format(LAYOUT, NAMESPACE)
    kept = KeptLayout(HELLO.layout, form, POLICIES["lru"], (STANDARD, STANDARD))
    kept.opened[1] = open_nvme(cache, kept.name, form, kept.policy, STANDARD, NVME_BYTES, None, 0.0)
    assert kept.is_current(cache)
    (tmp_path / "other" / kept.name / SLAB_NAME).rename(tmp_path / "away")
    assert not kept.is_current(cache)
    look = CacheDirectory.is_current

    def slowly(cache: CacheDirectory, *arguments: Any) -> bool:
        kept.leave(cache)
        until(lambda: not kept.is_leaving)
        return look(cache, *arguments)

    monkeypatch.setattr(CacheDirectory, "is_current", slowly)
    assert kept.is_current(cache)
    cache.close()


def is_open(shared: SharedShelves) -> bool:
    shared.poll(time.monotonic())
    return len(shared.shelves) > 0


def is_written(user: ShelfUser, block_hash: bytes) -> bool:
    user.shelf.poll(time.monotonic())
    return write_one(user, block_hash) is ShelfOutcome.DONE


def test_of_those_that_do_not_read_the_one_that_is_furthest_behind_is_hung_up_on(
    call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.keeper.server.UNREAD_BYTES_MAX", 4 << 20)
    reads, little, much = call(), call(), call()
    for caller in (reads, little, much):
        caller.join()
    question = frame(Publish(1, 0, [], later()))
    little.link.sendall(30_000 * question)
    with pytest.raises(ConnectionError):
        much.link.sendall(400_000 * question)
    assert reads.reserve(1, later()) == little.reserve(1, later()) == 1, "though it has not read for long"


def test_what_the_books_of_shared_shelves_count_is_published_by_one_engine(
    share: Callable[..., SharedShelves], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s, real = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: real() + passed_s)
    shares = [share(), share()]
    assert all(shared.try_open(60) for shared in shares)
    stores = [small_store(shared) for shared in shares]

    def poll() -> list[tuple[float, float]]:
        for store in stores:
            store.poll(time.monotonic())
            store.publish_metrics()
        families = [(store.metrics.pinned_blocks, store.metrics.expired_blocks) for store in stores]
        return [(pinned.value("dram"), expired.value("dram")) for pinned, expired in families]

    until(lambda: poll() is not None and sum(shared.link.reports for shared in shares) == 1)
    pinned = Retention(expiry_s=int(time.time()) + 600, pinned=True)
    for store in stores[:1]:
        slots = store.allocate(2)
        assert slots is not None
        store.release([store.seal(slot, HASHES[at], at, 0.0, pinned) for at, slot in enumerate(slots)])
    until(lambda: sorted(pair[0] for pair in poll()) == [0, 2])
    passed_s = 602.0
    until(lambda: sorted(poll()) == [(0, 0), (0, 2)])
    until(lambda: all(shared.books[Tier.DRAM].counts.expired == 2 for shared in shares if poll()))
    third = small_store(share())
    until(lambda: third.poll(time.monotonic()) or "dram" in third.capacities())
    while stores:
        stores.pop().close(5.0)
    until(
        lambda: (
            third.poll(time.monotonic()),
            third.publish_metrics(),
            third.metrics.tier_capacity_blocks.value("dram"),
        )[2]
    )
    assert third.metrics.expired_blocks.value("dram") == 0, "what others have reported"
    third.close(5.0)


@pytest.mark.parametrize("error", [ConfigError, ShelfError])
def test_only_an_error_of_configuration_tells_the_engine_that_its_configuration_does_not_fit(
    call: Callable[[], Caller], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> object:
        raise error("tiers.dram.bytes: too much")

    monkeypatch.setattr(openings, "make_dram", fail)
    caller = call()
    caller.say(HELLO)
    answer = caller.hear()
    assert isinstance(answer, Welcome) and answer.notes == ["DRAM: tiers.dram.bytes: too much"]
    assert answer.unfit == (answer.notes[0] if error is ConfigError else "")
