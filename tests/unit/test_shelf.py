"""One shelf, DRAM and NVMe by the same tests: what goes in comes out, bounded, leased, evicted in order, warm again."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.block import KVLayout, Tier
from kvtier.cache_directory import layout_name
from kvtier.errors import ConfigError, ShelfError
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.io.threads import ThreadsEngine
from kvtier.io.uring import UringEngine
from kvtier.record import tenant_digest
from kvtier.retention import Retention
from kvtier.shelf import DROP_REASONS, ReadItem, ShelfDone, ShelfLimits, ShelfOutcome, WriteItem
from kvtier.shelves import open_dram_shelf
from kvtier.ticket import ShelfOperation
from kvtier.tiers.checksum import slice_sums
from tests.rows import (
    IO,
    LAYOUT,
    NAMESPACE,
    ShelfUser,
    aligned,
    block_hashes,
    directory_of,
    dram_user,
    filled,
    need_uring,
    nvme_user,
    payload,
)

OTHER_LAYOUT = KVLayout(layers=5, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32")
NVME_BYTES_OF_12 = 12 * (4096 + LAYOUT.row_bytes) + 85_000
HASHES = block_hashes(40)

Make = Callable[..., ShelfUser]


@pytest.fixture(params=[Tier.DRAM, Tier.NVME], ids=["dram", "nvme"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Opens a shelf of exactly 12 slots; all are checked and closed in the end."""
    made: list[ShelfUser] = []

    def open_one(calls: FaultyCalls | None = None, limits: ShelfLimits | None = None) -> ShelfUser:
        if request.param is Tier.DRAM:
            made.append(dram_user(12, calls, limits))
        else:
            made.append(nvme_user(tmp_path / str(len(made)), NVME_BYTES_OF_12, calls, limits))
        assert made[-1].shelf.slot_count == 12 and made[-1].shelf.tier is request.param
        return made[-1]

    yield open_one
    for user in made:
        user.shelf.check()
        user.shelf.close(60.0)


def outcomes(done: list[ShelfDone | None]) -> list[ShelfOutcome | None]:
    return [None if end is None else end.outcome for end in done]


def spoil(user: ShelfUser, slot: int, place: int) -> None:
    """Flip the bits of one byte of a slot behind the shelf's back."""
    path = f"/proc/self/fd/{user.shelf._slab.descriptor}"
    with open(path, "r+b", buffering=0) as file:
        offset = user.shelf._slab.offset(slot) + place
        [byte] = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), offset)


def test_what_was_written_is_found_and_read_to_the_last_byte(make: Make) -> None:
    user = make()
    assert user.shelf.find(HASHES[:10]) == [] and user.hits(HASHES) == 0
    done = user.write(HASHES[:10])
    assert outcomes(done) == [ShelfOutcome.DONE] * 10
    assert all(end is not None and end.moved_bytes == 4096 + LAYOUT.row_bytes for end in done)
    records = user.shelf.find(HASHES[:12])
    assert [record.block_hash for record in records] == HASHES[:10] and [r.depth for r in records] == list(range(10))
    assert outcomes(user.read(records)) == [ShelfOutcome.DONE] * 10
    stats = user.shelf.stats()
    assert (stats["reads"], stats["writes"], stats["slots_used"], stats["bad_row"]) == (10, 10, 10, 0)
    assert stats["read_bytes"] == stats["write_bytes"] == 10 * (4096 + LAYOUT.row_bytes)


def test_what_is_there_or_under_way_is_not_written_again(make: Make) -> None:
    user = make()
    item = WriteItem(HASHES[0], 0, filled(HASHES[0]))
    tickets = user.shelf.write([item, item], user.now)
    assert tickets[0] is not None and tickets[1] is None and user.shelf.holds(HASHES[0]) is False
    assert user.shelf.write([item], user.now) == [None] and user.shelf.in_flight == 1
    user.finish(tickets)
    assert user.shelf.write([item], user.now) == [None]
    assert user.shelf.holds(HASHES[0]) and user.shelf.used_count == 1 and user.shelf.in_flight == 0


