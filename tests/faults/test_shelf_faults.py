"""Everything that can go wrong below a shelf is a miss: never a wrong row, never an exception, never a long wait."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cache_directory import layout_name
from kvtier.errors import ShelfError
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls, seeded_faults
from kvtier.shelf import ReadItem, ShelfDone, ShelfLimits, ShelfOutcome, WriteItem
from kvtier.tiers.superblock import SUPERBLOCK_BYTES
from tests.own_time import own_time
from tests.rows import IO, LAYOUT, NVME_BYTES, SLOT_BYTES, ShelfUser, aligned, block_hashes, filled, nvme_user
from tests.soak.damage import SlabFile

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
    user.shelf.close(60.0)


def later(calls: FaultyCalls, call: Call, effect: Effect, value: float = 0, sticky: bool = True) -> None:
    """From the next call of this kind on."""
    calls.inject([Fault(call, calls.count(call) + 1, effect, value, sticky)])


def outcomes(done: list[ShelfDone | None]) -> list[ShelfOutcome | None]:
    return [None if end is None else end.outcome for end in done]


def test_a_rebuild_believes_no_header_in_the_wrong_place(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    slab = SlabFile(tmp_path / "cache")
    user.write(HASHES[:20])
    old = {record.slot: slab.slot(record.slot) for record in user.shelf.find(HASHES[:20])}
    user.shelf.drop(user.shelf.find(HASHES[:20]), "evicted")
    user.write(HASHES[20:])
    records = [record for block_hash in HASHES[20:] for record in user.shelf.find([block_hash])]
    user.shelf.close(60.0)
    misdirected = [record for record in records if record.slot not in old][:5]
    for record, slot in zip(misdirected, old, strict=False):
        slab.put(record.slot, old[slot])
    (tmp_path / "cache" / layout_name(LAYOUT) / "journal").unlink()
    again = nvme_user(tmp_path / "cache")
    again.shelf.check()
    assert len(misdirected) == 5 and again.hits(HASHES[20:]) == 25 and again.hits(HASHES[:20]) == 0
    assert again.shelf.stats()["bad_row"] == 0
    again.shelf.close(60.0)


def test_a_truncated_slab_gives_short_reads_and_opens_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.file_watch.WATCH_S", 600.0)  # of a shelf whose loss is noticed nothing is read
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:20])
    records = user.shelf.find(HASHES[:20])
    path = SlabFile(tmp_path / "cache").path
    os.truncate(path, SUPERBLOCK_BYTES + 10 * SLOT_BYTES + 4096)
    done = outcomes(user.read(records))
    assert sorted(done.count(outcome) for outcome in (ShelfOutcome.DONE, ShelfOutcome.SHORT_READ)) == [10, 10]
    assert user.shelf.stats()["short_read"] == 10
    user.shelf.close(60.0)
    again = nvme_user(tmp_path / "cache")
    assert again.hits(HASHES[:20]) == 10
    again.write(HASHES[20:40])
    assert again.hits(HASHES[:40]) == 30
    again.shelf.close(60.0)


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
            user.shelf.close(60.0)
            user = None
    assert hits > 10
    if user is not None:
        user.shelf.close(60.0)


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
    end = time.monotonic() + 60
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
    with own_time() as clock:
        user.shelf.close(0.5)
        assert clock.seconds < 5
    with pytest.raises(ShelfError, match="in use"):
        nvme_user(tmp_path / "cache")
    calls.release()


HUNG = """
import sys
import time
from pathlib import Path
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.shelf import ReadItem, WriteItem
from tests.rows import LAYOUT, aligned, block_hashes, filled, nvme_user, wait_for_journal

