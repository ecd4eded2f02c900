"""Engines on one cache directory, and everything that can happen to them and their keeper: never a wrong row."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import Nursery, Worker
from tests.own_time import own_time
from tests.rows import block_hashes, wait_for_journal
from tests.soak import footprint
from tests.stopped import stopped

BOTH = ("dram", "nvme")
GROWTH_BYTES_MAX = 1 << 20
"""20 KiB for each engine that was killed; a line to one takes more, and so do the books of what it has held."""
Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """What all workers of this file are forked from."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def start(tmp_path: Path, nursery: Nursery) -> Iterator[Start]:
    """Starts workers on one cache directory; all are closed in the end, and the keeper has left by then."""
    workers: list[Worker] = []

    def start_one(*arguments: Any, opened: bool = True, linger_s: float = 2.0, **more: Any) -> Worker:
        workers.append(nursery.engine(tmp_path / "cache", *arguments, linger_s=linger_s, **more))
        if opened:
            assert workers[-1]("open", 60, 2) == list(BOTH)
        return workers[-1]

    yield start_one
    for worker in workers:
        worker.close()


def kill_keeper(worker: Worker) -> None:
    """SIGKILL the keeper that a worker knows."""
    os.kill(worker("keeper"), signal.SIGKILL)


def test_what_one_engine_wrote_another_reads_and_back(start: Start) -> None:
    a, b = start(), start()
    for tier in BOTH:
        assert a("write", tier, 1, 0, 20, 60) == 20
        assert b("known", tier, 1, 0, 20, 60) == 20 and b("hits", tier, 1, 0, 20) == 20
        assert b("write", tier, 2, 0, 10, 60) == 10
        assert a("known", tier, 2, 0, 10, 60) == 10 and a("hits", tier, 2, 0, 10) == 10
        assert b("write", tier, 1, 0, 20, 5) == 0, "nothing is written twice"
    a("check"), b("check")
    assert a("owner") != b("owner")


def test_both_tiers_are_warm_for_an_engine_that_comes_after_the_last_has_gone(start: Start) -> None:
    a = start(linger_s=600.0)
    for tier in BOTH:
        assert a("write", tier, 1, 0, 20, 60) == 20
    a.close()
    b = start()
    assert [b("hits", tier, 1, 0, 20) for tier in BOTH] == [20, 20]
    kill_keeper(b)


def test_nvme_is_warm_after_the_keeper_has_left(start: Start) -> None:
    a = start(linger_s=0.2)
    assert a("write", "nvme", 1, 0, 20, 60) == 20
    a("settled", "nvme", 0.5)  # the keeper has seen its first engine, so that the linger counts
    keeper = a("keeper")
    a.close()
    wait_for_end(keeper)
    b = start()
    assert b("hits", "nvme", 1, 0, 20) == 20 and b("hits", "dram", 1, 0, 20) == 0


def wait_for_end(process: int, timeout_s: float = 60.0) -> None:
    """Until a process that is not our child is gone."""
    end = time.monotonic() + timeout_s
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < end, "a process does not end"
        time.sleep(0.02)


def test_a_killed_keeper_is_replaced_and_both_tiers_are_warm(start: Start) -> None:
    a, b = start(), start()
    for tier in BOTH:
        assert a("write", tier, 1, 0, 20, 60) == 20
    before = a("keeper")
    kill_keeper(a)
    assert a("joined", 60, before) and b("joined", 60, before)
    assert a("keeper") == b("keeper") != before
    c = start()
    for tier in BOTH:
        assert [worker("hits", tier, 1, 0, 20) for worker in (a, b, c)] == [20, 20, 20]
        assert b("write", tier, 2, 0, 10, 60) == 10 and c("known", tier, 2, 0, 10, 60) == 10
        assert a("known", tier, 2, 0, 10, 60) == a("hits", tier, 2, 0, 10) == c("hits", tier, 2, 0, 10) == 10
    a("check"), b("check"), c("check")


def test_reads_and_begun_writes_outlive_a_keeper_that_is_killed_meanwhile(start: Start) -> None:
    a, b = start(faulty=True, answer_s=60.0), start()  # the next keeper may be slow to start
    for tier in BOTH:
        assert a("write", tier, 1, 0, 20, 60) == 20 and b("known", tier, 1, 0, 20, 60) == 20
    for tier in BOTH:
        a("hang", "write")
        begun = a("begin", tier, 3, 0, 1)
        assert begun == 1
        before = a("keeper")
        kill_keeper(a)
        assert b("hits", tier, 1, 0, 20) == 20, "reading needs no keeper"
        a("hang", "")
        assert a("known", tier, 3, 0, 1, 60) == 1 and a("hits", tier, 3, 0, 1) == 1, "published to the new keeper"
        assert b("known", tier, 3, 0, 1, 60) == 1 and b("hits", tier, 3, 0, 1) == 1
        assert a("joined", 60, before) and b("joined", 60, before)
    a("check"), b("check")