def test_a_probe_that_finds_no_slot_is_made_as_soon_as_there_is_one(make: Make) -> None:
    calls = FaultyCalls()
    user = make(calls, ShelfLimits(16, pause_s=5.0))
    user.write(HASHES[:11])
    leases = [lease for lease in user.shelf.acquire(user.shelf.find(HASHES[:11])) if lease is not None]
    calls.inject([Fault(Call.WRITE, 1, Effect.ERROR, errno.ENOSPC, sticky=True)])
    assert outcomes(user.write(HASHES[11:12])) == [ShelfOutcome.NO_SPACE]
    calls.inject([])
    [grant] = directory_of(user.shelf).reserve(1)
    item, probed_at = WriteItem(HASHES[11], 11, filled(HASHES[11])), user.now + 5.0
    assert user.shelf.write([item], probed_at) == [None], "there is no slot for the probe"
    directory_of(user.shelf).abandon([grant])
    assert outcomes(user.finish(user.shelf.write([item], probed_at + 0.1))) == [ShelfOutcome.DONE]
    user.shelf.release(leases)


@pytest.mark.parametrize("lacking", ["kvtier-journal", "kvtier-file-watch"])
def test_a_shelf_that_could_have_no_thread_leaves_its_directory_to_the_next_try(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == lacking:
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", start)
        with pytest.raises(ShelfError, match="no thread"):
            nvme_user(tmp_path / "cache")
    user = nvme_user(tmp_path / "cache")
    assert outcomes(user.write(HASHES[:2])) == [ShelfOutcome.DONE] * 2
    user.shelf.close(5.0)


def test_another_thread_may_ask_for_numbers_while_more_are_counted() -> None:
    shelf, asked = dram_user(12).shelf, 0

    def count() -> None:
        while asked < 3000:
            shelf._counts.clear()
            for reason in DROP_REASONS:
                shelf.drop([], reason)

    counting, interval_s = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counting.start()
        while asked < 3000:
            assert shelf.stats()["slots_total"] == 12
            asked += 1
    finally:
        asked = 3000
        counting.join()
        sys.setswitchinterval(interval_s)
    shelf.close(1.0)


def test_when_the_breaker_opens_transfers_that_have_not_started_give_their_memory_back(make: Make) -> None:
    calls = FaultyCalls()
    user = make(calls, ShelfLimits(16, late_s=1.0, failures_max=2))
    user.write(HASHES[:10])
    calls.inject([Fault(Call.READ, 1, Effect.HANG, sticky=True)])
    records = user.shelf.find(HASHES[:10])
    tickets = user.shelf.read([ReadItem(record, aligned(LAYOUT.row_bytes)) for record in records])
    started = time.monotonic()
    while calls.count(Call.READ) < IO.readers:
        assert time.monotonic() - started < 60
    user.shelf.poll(user.now)
    user.now += 1.5
    ended = [*user.shelf.poll(user.now), *user.shelf.poll(user.now)]
    assert len(ended) == 10 - IO.readers and {end.outcome for end in ended} == {ShelfOutcome.REFUSED}
    assert user.shelf.in_flight == IO.readers, "only what hangs in the kernel keeps its memory"
    calls.release()
    user.finish([ticket for ticket in tickets if ticket not in {end.ticket for end in ended}])


def test_reads_that_have_not_begun_can_be_let_go_of_and_the_shelf_reads_on(make: Make) -> None:
    calls = FaultyCalls()
    user = make(calls, ShelfLimits(IO.readers + 2))
    for block_hash in HASHES[:10]:
        user.write([block_hash])
    begun = calls.count(Call.READ)
    calls.inject([Fault(Call.READ, begun + 1, Effect.HANG, sticky=True)])
    records = user.shelf.find(HASHES[:10])
    tickets = user.shelf.read([ReadItem(record, aligned(LAYOUT.row_bytes)) for record in records])
    started = time.monotonic()
    while calls.count(Call.READ) < begun + IO.readers:
        assert time.monotonic() - started < 60
    user.shelf.cancel_reads()
    ended = {end.ticket: end.outcome for end in user.shelf.poll(user.now)}
    assert ended == dict.fromkeys(tickets[IO.readers :], ShelfOutcome.REFUSED)
    assert user.shelf.in_flight == IO.readers and user.shelf.stats()["breaker_openings"] == 0
    calls.release()
    assert outcomes(user.finish(tickets[: IO.readers])) == [ShelfOutcome.DONE] * IO.readers
    assert outcomes(user.read(records)) == [ShelfOutcome.DONE] * 10


def test_writes_in_flight_are_bounded_and_the_rest_is_refused(make: Make) -> None:
    calls = FaultyCalls()
    user = make(calls)
    calls.inject([Fault(Call.WRITE, 1, Effect.HANG, sticky=True)])
    items = [WriteItem(block_hash, 0, filled(block_hash)) for block_hash in HASHES[:12]]
    tickets = user.shelf.write(items, user.now)
    assert [ticket is not None for ticket in tickets] == [True] * IO.in_flight_max + [False] * 4
    user.shelf.check()
    calls.release()
    assert outcomes(user.finish(tickets)) == [ShelfOutcome.DONE] * 8 + [None] * 4


def test_more_reads_than_may_be_in_flight_wait_for_their_turn(make: Make) -> None:
    user = make(limits=ShelfLimits(in_flight_max=2, waiting_max=9))
    for block_hash in HASHES[:12]:
        user.write([block_hash])
    records = user.shelf.find(HASHES[:12])
    targets = [aligned(LAYOUT.row_bytes) for _ in records]
    tickets = user.shelf.read([ReadItem(*pair) for pair in zip(records, targets, strict=True)])
    assert tickets[9:] == [None] * 3 and None not in tickets[:9] and user.shelf.in_flight == 9
    user.finish(tickets)
    assert [bytes(target) for target in targets[:9]] == [payload(block_hash) for block_hash in HASHES[:9]]


def test_a_full_shelf_gives_up_its_coldest_rows_deepest_first(make: Make) -> None:
    user = make()
    user.write(HASHES[:12])
    user.now += 1
    user.shelf.touch(HASHES[:6], user.now)
    assert [record.block_hash for record in user.shelf.coldest(2)] == [HASHES[11], HASHES[10]]
    user.now += 1
    assert outcomes(user.write(HASHES[20:26])) == [ShelfOutcome.DONE] * 6
    assert user.hits(HASHES) == 12 == user.hits(HASHES[:6]) + user.hits(HASHES[20:26])
    assert user.shelf.stats()["evictions"] == 6


def test_a_leased_row_stays_and_without_room_nothing_is_written(make: Make) -> None:
    user = make()
    user.write(HASHES[:12])
    records = user.shelf.find(HASHES[:12])
    leases = [lease for lease in user.shelf.acquire(records) if lease is not None]
    assert len(leases) == 12 and [lease.record for lease in leases] == records
    assert user.write(HASHES[20:22]) == [None, None] and user.hits(HASHES[:12]) == 12
    user.shelf.release(leases[:1])
    assert outcomes(user.write(HASHES[20:22])) == [ShelfOutcome.DONE, None]
    assert user.shelf.acquire(records[:1]) == [None], "the record is of what was there before"
    user.shelf.release(leases[1:])


def test_a_dropped_row_is_gone_at_once_and_counted(make: Make) -> None:
    user = make()
    user.write(HASHES[:4])
    user.shelf.drop(user.shelf.find(HASHES[:2]), "evicted")
    assert user.hits(HASHES[:4]) == 2 and user.shelf.used_count == 2 and user.shelf.stats()["dropped_evicted"] == 2


def test_a_read_that_loses_the_race_against_eviction_is_a_miss_and_no_damage(make: Make) -> None:
    user = make()
    user.write(HASHES[:12])
    old = user.shelf.find(HASHES[:12])
    user.now += 1
    user.write(HASHES[20:32])
    assert user.hits(HASHES[20:32]) == 12
    assert outcomes(user.read(old)) == [ShelfOutcome.STALE] * 12
    assert user.shelf.stats()["bad_row"] == 0 and user.hits(HASHES[20:32]) == 12, "nobody else's row was dropped"


def test_slices_of_a_run_of_layers_come_alone_each_held_to_its_sum(make: Make) -> None:
    user = make()
    user.write(HASHES[:2])
    first, second = user.shelf.find(HASHES[:2])
    runs = [range(start, stop) for start in range(LAYOUT.layers) for stop in range(start + 1, LAYOUT.layers + 1)]
    targets = [aligned(len(layers) * LAYOUT.slice_bytes) for layers in runs]
    items = [ReadItem(second, target, layers) for target, layers in zip(targets, runs, strict=True)]
    done = user.finish(user.shelf.read(items))
    assert outcomes(done) == [ShelfOutcome.DONE] * len(runs)
    for layers, target, end in zip(runs, targets, done, strict=True):
        row = payload(HASHES[1])
        assert bytes(target) == row[layers.start * LAYOUT.slice_bytes : layers.stop * LAYOUT.slice_bytes]
        assert end is not None and end.moved_bytes == target.nbytes, "nothing else of the row moved"
    spoil(user, first.slot, 4096 + LAYOUT.slice_bytes + 7)
    ends = [user.read_slices(first, layers) for layers in (range(1), range(2, 3), range(1, 2))]
    assert ends == [ShelfOutcome.DONE, ShelfOutcome.DONE, ShelfOutcome.BAD_ROW]
    assert not user.shelf.holds(HASHES[0]) and user.shelf.stats()["bad_row"] == 1
    assert user.read_slices(first, range(2)) is ShelfOutcome.STALE, "its record was dropped"


def test_slices_of_a_row_that_was_evicted_meanwhile_are_a_miss_and_no_damage(make: Make) -> None:
    user = make()
    user.write(HASHES[:12])
    [stale] = user.shelf.find(HASHES[11:12])
    user.write(HASHES[20:21])
    assert user.read_slices(stale, range(1, 3)) is ShelfOutcome.STALE
    assert user.hits([*HASHES[:11], HASHES[20]]) == 12


def test_priority_and_tenant_reach_the_record(make: Make) -> None:
    user = make()
    retention = Retention(priority=3, tenant=tenant_digest("someone"))
    user.finish(user.shelf.write([WriteItem(HASHES[0], 7, filled(HASHES[0]), None, retention)], user.now))
    (record,) = user.shelf.find(HASHES[:1])
    assert (record.depth, record.priority) == (7, 3) and record.tenant != bytes(16)
    assert user.hits(HASHES[:1]) == 1


def test_after_closing_nothing_is_taken_and_closing_again_is_nothing(make: Make) -> None:
    user = make()
    user.write(HASHES[:1])
    records = user.shelf.find(HASHES[:1])
    user.shelf.close(60.0)
    user.shelf.close(60.0)
    assert user.shelf.write([WriteItem(HASHES[1], 0, filled(HASHES[1]))], user.now) == [None]
    assert user.shelf.read([ReadItem(records[0], aligned(LAYOUT.row_bytes))]) == [None]


def test_done_tells_ticket_operation_and_time(make: Make) -> None:
    user = make()
    (ticket,) = user.shelf.write([WriteItem(HASHES[0], 0, filled(HASHES[0]))], user.now)
    (done,) = user.finish([ticket])
    assert done is not None and (done.ticket, done.block_hash) == (ticket, HASHES[0])
    assert done.operation is ShelfOperation.WRITE and 0 < done.duration_ns < 20e9
    assert "in_flight=0" in repr(user.shelf)


def test_dram_rows_are_viewed_in_place_and_go_to_nvme_with_their_sums(tmp_path: Path) -> None:
    dram, nvme = dram_user(4), nvme_user(tmp_path / "cache")
    dram.write(HASHES[:3])
    leases = [lease for lease in dram.shelf.acquire(dram.shelf.find(HASHES[:3])) if lease is not None]
    items = [
        WriteItem(lease.record.block_hash, lease.record.depth, dram.shelf.view(lease), lease.record.sums)
        for lease in leases
    ]
    assert [bytes(item.source) for item in items] == [payload(block_hash) for block_hash in HASHES[:3]]
    nvme.finish(nvme.shelf.write(items, nvme.now))
    dram.shelf.release(leases)
    assert nvme.hits(HASHES[:3]) == 3
    for user in (dram, nvme):
        user.shelf.check()
        user.shelf.close(60.0)


def test_wrong_sums_given_with_a_row_make_it_a_miss_later() -> None:
    user = dram_user(4)
    user.write(HASHES[:1], sums=slice_sums(filled(HASHES[1]), LAYOUT.slice_bytes))
    assert outcomes(user.read(user.shelf.find(HASHES[:1]))) == [ShelfOutcome.BAD_ROW]
    assert user.shelf.find(HASHES[:1]) == [] and user.shelf.stats()["bad_row"] == 1
    user.shelf.close(60.0)


LASTING = ", until the shelf is opened anew, whatever is free by then"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EPERM, r"\(injected\), NVMe is read and written by threads"),
        (errno.ENOSYS, r"\(injected\), NVMe is read and written by threads"),
        (errno.ENOMEM, r"\(injected(, .* raise `ulimit -l` .*)?\), NVMe is read and written by threads"),
        (errno.EMFILE, rf"\(.* raise `ulimit -n`\), NVMe is read and written by threads{LASTING}"),
        (errno.ENFILE, rf"\(.* raise the sysctl fs.file-max\), NVMe is read and written by threads{LASTING}"),
    ],
    ids=["forbidden", "missing", "memory", "descriptors", "files of the host"],
)
def test_where_io_uring_is_refused_threads_do_its_work_after_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, said: str
) -> None:
    calls = FaultyCalls([Fault(Call.SETUP, 1, Effect.ERROR, code, sticky=True)])
    user = nvme_user(tmp_path / "cache", calls=calls)
    assert isinstance(user.shelf._transfers._engine, ThreadsEngine) and calls.count(Call.SETUP) > 0
    [line] = [entry.message for entry in caplog.records if "io_uring" in entry.message]
    assert re.fullmatch(f"io.engine: no io_uring here {said}", line)
    user.write(HASHES[:3])
    assert user.hits(HASHES[:3]) == 3
    user.shelf.close(60.0)