calls, journal_calls = FaultyCalls(), FaultyCalls()
user = nvme_user(Path(sys.argv[1]), calls=calls, journal_calls=journal_calls)
hashes = block_hashes(24)
user.write(hashes[:20])
wait_for_journal(Path(sys.argv[1]), hashes[:20])
for seam, kinds in ((calls, (Call.READ, Call.WRITE)), (journal_calls, (Call.WRITE, Call.SYNC))):
    seam.inject([Fault(kind, seam.count(kind) + 1, Effect.HANG, sticky=True) for kind in kinds])
reads, writes = calls.count(Call.READ), calls.count(Call.WRITE)
user.shelf.read([ReadItem(record, aligned(LAYOUT.row_bytes)) for record in user.shelf.find(hashes)])
user.shelf.write([WriteItem(block_hash, 0, filled(block_hash)) for block_hash in hashes[20:]], user.now)
while calls.count(Call.READ) == reads or calls.count(Call.WRITE) == writes:
    time.sleep(0.001)
print("hung", flush=True)
sys.stdin.readline()
user.shelf.close(1.0)
"""


def test_a_process_with_reads_writes_and_journal_hung_ends_within_five_seconds_and_is_warm_next(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HUNG, str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "hung\n"
        with own_time() as clock:
            process.stdin.close()
            assert process.wait(60) == 0 and clock.seconds < 5
    user = nvme_user(tmp_path / "cache", wait_s=60.0)
    assert user.hits(HASHES[:20]) == 20
    user.shelf.close(60.0)


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
        started = time.process_time()
        user = nvme_user(tmp_path / "cache", wait_s=60.0)
        assert time.process_time() - started < 2
        told += len(published)
        found += user.hits(published)
        assert user.shelf.stats()["bad_row"] == 0
        user.shelf.check()
        user.shelf.close(60.0)
    assert told > 50 and found >= 0.95 * told, (found, told)


def test_the_journal_broken_anyhow_costs_warmth_at_most(tmp_path: Path) -> None:
    user = nvme_user(tmp_path / "cache")
    user.write(HASHES[:20])
    user.shelf.close(60.0)
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
        user.shelf.close(60.0)
        whole = path.read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "none", str(path)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_refused_with_sums_and_used_once_there_is_room(small_disk: Path) -> None:
    with open(small_disk / "hog", "wb") as hog:
        hog.write(bytes(3_500_000))
    cache = small_disk / "cache"
    with pytest.raises(
        ShelfError, match=r"tiers\.nvme\.bytes: the slab needs [\d.]+ .iB more on its disk, [\d.]+ .iB are free"
    ):
        nvme_user(cache)
    assert [path.name for path in (cache / layout_name(LAYOUT)).iterdir()] == []
    (small_disk / "hog").unlink()
    user = nvme_user(cache)
    user.write(HASHES[:20])
    assert user.hits(HASHES[:20]) == 20
    user.shelf.close(60.0)


def wait_for_text(caplog: pytest.LogCaptureFixture, text: str) -> None:
    end = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < end, text
        time.sleep(0.01)


def test_a_journal_that_finds_its_disk_full_goes_on_once_others_have_freed_space(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user = nvme_user(small_disk / "cache")
    with open(small_disk / "hog", "wb", buffering=0) as hog, contextlib.suppress(OSError):
        while True:
            hog.write(bytes(4096))
    for start in range(0, 50, 10):  # the slab has its bytes, so rows go on
        assert outcomes(user.write(HASHES[start : start + 10])) == [ShelfOutcome.DONE] * 10
    wait_for_text(caplog, "journal cannot be written")
    assert user.hits(HASHES) == 50
    (small_disk / "hog").unlink()
    wait_for_text(caplog, "journal is written again")
    shutil.copytree(small_disk / "cache", small_disk / "copy")  # as a kill would leave it
    user.shelf.close(60.0)
    for cache in ("copy", "cache"):
        again = nvme_user(small_disk / cache, budget_bytes=NVME_BYTES)
        assert again.hits(HASHES) == 50, cache
        again.shelf.close(60.0)
        shutil.rmtree(small_disk / cache)