def test_a_stopped_keeper_is_missed_by_nobody_and_goes_on(start: Start) -> None:
    a, b = start(), start()
    assert a("write", "dram", 1, 0, 20, 60) == 20 and b("known", "dram", 1, 0, 20, 60) == 20
    keeper = a("keeper")
    with stopped(keeper):
        with own_time() as clock:
            assert b("hits", "dram", 1, 0, 20) == 20
            assert clock.seconds < 4, "an answer is waited for"
        b.start("ask", "dram", 5, 1)
        ends = a("outcomes", "dram", 2, 0, 8)
        assert set(ends) <= {"unanswered", None} and "unanswered" in ends
        assert b.answer() == 0, "who asks for rows is refused in time"
    assert a("write", "dram", 3, 0, 10, 60) == 10 and b("known", "dram", 3, 0, 10, 60) == 10
    assert b("hits", "dram", 3, 0, 10) == 10 and a("keeper") == keeper
    assert b("ask", "dram", 5, 5, 60) == 5 and b("write_into", "dram", 4, 0, 3) == 3
    b("give", "dram"), b("release", "dram")
    a("check"), b("check")


def test_a_killed_engine_gives_its_reservations_rows_and_leases_back(start: Start) -> None:
    a, b = start(12, 12 * 16384 + 100_000), start()
    assert b("write", "dram", 1, 0, 6, 60) == 6 and a("known", "dram", 1, 0, 6, 60) == 6
    assert a("lease", "dram", 1, 0, 3) == 3 and a("reserve", "dram", 1) == 1
    assert a("ask", "dram", 3, 3, 60) == 3 and a("write_into", "dram", 4, 0, 1) == 1 and a("leased", "dram") == 4
    assert b("write", "dram", 2, 0, 1, 60) == 1, "nobody else waits"
    b("write", "dram", 2, 1, 11, 1)
    assert b("hits", "dram", 1, 0, 3) == 3, "leased rows stay"
    a.kill()
    assert b("write", "dram", 3, 0, 9, 60) >= 9 and b("hits", "dram", 3, 0, 9) == 9, "all but b's stock of 3"
    assert b("write", "dram", 5, 0, 3, 60) == 3 and b("hits", "dram", 1, 0, 3) == 0, (
        "those of the dead were the coldest"
    )
    b("check")


def test_slots_of_a_dead_engine_are_kept_from_others_until_its_last_io_has_landed(start: Start) -> None:
    a, b = start(12, 12 * 16384 + 100_000), start()
    assert a("reserve", "nvme", 2) == 2 and b("reserve", "nvme", 1) == 1
    orphan = take_descriptor(a.pid, a("slab", "nvme"))  # the same open file, as I/O in the kernel would hold it
    held = steady(b, "nvme")
    a.kill()
    try:
        assert b("settled", "nvme", 1) == held > 3, "a dead engine's I/O may still land in its slots"
    finally:
        os.close(orphan)
    assert b("used", "nvme", held - 2, 60) <= held - 2
    b("check")


def test_fifty_killed_engines_leave_nothing_in_their_keeper(start: Start) -> None:
    """After some that fill its shelves and books; each leaves with rows reserved, asked for and leased."""
    stays = start(48, 48 * 17408 + 64_000)
    keeper, taken = stays("keeper"), []
    for number in range(20 + 50):
        victim = start()
        for tier in BOTH:
            assert victim("write", tier, number, 0, 6, 60) >= 1
        assert victim("ask", "dram", 2, 2, 60) == 2 and victim("lease", "dram", number, 0, 4) > 0
        victim.kill()
        if number in (19, 69):
            stays("used", "dram", 48 - 8, 60)
            time.sleep(2.5)  # two ticks of the keeper, which looks for the dead once a second
            taken.append((footprint.descriptor_count(keeper), footprint.own_bytes(keeper)))
    (before, before_bytes), (after, after_bytes) = taken
    assert stays("keeper") == keeper and after == before, taken
    assert after_bytes - before_bytes < GROWTH_BYTES_MAX, taken


def steady(worker: Worker, tier: str) -> int:
    """Slots in use by all engines, once nobody tells of others any more."""
    used: list[int] = []
    while len(used) < 3 or len(set(used[-3:])) > 1:
        used.append(worker("settled", tier, 0.5))
    return used[-1]


