"""The journal: replays what was appended, cuts a torn end, tells damage, stays bounded, never makes anyone wait."""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.io.base import SystemCalls
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.journal import SPARE_NAME, Journal
from kvtier.record import Grant, Record, tenant_digest
from kvtier.replay import HOURS_MAX, JOURNAL_NAME, JOURNAL_VERSION, SEARCH_PASSES, JournalShape, ReplayState, replay
from kvtier.write_budget import HOUR_S, WriteBudget
from tests.own_time import own_time
from tests.rows import block_hashes

SHAPE = JournalShape(b"e" * 16, slot_count=12, slice_count=3)
HASHES = block_hashes(12)


class Disk:
    """A folder with a slab stand-in to sync, and journals in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.slab = os.open(path / "slab", os.O_RDWR | os.O_CREAT, 0o600)

    @property
    def file(self) -> Path:
        return self.path / JOURNAL_NAME

    def journal(
        self, records: list[Record] | None = None, generation: int = 0, calls: SystemCalls | None = None
    ) -> Journal:
        return Journal(self.folder, SHAPE, self.slab, records or [], generation, calls, retry_s=0.01)

    def kept(self) -> list[Record]:
        found = replay(self.folder, SHAPE)
        assert found.state is ReplayState.WHOLE
        return sorted(found.records, key=lambda record: record.slot)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    os.close(made.slab)
    os.close(made.folder)


def record(slot: int, generation: int) -> Record:
    sums = bytes([slot]) * 24
    return Record(HASHES[slot], slot, generation, slot, sums, -slot, 5, tenant_digest("someone" if slot % 2 else ""))


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def wait_until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_was_published_and_not_replaced_comes_back_to_the_last_field(disk: Disk) -> None:
    journal = disk.journal([record(0, 1), record(1, 2)], generation=9)
    journal.reserved([Grant(1, 10), Grant(2, 11), Grant(3, 12), Grant(4, 13)])
    journal.published([record(2, 11), record(3, 12)])
    journal.dropped([record(3, 12)])
    assert journal.close(60.0)
    assert disk.kept() == [record(0, 1), record(2, 11)]
    assert replay(disk.folder, SHAPE).generation == 13
    assert stat.S_IMODE(os.stat(disk.file).st_mode) == 0o600


def test_what_a_row_was_raised_to_comes_back_pin_and_all(disk: Disk) -> None:
    journal = disk.journal([record(0, 1)])
    raised = record(0, 1)._replace(priority=50, expiry_s=0, pinned=True)
    journal.retained([raised])
    assert journal.close(60.0) and disk.kept() == [raised]
    assert disk.journal(disk.kept()).close(60.0) and disk.kept() == [raised], "through a rewrite, too"


def test_what_was_spent_comes_back_by_hour_and_is_bounded(disk: Disk) -> None:
    journal = disk.journal()
    for hour in range(100):
        journal.spent({hour: 10 * hour})
        journal.spent({hour: 10 * hour + 1})
    assert journal.close(60.0)
    spent = {hour: 10 * hour + 1 for hour in range(100 - HOURS_MAX, 100)}
    assert replay(disk.folder, SHAPE).spent == spent
    again = Journal(disk.folder, SHAPE, disk.slab, [], 0, spent=spent)
    again.spent({99: 7})
    assert again.close(60.0) and replay(disk.folder, SHAPE).spent == spent | {99: 7}


def test_a_journal_of_an_older_version_is_foreign_and_impossible_numbers_are_damage(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("kvtier.replay.JOURNAL_VERSION", JOURNAL_VERSION - 1)
        assert disk.journal([record(0, 1)]).close(60.0)
    found = replay(disk.folder, SHAPE)
    assert found.state is ReplayState.FOREIGN and found.records == []
    good = record(0, 1)
    for bad in (good._replace(priority=-101), good._replace(expiry_s=1 << 40), good._replace(generation=1 << 62)):
        assert disk.journal([bad]).close(60.0)
        assert replay(disk.folder, SHAPE).state is ReplayState.DAMAGED and replay(disk.folder, SHAPE).records == []
    for hour, spent_bytes in ((1 << 32, 1), (1, 1 << 62)):
        journal = disk.journal()
        journal.spent({hour: spent_bytes})
        assert journal.close(60.0) and replay(disk.folder, SHAPE).state is ReplayState.DAMAGED


@pytest.mark.parametrize("ahead_hours", [4000, -500])
def test_what_was_spent_comes_back_though_the_clock_was_wrong_for_days_and_is_set_right(
    disk: Disk, ahead_hours: int
) -> None:
    journal = disk.journal()
    begun, hours = 1000, 2 * HOURS_MAX
    budget = WriteBudget(1 << 40, 100, begun * HOUR_S, 0.0, {}, journal)
    for hour in range(hours):
        budget.advance((begun + hour + ahead_hours) * HOUR_S, hour * HOUR_S)
        budget.spend([Grant(0, 1 + hour)])
    now_s = (begun + hours) * HOUR_S
    budget.advance(now_s, hours * HOUR_S)
    assert journal.close(10.0)
    spent = replay(disk.folder, SHAPE).spent
    again = WriteBudget(1 << 40, 100, now_s, 0.0, spent)
    assert sum(spent.values()) == again.spent_bytes == budget.spent_bytes == 24 * 100
    rewritten = Journal(disk.folder, SHAPE, disk.slab, [], 0, spent=spent)
    assert rewritten.close(10.0) and replay(disk.folder, SHAPE).spent == spent, "through a rewrite, too"


def test_the_journal_of_a_longer_slab_takes_no_place_beside_its_rewrite(disk: Disk) -> None:
    disk.file.write_bytes(bytes(SHAPE.total_bytes_max + 1))
    (disk.path / SPARE_NAME).write_bytes(bytes(SHAPE.file_bytes_max))
    calls = FaultyCalls([Fault(Call.WRITE, 1, Effect.HANG)])
    journal = disk.journal([record(0, 1)], calls=calls)
    assert size_of(disk.file) + size_of(disk.path / SPARE_NAME) <= SHAPE.total_bytes_max
    calls.release()
    assert journal.close(10.0) and disk.kept() == [record(0, 1)]


def test_a_journal_within_its_bound_is_there_until_its_rewrite_is(disk: Disk) -> None:
    assert disk.journal([record(0, 1)]).close(10.0)
    calls = FaultyCalls([Fault(Call.WRITE, 1, Effect.HANG)])
    journal = disk.journal([record(0, 1)], calls=calls)
    wait_until(lambda: calls.count(Call.WRITE))
    assert disk.kept() == [record(0, 1)]
    calls.release()
    assert journal.close(10.0)


def test_generations_survive_a_rewrite_though_nothing_holds_them(disk: Disk) -> None:
    journal = disk.journal()
    journal.reserved([Grant(1, 70)])
    assert journal.close(60.0)
    assert disk.journal([], replay(disk.folder, SHAPE).generation).close(60.0)
    assert replay(disk.folder, SHAPE).generation == 70 and disk.kept() == []


def test_a_missing_foreign_or_nonsense_journal_is_told_apart(disk: Disk) -> None:
    assert replay(disk.folder, SHAPE).state is ReplayState.MISSING
    assert disk.journal([record(0, 1)], 1).close(60.0)
    for other in (JournalShape(b"x" * 16, 12, 3), JournalShape(SHAPE.epoch, 12, 4)):
        assert replay(disk.folder, other).state is ReplayState.FOREIGN
    whole = disk.file.read_bytes()
    for bad in (b"", b"\0" * 500, random.Random(1).randbytes(500), whole[:20], whole[1:]):
        disk.file.write_bytes(bad)
        assert replay(disk.folder, SHAPE).state is ReplayState.DAMAGED
    with open(disk.file, "wb") as file:
        file.truncate(1 << 30)
    assert replay(disk.folder, SHAPE).state is ReplayState.FOREIGN, "never read into memory"
    disk.file.unlink()
    disk.file.symlink_to(disk.path / "slab")
    assert replay(disk.folder, SHAPE).state is ReplayState.DAMAGED, "not a journal"


def test_slots_beyond_a_smaller_slab_are_left_out(disk: Disk) -> None:
    assert disk.journal([record(0, 1), record(11, 2)], 2).close(60.0)
    assert replay(disk.folder, JournalShape(SHAPE.epoch, 11, 3)).records == [record(0, 1)]


def journal_of_three(disk: Disk) -> tuple[bytes, list[int]]:
    """The file of a journal with three published frames, and where they begin."""
    assert disk.journal([record(0, 1), record(1, 2), record(2, 3)], 3).close(60.0)
    data = disk.file.read_bytes()
    return data, [len(data) - count * SHAPE.published_bytes for count in (3, 2, 1)]


def test_a_torn_end_is_cut_at_every_length(disk: Disk) -> None:
    data, starts = journal_of_three(disk)
    for length in range(starts[0], len(data) + 1):
        disk.file.write_bytes(data[:length])
        found = replay(disk.folder, SHAPE)
        assert found.state is ReplayState.WHOLE and len(found.records) == (length - starts[0]) // SHAPE.published_bytes
    disk.file.write_bytes(data[: starts[2] + 10] + bytes(5000))
    assert len(disk.kept()) == 2, "zeros after a torn end are no damage"


def test_every_flipped_bit_before_the_last_record_is_damage_and_none_is_believed(disk: Disk) -> None:
    data, starts = journal_of_three(disk)
    chance = random.Random(4)
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        disk.file.write_bytes(broken)
        found = replay(disk.folder, SHAPE)
        if place < starts[2]:
            assert found.state in (ReplayState.DAMAGED, ReplayState.FOREIGN) and found.records == []
        else:
            assert found.state is ReplayState.WHOLE and len(found.records) == 2


def test_appends_reach_the_file_at_once_and_the_disk_after_a_second_rows_first(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    class Watching(FaultyCalls):
        def fdatasync(self, descriptor: int) -> None:
            synced.append(descriptor)
            super().fdatasync(descriptor)

    journal = disk.journal(calls=Watching())
    wait_until(lambda: len(synced) == 3)
    journal.published([record(0, 1)])
    wait_until(lambda: len(synced) == 5)
    assert synced[3] == disk.slab != synced[4] and len(disk.kept()) == 1
    monkeypatch.setattr("kvtier.journal.SYNC_S", 1000.0)
    journal.published([record(1, 2)])
    wait_until(lambda: len(disk.kept()) == 2)
    assert len(synced) == 5 and journal.close(60.0)


def test_the_file_stays_within_its_bound_and_true_through_endless_changes(disk: Disk) -> None:
    journal = disk.journal()
    chance = random.Random(5)
    expected: dict[int, Record] = {}
    largest = 0
    for generation in range(1, 4000):
        slot = chance.randrange(12)
        journal.reserved([Grant(slot, generation)])
        expected.pop(slot, None)
        if chance.random() < 0.8:
            expected[slot] = record(slot, generation)
            journal.published([expected[slot]])
        if generation % 8 == 0:
            wait_until(lambda: not journal._pending_bytes)
            largest = max(largest, sum(size_of(disk.path / name) for name in (JOURNAL_NAME, SPARE_NAME)))
    assert journal.close(60.0)
    assert disk.kept() == [expected[slot] for slot in sorted(expected)]
    assert SHAPE.snapshot_bytes_max < largest <= SHAPE.total_bytes_max
    assert not (disk.path / SPARE_NAME).exists()


def test_nobody_waits_for_a_hung_disk_and_nothing_grows_meanwhile(disk: Disk) -> None:
    calls = FaultyCalls([Fault(Call.WRITE, 1, Effect.HANG)])
    journal = disk.journal(calls=calls)
    with own_time() as clock:
        for generation in range(1, 20_000):
            journal.reserved([Grant(generation % 12, generation)])
        journal.published([record(4, 10)])
        assert clock.seconds < 5
    assert journal._pending_bytes <= SHAPE.snapshot_bytes_max
    assert not journal.close(0.05), "it says that it could not finish"
    calls.release()
    assert journal.close(60.0)
    assert disk.kept() == [record(4, 10)] and replay(disk.folder, SHAPE).generation == 19_999


@pytest.mark.parametrize("call", [Call.WRITE, Call.SYNC])
@pytest.mark.parametrize("nth", range(1, 6))
def test_any_failing_call_is_survived_and_the_file_is_true_in_the_end(disk: Disk, call: Call, nth: int) -> None:
    calls = FaultyCalls([Fault(call, nth, Effect.ERROR, errno.ENOSPC), Fault(call, nth + 1, Effect.ERROR, errno.EIO)])
    journal = disk.journal([record(0, 1)], 1, calls=calls)
    for slot in range(1, 6):
        journal.published([record(slot, slot + 1)])
        time.sleep(0.01)
    wait_until(
        lambda: disk.file.exists() and replay(disk.folder, SHAPE).records == [record(n, n + 1) for n in range(6)]
    )
    assert journal.close(60.0) and disk.kept() == [record(slot, slot + 1) for slot in range(6)]


def test_short_writes_are_continued(disk: Disk) -> None:
    calls = FaultyCalls([Fault(Call.WRITE, nth, Effect.SHORT, 33) for nth in range(1, 30)])
    journal = disk.journal([record(0, 1)], 1, calls=calls)
    journal.published([record(1, 2)])
    assert journal.close(60.0) and disk.kept() == [record(0, 1), record(1, 2)]


def test_a_failing_disk_is_logged_once_and_again_when_it_is_back(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    calls = FaultyCalls([Fault(Call.WRITE, 1, Effect.ERROR, errno.ENOSPC, sticky=True)])
    journal = disk.journal(calls=calls)
    wait_until(lambda: calls.count(Call.WRITE) > 3)
    calls.inject([])
    wait_until(disk.file.exists)
    assert journal.close(60.0)
    messages = [entry.message for entry in caplog.records]
    assert len([m for m in messages if "cannot be written" in m]) == len([m for m in messages if "again" in m]) == 1


def test_a_journal_of_nothing_but_marks_is_damage_after_a_few_passes(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk.journal().close(60.0)
    rest = 60000
    frames = b"".join(b"kvtj" + bytes(4) + max(0, rest - at - 20).to_bytes(4, "little") for at in range(0, rest, 12))
    with disk.file.open("ab") as file:
        file.write(frames)
    summed_bytes = 0

    def count(data: memoryview, seed: int) -> int:
        nonlocal summed_bytes
        summed_bytes += len(data)
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr("kvtier.replay.xxh3_64_intdigest", count)
    assert replay(disk.folder, SHAPE).state is ReplayState.DAMAGED
    assert rest < summed_bytes < (SEARCH_PASSES + 2) * disk.file.stat().st_size


def test_what_was_spent_on_another_slab_of_the_folder_still_counts(disk: Disk) -> None:
    spent = {hour: 10 + hour for hour in range(3)}
    assert Journal(disk.folder, SHAPE, disk.slab, [record(1, 2)], 5, spent=spent).close(60.0)
    found = replay(disk.folder, JournalShape(b"f" * 16, 12, 3))
    assert (found.state, found.records, found.generation, found.spent) == (ReplayState.FOREIGN, [], 0, spent)
