"""The store as one thing: order of eviction over chains, counters, shelves that come later, and checks that catch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import LAYOUT, NAMESPACE, SteppedIo, SteppedTiers, chain_hashes, nvme_slab

from kvtier.block import Tier
from kvtier.books import LocalBooks
from kvtier.demotion import NvmePolicy
from kvtier.device.mapped import MappingError
from kvtier.directory import Directory
from kvtier.io.base import Operation
from kvtier.record import Record
from kvtier.reopening import RETRY_S
from kvtier.shelf import Shelf
from kvtier.ticket import ShelfLimits
from kvtier.tiers.header import RowFormat
from kvtier.tiers.slab import Slab, make_dram_slab

HASHES = chain_hashes(range(160))
"""Twenty blocks of one chain."""


def grow(tiers: SteppedTiers, count: int, now: float) -> None:
    """A sequence that makes a block a second, then ends a second later."""
    slots: list[int] = []
    for depth in range(count):
        slots += tiers.compute(HASHES[depth : depth + 1], now + depth, depth)
        tiers.settle(now + depth)
    tiers.store.touch(HASHES[:count], now + count)
    tiers.store.release(slots)


def test_a_chain_loses_its_last_blocks_first_in_hbm(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=0, nvme=0)
    grow(tiers, 6, 1.0)
    assert tiers.store.allocate(5) is not None  # two were free, so three of the chain had to go
    fetch = tiers.store.fetch(HASHES[:6], 0, 20.0)
    assert fetch is not None and len(fetch.slots) == 3


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_a_chain_loses_its_last_blocks_first_on_a_shelf(tier: Tier, tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=12, dram=8 * (tier is Tier.DRAM), nvme=8 * (tier is Tier.NVME))
    grow(tiers, 6, 1.0)
    tiers.store.release(tiers.compute(chain_hashes([7] * 40, "other"), 30.0))
    tiers.settle(30.0)
    assert [tiers.shelves[tier].holds(block_hash) for block_hash in HASHES[:6]] == [True] * 3 + [False] * 3


def test_rows_written_after_the_sequence_ended_are_as_old_as_the_rest_of_its_chain(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=12, dram=8, nvme=0)
    slots = tiers.compute(HASHES[:6], 1.0)
    tiers.store.touch(HASHES[:6], 1.5)
    tiers.store.release(slots)
    now = 2.0
    while tiers.store.stats()["waiting_writes"] or tiers.store.busy or now == 2.0:  # one row a second
        tiers.store.poll(now)
        tiers.step(1)
        now += 1.0
    tiers.store.release(tiers.compute(chain_hashes([7] * 40, "other"), 30.0))
    tiers.settle(30.0)
    assert [tiers.shelves[Tier.DRAM].holds(block_hash) for block_hash in HASHES[:6]] == [True] * 3 + [False] * 3


def test_metrics_say_what_moved_and_what_went_wrong(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=16)
    tiers.store.release(tiers.compute(HASHES[:4]))
    tiers.drain(Tier.HBM)
    tiers.drain(Tier.DRAM)
    tiers.corrupt(Tier.NVME, tiers.shelves[Tier.NVME].find(HASHES[2:3])[0].slot, 4096)
    slots, origins = tiers.take(HASHES[:4])
    assert origins == [Tier.NVME] * 2
    tiers.settle(0.0)
    for _ in range(2):  # growth is counted once
        tiers.store.publish_metrics()
    metrics, row_bytes = tiers.metrics, LAYOUT.row_bytes
    assert metrics.shelf_failures.value("nvme", "bad_row") == 1
    assert metrics.promoted_blocks.value("nvme", "hbm") == 3
    assert metrics.demoted_blocks.value("hbm", "dram") >= 4
    assert metrics.demoted_blocks.value("hbm", "nvme") + metrics.demoted_blocks.value("dram", "nvme") == 4
    assert metrics.evicted_blocks.value("hbm") == 4 and metrics.evicted_bytes.value("hbm") == 4 * row_bytes
    assert metrics.tier_used_blocks.value("hbm") == len(slots) + 1
    assert metrics.tier_used_bytes.value("nvme") == 3 * row_bytes
    assert metrics.tier_capacity_blocks.value("dram") == 8
    assert metrics.transfer_seconds.count("nvme", "hbm") == 3


def away_shelf(folder: Path, io: SteppedIo | None = None) -> Shelf:
    """An NVMe shelf that no store uses yet."""
    form = RowFormat.of(LAYOUT, NAMESPACE)
    slab = nvme_slab(folder, form, 8)
    return Shelf(Tier.NVME, form, slab, LocalBooks(Directory(8)), io or SteppedIo(), ShelfLimits(16), lambda *_: None)


def dram_shelf(slab: Slab, io: SteppedIo) -> Shelf:
    form, books = RowFormat.of(LAYOUT, NAMESPACE), LocalBooks(Directory(8))
    return Shelf(Tier.DRAM, form, slab, books, io, ShelfLimits(16), lambda *_: None)


def openers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvtier-opener"]


def poll(tiers: SteppedTiers, now: float) -> None:
    """Poll once, and let the opener that this may have sent off end."""
    tiers.store.poll(now)
    for thread in openers():
        thread.join(60)


def test_rows_that_no_keeper_answers_for_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    books = tiers.shelves[Tier.DRAM]._books
    assert isinstance(books, LocalBooks)

    def unanswered(records: Sequence[Record], *_: object) -> None:
        books._answers.extend((one, None) for one in records)

    monkeypatch.setattr(books, "publish", unanswered)
    tiers.store.release(tiers.compute(HASHES[:4]))
    tiers.settle(0.0)
    tiers.store.publish_metrics()
    assert tiers.metrics.shelf_failures.value("dram", "unanswered") == 4
    assert tiers.shelves[Tier.DRAM].find(HASHES[:4]) == []


def test_an_opener_that_gets_no_thread_is_sent_off_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    tiers.store.open_shelf(Tier.NVME, lambda: away_shelf(tmp_path, SteppedIo()))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    tiers.store.poll(0.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    poll(tiers, RETRY_S / 2)
    assert refused == ["kvtier-opener"] and tiers.store.capacities() == {"hbm": 8, "dram": 8}
    poll(tiers, RETRY_S)
    tiers.store.poll(RETRY_S)
    assert tiers.store.capacities() == {"hbm": 8, "dram": 8, "nvme": 8}
    tiers.store.close(0.0)


def test_a_shelf_that_was_away_is_tried_again_and_used_once_it_is_there(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    io = SteppedIo()
    shelf = away_shelf(tmp_path, io)
    calls: list[float] = []
    answers: list[Shelf | None] = [None, None]

    def opener() -> Shelf | None:
        calls.append(now)
        return answers.pop() if answers else shelf

    tiers.store.open_shelf(Tier.NVME, opener)
    assert tiers.store.capacities() == {"hbm": 8, "dram": 8}
    for tenth in range(int(10 * 4 * RETRY_S)):
        now = tenth / 10
        poll(tiers, now)
    assert calls == [0.0, RETRY_S, 2 * RETRY_S]
    assert tiers.store.capacities() == {"hbm": 8, "dram": 8, "nvme": 8}
    tiers.store.release(tiers.compute(HASHES[:3], now))
    for _ in range(3):  # to DRAM, and from there to NVMe
        tiers.store.poll(now)
        tiers.step()
        io.step(10)
    tiers.store.poll(now)
    assert shelf.used_count == 3


class SlowOpener:
    """Opens `shelf` once it is let, as a disk does that takes its time."""

    def __init__(self, shelf: Shelf | None) -> None:
        self.shelf = shelf
        self.entered, self.let = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self) -> Shelf | None:
        self.calls += 1
        self.entered.set()
        assert self.let.wait(60)
        return self.shelf


def test_an_opener_that_waits_for_its_disk_holds_up_no_poll_and_is_the_only_one(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    opener = SlowOpener(away_shelf(tmp_path))
    tiers.store.open_shelf(Tier.NVME, opener)
    for turn in range(20):
        tiers.store.poll(turn * RETRY_S)
    assert opener.entered.wait(60) and opener.calls == 1 and "nvme" not in tiers.store.capacities()
    opener.let.set()
    poll(tiers, 1000.0)
    tiers.store.poll(1000.0)
    assert tiers.store.capacities()["nvme"] == 8 and opener.calls == 1


def test_an_opener_that_fails_unforeseen_is_tried_again(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    shelf, calls, seen = away_shelf(tmp_path), list[int](), list[object]()

    def opener() -> Shelf | None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        return shelf

    before, threading.excepthook = threading.excepthook, lambda about: seen.append(about.exc_value)
    try:
        tiers.store.open_shelf(Tier.NVME, opener)
        for turn in range(3):
            poll(tiers, turn * RETRY_S)
    finally:
        threading.excepthook = before
    assert len(calls) == 2 and isinstance(seen[0], RuntimeError) and tiers.store.capacities()["nvme"] == 8


@pytest.mark.parametrize("from_source", [False, True])
def test_a_shelf_that_the_device_cannot_reach_is_done_without_and_tried_again_later(
    from_source: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    (tmp_path / "refused").mkdir()
    refused, shelf, tries = away_shelf(tmp_path / "refused"), away_shelf(tmp_path), list[int]()

    def serve(_: object) -> None:
        raise MappingError("cudaHostRegister: CUDA error 2")

    class Source:
        def poll(self, now: float) -> list[Shelf]:
            return [refused] if now == 1.0 else []

    def opener() -> Shelf:
        tries.append(1)
        return refused if len(tries) == 1 and not from_source else shelf

    monkeypatch.setattr(refused, "serve", serve)
    if from_source:
        tiers.store.watch(Source())
        poll(tiers, 1.0)
        poll(tiers, 1.0 + RETRY_S)
    else:
        tiers.store.open_shelf(Tier.NVME, opener)
        for now in (RETRY_S, RETRY_S, RETRY_S + 0.1, 2 * RETRY_S - 0.1):
            poll(tiers, now)
        assert len(tries) == 1 and "nvme" not in tiers.store.capacities()
        for now in (2 * RETRY_S, 2 * RETRY_S):
            poll(tiers, now)
    assert refused._closed and ("nvme" in tiers.store.capacities()) is not from_source
    assert [r.getMessage() for r in caplog.records if "serving without the nvme shelf" in r.getMessage()] == [
        "serving without the nvme shelf: device: host memory cannot be mapped for it (cudaHostRegister: CUDA error 2); "
        "lower tiers.dram.bytes, or set device: cpu"
    ]
    assert tiers.take(HASHES[:2]) == ([], [])


@pytest.mark.parametrize("seen", [False, True], ids=["still opening", "opened and not yet taken"])
def test_a_shelf_that_opens_while_the_store_closes_is_closed_again(seen: bool, tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    opener = SlowOpener(away_shelf(tmp_path))
    tiers.store.open_shelf(Tier.NVME, opener)
    tiers.store.poll(0.0)
    assert opener.entered.wait(60)
    if seen:
        opener.let.set()
        for thread in openers():
            thread.join(60)
    tiers.store.close(1.0)
    opener.let.set()
    for thread in openers():
        thread.join(60)
    assert opener.shelf is not None and opener.shelf._closed


@pytest.mark.parametrize("read", ["stats", "capacities"])
def test_numbers_may_be_asked_for_while_a_shelf_appears(
    read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    shelf, dram = away_shelf(tmp_path), tiers.shelves[Tier.DRAM]

    class Appearing:
        """The DRAM shelf as another thread sees it, while the engine thread adds the next one."""

        tier, _slab = Tier.DRAM, dram._slab

        @property
        def slot_count(self) -> int:
            self.stats()
            return dram.slot_count

        def stats(self) -> dict[str, int]:
            if Tier.NVME not in tiers.store._shelves:
                tiers.store.add_shelf(shelf)
            return dram.stats()

    monkeypatch.setitem(tiers.store._shelves, Tier.DRAM, Appearing())
    first, second = getattr(tiers.store, read)(), getattr(tiers.store, read)()
    assert first.keys() < second.keys()


def test_check_notices_a_hold_that_nobody_has_and_one_that_was_lost(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=4, dram=0, nvme=0)
    slots = tiers.store.allocate(2)
    assert slots is not None
    tiers.store.check(Counter(slots))
    with pytest.raises(AssertionError):
        tiers.store.check(Counter())
    with pytest.raises(AssertionError):
        tiers.store.check(Counter([*slots, slots[0]]))


def test_only_young_transfers_that_hold_hbm_are_worth_waiting_for(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, policy=NvmePolicy.SELECTIVE)
    assert not tiers.store.awaits_slots(0.0)
    tiers.io[Tier.DRAM].hanging = tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    tiers.store.release(tiers.compute(HASHES[:2]))
    tiers.store.poll(10.0)
    assert tiers.store.busy and tiers.store.awaits_slots(10.5) and not tiers.store.awaits_slots(11.5)
    tiers.io[Tier.DRAM].hanging = set()
    tiers.step()
    tiers.store.poll(12.0)
    fetch = tiers.store.fetch(HASHES[:2], 2, 12.0)  # used again: from its DRAM row to NVMe
    assert fetch is not None
    tiers.store.poll(12.0)
    assert tiers.store.busy and not tiers.store.awaits_slots(12.0)


def test_two_tenants_never_share_a_block(tmp_path: Path) -> None:
    assert not set(chain_hashes(range(64), "a")) & set(chain_hashes(range(64), "b"))
    tiers = SteppedTiers(tmp_path, hbm=16, dram=16, nvme=0)
    tiers.store.release(tiers.compute(chain_hashes(range(32), "a")))
    assert tiers.take(chain_hashes(range(32), "b")) == ([], [])


def test_a_shelf_that_has_lost_its_files_misses_and_is_replaced_once_nothing_is_under_way(
    tmp_path: Path,
) -> None:
    tiers = SteppedTiers(tmp_path, hbm=12, dram=0, nvme=0)
    io = SteppedIo()
    for name in ("lost", "other"):
        (tmp_path / name).mkdir()
    lost, other, closed = away_shelf(tmp_path / "lost", io), away_shelf(tmp_path / "other"), list[bool]()
    lost._close_files = lambda *_: closed.append(True)

    def opener() -> Shelf:
        assert closed == [True], "the old one has been closed before"
        return other

    tiers.store.add_shelf(lost, opener)
    tiers.store.release(tiers.compute(HASHES[:6]))
    poll(tiers, 1.0)
    io.step(2)
    io.freeze()  # the rest is under way
    lost._files_lost = lambda: True
    poll(tiers, 2.0)
    assert lost.is_lost and lost.used_count > 0 and not lost.holds(HASHES[0]) and lost.find(HASHES) == []
    assert tiers.store.capacities()["nvme"] == 8 and not closed, "rows under way keep the shelf"
    io._frozen.clear()
    io.step(10)
    poll(tiers, 3.0)
    assert closed == [True] and tiers.store.stats()["waiting_writes"] == 0
    poll(tiers, 3.0)
    assert tiers.store._shelves[Tier.NVME] is other
    tiers.store.publish_metrics()
    assert tiers.metrics.tier_used_blocks.value("nvme") == 0
    tiers.store.check()


def test_a_lost_shelf_that_nobody_can_open_again_stays_and_misses(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=12, dram=0, nvme=8)
    tiers.store.release(tiers.compute(HASHES[:4]))
    tiers.settle(0.0)
    tiers.shelves[Tier.NVME]._files_lost = lambda: True
    poll(tiers, 1.0)
    assert tiers.store.capacities()["nvme"] == 8 and not tiers.shelves[Tier.NVME].holds(HASHES[0])


@pytest.mark.parametrize("order", [(Tier.DRAM, Tier.NVME), (Tier.NVME, Tier.DRAM)], ids=str)
def test_nvme_is_told_of_drams_memory_whichever_comes_first_and_when_it_is_opened_anew(
    order: tuple[Tier, Tier], tmp_path: Path
) -> None:
    tiers = SteppedTiers(tmp_path, hbm=4, dram=0, nvme=0)
    (tmp_path / "again").mkdir()
    slab = make_dram_slab(RowFormat.of(LAYOUT, NAMESPACE).slot_bytes, 8)
    dram_io, first, again = SteppedIo(), SteppedIo(), SteppedIo()
    shelves = {Tier.DRAM: dram_shelf(slab, dram_io), Tier.NVME: away_shelf(tmp_path, first)}
    other = away_shelf(tmp_path / "again", again)
    for tier in order:
        assert not first.registered
        tiers.store.add_shelf(shelves[tier], (lambda: other) if tier is Tier.NVME else None)
    assert [memory.obj is slab.mapping for memory in first.registered] == [True, False], "and its own header pages"
    shelves[Tier.NVME]._files_lost = lambda: True
    poll(tiers, 1.0)
    poll(tiers, 1.0)
    assert tiers.store._shelves[Tier.NVME] is other and list(tiers.store._shelves) == [Tier.DRAM, Tier.NVME]
    assert again.registered[0].obj is slab.mapping and not dram_io.registered