def take_descriptor(process: int, number: int) -> int:
    """A descriptor of another process, the same open file: pidfd_open and pidfd_getfd."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(process)
    try:
        descriptor = libc.syscall(438, pidfd, number, 0)
        if descriptor < 0:
            pytest.skip(f"pidfd_getfd is refused here: {os.strerror(ctypes.get_errno())}")
        return int(descriptor)
    finally:
        os.close(pidfd)


def test_leases_and_asked_rows_outlive_the_keeper_and_guard_their_rows_under_the_next(start: Start) -> None:
    a, b = start(8), start()
    assert a("write", "dram", 1, 0, 2, 60) == 2 and a("lease", "dram", 1, 0, 2) == 2
    assert a("ask", "dram", 2, 2, 60) == 2
    before = a("keeper")
    kill_keeper(a)
    assert a("joined", 60, before) and b("joined", 60, before)
    assert b("write", "dram", 2, 0, 1, 60) == 1
    b("write", "dram", 2, 1, 19, 1)
    assert a("write_into", "dram", 1, 2, 2) == 2, "rows that were asked of the last keeper are there for the next"
    assert b("write", "dram", 4, 0, 1, 60) == 1
    b("write", "dram", 4, 1, 19, 1)
    assert a("leased", "dram") == 4 == a("hits", "dram", 1, 0, 4)
    a("release", "dram")
    assert b("write", "dram", 3, 0, 5, 60) >= 5 and b("hits", "dram", 3, 0, 5) == 5


def test_two_first_engines_at_once_have_one_keeper(start: Start) -> None:
    workers = [start(opened=False) for _ in range(3)]
    for worker in workers:
        worker.start("open", 60, 2)
    assert [worker.answer() for worker in workers] == [list(BOTH)] * 3
    assert len({worker("keeper") for worker in workers}) == 1
    assert workers[0]("write", "dram", 1, 0, 9, 60) == 9 and workers[2]("known", "dram", 1, 0, 9, 60) == 9
    assert workers[2]("hits", "dram", 1, 0, 9) == 9


def test_a_forked_child_holds_nothing_of_its_parents(start: Start) -> None:
    a, b = start(12), start()
    assert a("reserve", "dram", 4) == 4
    child = a("fork")
    try:
        assert "kvtier-dram" not in Path(f"/proc/{child}/maps").read_text(), "it would keep the memory"
        a.kill()
        assert b("write", "dram", 1, 0, 9, 60) >= 9 and b("hits", "dram", 1, 0, 9) == 9, "its slots are free"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_cache_directory_removed_underneath_is_left_for_a_new_one(start: Start, tmp_path: Path) -> None:
    a = start()
    assert a("write", "nvme", 1, 0, 10, 60) == 10
    keeper = a("keeper")
    shutil.rmtree(tmp_path / "cache")
    wait_for_end(keeper)
    assert a("lost", 60) and a("hits", "nvme", 1, 0, 10) == 0 and a("outcomes", "dram", 2, 0, 2) == [None, None]
    a("check")
    b = start()
    assert b("write", "nvme", 1, 0, 10, 60) == 10 and b("hits", "nvme", 1, 0, 10) == 10


def test_a_keeper_does_not_wait_for_a_survivor_that_is_stopped_and_it_comes_back_by_itself(start: Start) -> None:
    a = start()
    for tier in BOTH:
        assert a("write", tier, 1, 0, 20, 60) == 20
    keeper = a("keeper")
    with stopped(a.pid):
        os.kill(keeper, signal.SIGKILL)
        b = start(opened=False)
        assert b("open", 60, 1) == ["nvme"], "no DRAM while there is one that may still come"
        assert b("hits", "nvme", 1, 0, 20) == 20
        assert b("outcomes", "nvme", 2, 0, 2) == [None, None], "nobody knows what the survivor is writing to"
    assert a("lost", 60) and a("anew", 60, 2) == b("anew", 60, 2) == sorted(BOTH)
    for tier in BOTH:
        assert a("write", tier, 3, 0, 10, 60) == 10
        assert b("known", tier, 3, 0, 10, 60) == 10 and b("hits", tier, 3, 0, 10) == 10
    a("check"), b("check")


def test_files_are_private_whatever_the_umask(start: Start, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        a = start()
    finally:
        os.umask(before)
    assert a("write", "nvme", 1, 0, 5, 60) == 5
    for folder, folders, files in os.walk(tmp_path / "cache"):
        for name in folders:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o700
        for name in files:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600, name
    assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700
    assert (tmp_path / "cache" / "keeper.sock").is_socket()


def test_nvme_is_warm_after_everybody_was_killed_at_once(start: Start, tmp_path: Path) -> None:
    published, slowest_s = 0, 0.0
    for cycle in range(5):
        workers = [start(16, 400 * 16384) for _ in range(2)]
        begun = time.monotonic()
        assert workers[0]("hits", "nvme", 1, 0, published) >= 0.95 * published
        slowest_s = max(slowest_s, time.monotonic() - begun)
        assert workers[cycle % 2]("write", "nvme", 1, published, 20, 60) == 20
        published += 20
        wait_for_journal(tmp_path / "cache", block_hashes(published, 1))
        workers[0].start("write", "nvme", 100 + cycle, 0, 8, 0.3)
        os.kill(workers[1]("keeper"), signal.SIGKILL)
        for worker in workers:
            worker.kill()
    last = start(16, 400 * 16384)
    assert last("hits", "nvme", 1, 0, published) >= 0.95 * published == 95
    assert last("stats", "nvme")["bad_row"] == 0
    last("check")
