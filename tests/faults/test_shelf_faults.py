"""Everything that can go wrong below a shelf is a miss: never a wrong row, never an exception, never a long wait."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cache_directory import layout_name
from kvtier.errors import ShelfError
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls, seeded_faults
from kvtier.shelf import ReadItem, ShelfDone, ShelfLimits, ShelfOutcome, WriteItem
from kvtier.tiers.slab import SLAB_NAME, SUPERBLOCK_BYTES
from tests.rows import IO, LAYOUT, SLOT_BYTES, ShelfUser, aligned, block_hashes, filled, nvme_user

HASHES = block_hashes(50)
LIMITS = ShelfLimits(in_flight_max=8, failures_max=3, pause_s=5.0, late_s=5.0)
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[ShelfUser, FaultyCalls]]:
    """A healthy shelf over a seam, with 20 rows."""
    calls = FaultyCalls()
    user = nvme_user(tmp_path / "cache", calls=calls, limits=LIMITS)
    user.write(HASHES[:20])
    assert user.hits(HASHES[:20]) == 20
    yield user, calls
    calls.inject([])
    calls.release()
    user.shelf.close(10.0)


def later(calls: FaultyCalls, call: Call, effect: Effect, value: float = 0, sticky: bool = True) -> None:
    """From the next call of this kind on."""
    calls.inject([Fault(call, calls.count(call) + 1, effect, value, sticky)])


def outcomes(done: list[ShelfDone | None]) -> list[ShelfOutcome | None]:
    return [None if end is None else end.outcome for end in done]


class SlabFile:
    """Raw access to the slots of a closed or open slab."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / layout_name(LAYOUT) / SLAB_NAME

    def slot(self, slot: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(SUPERBLOCK_BYTES + slot * SLOT_BYTES)
            return file.read(SLOT_BYTES)

    def put(self, slot: int, data: bytes, offset: int = 0) -> None:
        with open(self.path, "r+b") as file:
            file.seek(SUPERBLOCK_BYTES + slot * SLOT_BYTES + offset)
            file.write(data)


Damage = Callable[[SlabFile, int, int, bytes, random.Random], None]


def flip(slab: SlabFile, slot: int, _: int, __: bytes, chance: random.Random) -> None:
    place = chance.randrange(SLOT_BYTES)
    slab.put(slot, bytes([slab.slot(slot)[place] ^ (1 << chance.randrange(8))]), place)


def zero(slab: SlabFile, slot: int, _: int, __: bytes, chance: random.Random) -> None:
    page = chance.randrange(SLOT_BYTES // 4096)
    slab.put(slot, bytes(4096), page * 4096)


def swap(slab: SlabFile, slot: int, other: int, _: bytes, __: random.Random) -> None:
    mine, theirs = slab.slot(slot), slab.slot(other)
    slab.put(slot, theirs)
    slab.put(other, mine)


def tear(slab: SlabFile, slot: int, other: int, _: bytes, chance: random.Random) -> None:
    pages = chance.randrange(1, SLOT_BYTES // 4096)
    slab.put(slot, slab.slot(other)[pages * 4096 :], pages * 4096)


def misdirect(slab: SlabFile, slot: int, other: int, _: bytes, __: random.Random) -> None:
    slab.put(slot, slab.slot(other))


def stale(slab: SlabFile, slot: int, _: int, before: bytes, __: random.Random) -> None:
    slab.put(slot, before)


@pytest.mark.parametrize("damage", [flip, zero, swap, tear, misdirect, stale], ids=lambda damage: damage.__name__)
def test_every_damaged_row_is_a_counted_miss_and_the_others_stay(tmp_path: Path, damage: Damage) -> None:
    chance = random.Random(damage.__name__)
    user = nvme_user(tmp_path / "cache")
    user.write(block_hashes(50, seed=99))
    slab = SlabFile(tmp_path / "cache")
    before = {slot: slab.slot(slot) for slot in range(user.shelf.slot_count)}
    for record in [record for block_hash in block_hashes(50, 99) for record in user.shelf.find([block_hash])]:
        user.shelf.drop([record], "evicted")
    user.write(HASHES)
    records = [record for block_hash in HASHES for record in user.shelf.find([block_hash])]
    bad = set()
    for number in range(0, 40, 2):
        record, other = records[number], records[number + 1]
        damage(slab, record.slot, other.slot, before[record.slot], chance)
        bad |= {record.block_hash, other.block_hash} if damage is swap else {record.block_hash}
    done = user.read(records)
    for record, end in zip(records, outcomes(done), strict=True):
        assert end is (ShelfOutcome.BAD_ROW if record.block_hash in bad else ShelfOutcome.DONE)
    assert user.shelf.stats()["bad_row"] == len(bad) >= 20
    assert user.hits(HASHES) == 50 - len(bad), "dropped, not tried again"
    user.write(sorted(bad))
    assert user.hits(HASHES) == 50, "and can be written anew"
    user.shelf.check()
    user.shelf.close(10.0)


def test_a_rebuild_believes_no_header_in_the_wrong_place(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    slab = SlabFile(tmp_path / "cache")
    user.write(HASHES[:20])
    old = {record.slot: slab.slot(record.slot) for record in user.shelf.find(HASHES[:20])}
    user.shelf.drop(user.shelf.find(HASHES[:20]), "evicted")
    user.write(HASHES[20:])
    records = [record for block_hash in HASHES[20:] for record in user.shelf.find([block_hash])]
    user.shelf.close(10.0)
    misdirected = [record for record in records if record.slot not in old][:5]
    for record, slot in zip(misdirected, old, strict=False):
        slab.put(record.slot, old[slot])
    (tmp_path / "cache" / layout_name(LAYOUT) / "journal").unlink()
    again = nvme_user(tmp_path / "cache")
    again.shelf.check()
    assert len(misdirected) == 5 and again.hits(HASHES[20:]) == 25 and again.hits(HASHES[:20]) == 0
    assert again.shelf.stats()["bad_row"] == 0
    again.shelf.close(10.0)


def test_a_truncated_slab_gives_short_reads_and_opens_whole_again(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:20])
    records = user.shelf.find(HASHES[:20])
    path = SlabFile(tmp_path / "cache").path
    os.truncate(path, SUPERBLOCK_BYTES + 10 * SLOT_BYTES + 4096)
    done = outcomes(user.read(records))
    assert sorted(done.count(outcome) for outcome in (ShelfOutcome.DONE, ShelfOutcome.SHORT_READ)) == [10, 10]
    assert user.shelf.stats()["short_read"] == 10
    user.shelf.close(10.0)
    again = nvme_user(tmp_path / "cache")
    assert again.hits(HASHES[:20]) == 10
    again.write(HASHES[20:40])
    assert again.hits(HASHES[:40]) == 30
    again.shelf.close(10.0)


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "sticky"])
@pytest.mark.parametrize(
    ("effect", "value"),
    [
        (Effect.ERROR, errno.EIO),
        (Effect.ERROR, errno.ENOSPC),
        (Effect.ERROR, errno.EROFS),
        (Effect.ERROR, errno.EINTR),
        (Effect.SHORT, 4096),
        (Effect.SHORT, 0),
    ],
    ids=["EIO", "ENOSPC", "EROFS", "EINTR", "short", "nothing"],
)
def test_a_fault_at_any_io_is_survived_and_over_once_it_is_gone(
    tmp_path: Path, effect: Effect, value: int, sticky: bool
) -> None:
    for call, nths in ((Call.READ, range(1, 9)), (Call.WRITE, range(2, 10)), (Call.SYNC, range(2, 3))):
        for nth in nths:
            calls = FaultyCalls([Fault(call, nth, effect, value, sticky)])
            path = tmp_path / f"{call.value}{nth}"
            try:
                user = nvme_user(path, 300_000, calls, LIMITS)
            except ShelfError:
                continue  # refused at the start, with a text; that is for the store to retry
            user.write(HASHES[:6])
            user.hits(HASHES[:6])
            user.write(HASHES[6:8])
            user.shelf.check()
            calls.inject([])
            user.now += LIMITS.pause_s + 1
            user.write(HASHES[8:9])
            user.hits(HASHES[8:9])
            user.write(HASHES[:8])
            assert user.hits(HASHES[:9]) == 9, (call, nth)
            user.shelf.check()
            user.shelf.close(10.0)


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_cost_rows_and_never_truth(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    calls = FaultyCalls(seeded_faults(seed, 60, 300))
    journal_calls = FaultyCalls(seeded_faults(seed + 1000, 10, 40))
    limits = ShelfLimits(in_flight_max=8, pause_s=1.0)
    user: ShelfUser | None = None
    hits = 0
    for _ in range(40):
        if user is None:
            try:
                user = nvme_user(tmp_path / "cache", 400_000, calls, limits, journal_calls=journal_calls)
            except ShelfError:
                continue
        user.now += chance.random()
        picked = chance.sample(HASHES, 5)
        if chance.random() < 0.5:
            user.write(picked)
        else:
            hits += user.hits(picked)
        user.shelf.check()
        if chance.random() < 0.1:
            user.shelf.close(10.0)
            user = None
    assert hits > 10
    if user is not None:
        user.shelf.close(10.0)


def test_io_errors_leave_the_record_open_the_breaker_and_a_probe_closes_it(
    faulty: tuple[ShelfUser, FaultyCalls], caplog: pytest.LogCaptureFixture
) -> None:
    user, calls = faulty
    later(calls, Call.READ, Effect.ERROR, errno.EIO)
    records = user.shelf.find(HASHES[:20])
    assert set(outcomes(user.read(records[:3]))) == {ShelfOutcome.IO_ERROR}
    assert outcomes(user.read(records)) == [None] * 20, "the breaker is open"
    reads = calls.count(Call.READ)
    user.now += 5
    user.shelf.poll(user.now)
    assert outcomes(user.read(records[:3])) == [ShelfOutcome.IO_ERROR, None, None], "one probe"
    assert calls.count(Call.READ) == reads + 1
    calls.inject([])
    user.now += 5
    user.shelf.poll(user.now)
    assert user.hits(HASHES[:1]) == 1
    assert user.hits(HASHES[:20]) == 20, "no record was lost"
    assert user.shelf.stats()["io_error"] == 4 and user.shelf.stats()["breaker_openings"] == 1
    assert len([entry for entry in caplog.records if "no more reads for now: EIO" in entry.message]) == 1


def test_reads_go_on_while_a_full_disk_takes_no_writes(faulty: tuple[ShelfUser, FaultyCalls]) -> None:
    user, calls = faulty
    later(calls, Call.WRITE, Effect.ERROR, errno.ENOSPC)
    assert outcomes(user.write(HASHES[20:21])) == [ShelfOutcome.NO_SPACE]
    assert outcomes(user.write(HASHES[20:25])) == [None] * 5
    assert user.hits(HASHES[:20]) == 20 and user.shelf.used_count == 20, "the reservation was given back"
    calls.inject([])
    user.now += 30
    assert outcomes(user.write(HASHES[20:21])) == [ShelfOutcome.DONE]
    assert outcomes(user.write(HASHES[21:25])) == [ShelfOutcome.DONE] * 4


def until_called(calls: FaultyCalls, call: Call, count: int) -> None:
    """Wait until this many calls have begun: each worker is stuck in one then."""
    end = time.monotonic() + 20
    while calls.count(call) < count:
        assert time.monotonic() < end, calls.count(call)
        time.sleep(0.001)


def test_hung_writes_block_no_read_and_open_the_breaker_and_keep_their_slots(
    faulty: tuple[ShelfUser, FaultyCalls],
) -> None:
    user, calls = faulty
    begun = calls.count(Call.WRITE)
    later(calls, Call.WRITE, Effect.HANG)
    tickets = user.shelf.write([WriteItem(h, 0, filled(h)) for h in HASHES[20:24]], user.now)
    assert None not in tickets
    until_called(calls, Call.WRITE, begun + IO.writers)
    user.shelf.poll(user.now)
    assert user.hits(HASHES[:20]) == 20
    user.now += 6
    assert user.shelf.poll(user.now) == []
    assert user.shelf.stats()["late"] == 4 and user.shelf.stats()["breaker_openings"] == 1
    assert user.write(HASHES[30:31]) == [None] and user.hits(HASHES[:20]) == 20
    assert user.shelf.used_count == 20 + IO.writers, "those that had not started gave their slots back"
    calls.release()
    ended = outcomes(user.finish(tickets))
    assert ended == [ShelfOutcome.DONE] * IO.writers + [ShelfOutcome.REFUSED] * (4 - IO.writers)
    assert user.hits(HASHES[:24]) == 20 + IO.writers
    assert outcomes(user.write(HASHES[30:31])) == [ShelfOutcome.DONE]


def test_hung_reads_are_noticed_and_those_behind_them_refused(faulty: tuple[ShelfUser, FaultyCalls]) -> None:
    user, calls = faulty
    begun = calls.count(Call.READ)
    later(calls, Call.READ, Effect.HANG)
    records = user.shelf.find(HASHES[:20])
    targets = [aligned(LAYOUT.row_bytes) for _ in records]
    tickets = user.shelf.read([ReadItem(*pair) for pair in zip(records, targets, strict=True)])
    until_called(calls, Call.READ, begun + IO.readers)
    user.shelf.poll(user.now)
    user.now += 6
    refused = [*user.shelf.poll(user.now), *user.shelf.poll(user.now)]
    assert [done.outcome for done in refused] == [ShelfOutcome.REFUSED] * (20 - IO.readers)
    assert user.shelf.in_flight == IO.readers
    assert user.shelf.read([ReadItem(records[0], targets[0])]) == [None]
    calls.release()
    assert outcomes(user.finish(tickets[: IO.readers])) == [ShelfOutcome.DONE] * IO.readers
    assert user.hits(HASHES[:20]) == 20, "a late success closes the breaker"


def test_closing_over_a_hung_disk_ends_at_the_deadline_and_the_rows_are_there_later(tmp_path: Path) -> None:
    calls = FaultyCalls()
    user = nvme_user(tmp_path / "cache", calls=calls, limits=LIMITS)
    user.write(HASHES[:20])
    later(calls, Call.WRITE, Effect.HANG)
    user.shelf.write([WriteItem(HASHES[30], 0, filled(HASHES[30]))], user.now)
    started = time.monotonic()
    user.shelf.close(0.5)
    assert time.monotonic() - started < 5
    with pytest.raises(ShelfError, match="in use"):
        nvme_user(tmp_path / "cache")
    calls.release()


def test_a_killed_process_leaves_a_warm_shelf_without_a_wrong_row(tmp_path: Path) -> None:
    chance = random.Random(7)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = found = 0
    for seed in range(6):
        command = [sys.executable, str(Path(__file__).parent / "killed_writer.py"), str(tmp_path / "cache"), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(chance.randint(5, 60))]
            writer.kill()
            lines += writer.stdout.readlines()
        assert lines[0].strip(), "the writer must have written"
        hashes = block_hashes(10_000, seed)
        published = [hashes[int(line)] for line in lines if line.endswith("\n")][-40:]
        started = time.monotonic()
        user = nvme_user(tmp_path / "cache", wait_s=10.0)
        assert time.monotonic() - started < 2
        told += len(published)
        found += user.hits(published)
        assert user.shelf.stats()["bad_row"] == 0
        user.shelf.check()
        user.shelf.close(10.0)
    assert told > 50 and found >= 0.95 * told, (found, told)


def test_the_journal_broken_anyhow_costs_warmth_at_most(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:20])
    user.shelf.close(10.0)
    path = tmp_path / "cache" / layout_name(LAYOUT) / "journal"
    whole = path.read_bytes()
    chance = random.Random(8)
    for _ in range(30):
        broken = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(broken[: chance.choice([len(broken), chance.randrange(len(broken))])]))
        user = nvme_user(tmp_path / "cache")
        hits = user.hits(HASHES[:20])
        assert user.shelf.stats()["bad_row"] == 0
        user.write(HASHES[:20])
        assert user.hits(HASHES[:20]) == 20 >= hits
        user.shelf.close(10.0)
        whole = path.read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "none", str(path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_refused_with_sums_and_used_once_there_is_room(small_disk: Path) -> None:
    with open(small_disk / "hog", "wb") as hog:
        hog.write(bytes(1_500_000))
    cache = small_disk / "cache"
    with pytest.raises(ShelfError, match=r"tiers\.nvme\.bytes: the slab needs \d+ more bytes .* \d+ .* are free"):
        nvme_user(cache)
    assert [path.name for path in (cache / layout_name(LAYOUT)).iterdir()] == []
    (small_disk / "hog").unlink()
    user = nvme_user(cache)
    user.write(HASHES[:20])
    assert user.hits(HASHES[:20]) == 20
    user.shelf.close(10.0)