@pytest.mark.parametrize(
    ("engine", "direct", "chosen"),
    [
        ("auto", True, UringEngine),
        ("auto", False, ThreadsEngine),
        ("uring", False, UringEngine),
        ("threads", True, ThreadsEngine),
    ],
)
def test_the_configuration_and_the_file_say_what_moves_rows(
    tmp_path: Path, engine: str, direct: bool, chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_uring()
    monkeypatch.setattr("kvtier.tiers.slab.direct_io_alignment", lambda _: 4096 if direct else 0)
    user = nvme_user(tmp_path / "cache", io=IO.model_copy(update={"engine": engine}))
    assert user.shelf._slab.direct is direct and type(user.shelf._transfers._engine) is chosen
    user.write(HASHES[:3])
    assert user.hits(HASHES[:3]) == 3
    user.shelf.close(60.0)


def test_budgets_that_hold_no_block_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.dram\.bytes: 100 B hold no block"):
        open_dram_shelf(LAYOUT, NAMESPACE, 100, IO, lambda: None)
    with pytest.raises(
        ShelfError, match=r"tiers\.nvme\.bytes: 100 B hold no block, with its journal one needs [\d.]+ KiB; raise it"
    ):
        nvme_user(tmp_path / "cache", 100)
    many = KVLayout(layers=600, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32")
    with pytest.raises(ConfigError, match="600 layers"):
        open_dram_shelf(many, NAMESPACE, 1 << 30, IO, lambda: None)


def closed(user: ShelfUser) -> None:
    user.shelf.check()
    user.shelf.close(60.0)


def test_nvme_is_warm_after_a_clean_close(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:20])
    user.shelf.drop(user.shelf.find(HASHES[:1]), "evicted")
    generations = {record.generation for record in user.shelf.find(HASHES[1:20])}
    closed(user)
    again = nvme_user(tmp_path / "cache")
    assert again.hits(HASHES) == 19 and not again.shelf.holds(HASHES[0])
    again.write(HASHES[:1])
    assert again.shelf.find(HASHES[:1])[0].generation > max(generations)
    assert again.hits(HASHES) == 20
    closed(again)


@pytest.mark.parametrize("damage", ["deleted", "noise", "middle", "foreign"])
def test_without_its_journal_nvme_is_rebuilt_from_headers_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    user = nvme_user(tmp_path / "cache", NVME_BYTES_OF_12)
    user.write(HASHES[:12])
    user.write(HASHES[20:24])
    highest = max(record.generation for block_hash in HASHES for record in user.shelf.find([block_hash]))
    closed(user)
    journal = tmp_path / "cache" / layout_name(LAYOUT) / "journal"
    data = bytearray(journal.read_bytes())
    if damage == "deleted":
        journal.unlink()
    elif damage == "noise":
        journal.write_bytes(os.urandom(1000))
    elif damage == "middle":
        data[len(data) // 2] ^= 4
        journal.write_bytes(data)
    else:
        other = nvme_user(tmp_path / "other", NVME_BYTES_OF_12)
        other.write(HASHES[:12])
        closed(other)
        journal.write_bytes((tmp_path / "other" / layout_name(LAYOUT) / "journal").read_bytes())
    again = nvme_user(tmp_path / "cache", NVME_BYTES_OF_12)
    assert again.hits(HASHES[:12]) == 8 and again.hits(HASHES[20:24]) == 4
    assert len([entry for entry in caplog.records if "found again from row headers" in entry.message]) == 1
    again.write(HASHES[30:31])
    assert again.shelf.find(HASHES[30:31])[0].generation > highest
    closed(again)


def test_namespaces_share_a_slab_and_never_mix(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:5])
    closed(user)
    other = nvme_user(tmp_path / "cache", namespace=bytes(32))
    assert other.write(HASHES[5:8]) and other.hits(HASHES[5:8]) == 3
    closed(other)
    (tmp_path / "cache" / layout_name(LAYOUT) / "journal").unlink()
    again = nvme_user(tmp_path / "cache")
    assert again.hits(HASHES[:5]) == 5, "what others wrote beside them changed nothing, a rebuild included"
    assert outcomes(again.read(again.shelf.find(HASHES[5:8]))) == [ShelfOutcome.BAD_ROW] * 3
    closed(again)


def test_a_changed_budget_keeps_the_rows_that_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    user = nvme_user(tmp_path / "cache", NVME_BYTES_OF_12)
    user.write(HASHES[:12])
    closed(user)
    more = nvme_user(tmp_path / "cache", 2 * NVME_BYTES_OF_12)
    assert more.shelf.slot_count > 12 and more.hits(HASHES[:12]) == 12
    more.write(HASHES[12:18])
    closed(more)
    fewer = nvme_user(tmp_path / "cache", NVME_BYTES_OF_12)
    assert fewer.shelf.slot_count == 12 and fewer.hits(HASHES[:18]) == 12
    closed(fewer)
    assert "resized from 12" in caplog.text


def directory_bytes(path: Path) -> int:
    return sum(max(file.stat().st_size, file.stat().st_blocks * 512) for file in path.rglob("*") if file.is_file())


def test_all_layouts_and_journals_stay_within_one_budget(tmp_path: Path) -> None:
    budget = 400_000
    user = nvme_user(tmp_path / "cache", budget)
    for start in range(0, 40, 8):
        user.write(HASHES[start : start + 8])
        assert directory_bytes(tmp_path / "cache") <= budget
    closed(user)
    with pytest.raises(
        ShelfError,
        match=r"one block needs a budget of [\d.]+ KiB, since other row layouts .* hold [\d.]+ KiB, .*; raise",
    ):
        nvme_user(tmp_path / "cache", budget, layout=OTHER_LAYOUT)
    other = nvme_user(tmp_path / "cache", 2 * budget, layout=OTHER_LAYOUT)
    assert budget // 2 < directory_bytes(tmp_path / "cache") <= 2 * budget
    closed(other)
    again = nvme_user(tmp_path / "cache", 2 * budget)
    assert again.hits(HASHES) > 10, "the first layout's rows are still there"
    closed(again)


def test_a_second_engine_gets_a_clear_error_and_a_later_try_succeeds(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:3])
    with pytest.raises(ShelfError, match="in use by another engine"):
        nvme_user(tmp_path / "cache", wait_s=0.05)
    assert user.hits(HASHES[:3]) == 3
    closed(user)
    again = nvme_user(tmp_path / "cache")
    assert again.hits(HASHES[:3]) == 3
    closed(again)


def test_opening_and_closing_leaks_neither_threads_nor_descriptors(tmp_path: Path) -> None:
    def threads_and_descriptors() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def no_more_than(before: tuple[int, int]) -> bool:
        return all(now <= then for now, then in zip(threads_and_descriptors(), before, strict=True))

    before = (0, 0)
    for round_number in range(6):
        user = nvme_user(tmp_path / "cache")
        user.write(HASHES[:2])
        closed(user)
        failing = FaultyCalls([Fault(Call.ALLOCATE, 1, Effect.ERROR, 28)])
        with pytest.raises(ShelfError):
            nvme_user(tmp_path / "cache", calls=failing)
        if round_number == 1:
            before = threads_and_descriptors()  # a worker that is on its way out may count as well
    end = time.monotonic() + 60
    while not no_more_than(before) and time.monotonic() < end:
        time.sleep(0.001)
    assert no_more_than(before), (threads_and_descriptors(), before)
