"""The I/O contract, run against every engine there is, and the seam of faults below it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.io.base import (
    INTERRUPTS_MAX,
    IoEngine,
    IoRequest,
    IoResult,
    KernelCalls,
    Operation,
    SystemCalls,
    uninterrupted,
    write_all,
)
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls, FaultyRing, seeded_faults
from kvtier.io.threads import ThreadsEngine
from kvtier.io.unsynced import UnsyncedCalls
from kvtier.io.uring import UringEngine
from tests.rows import Bell, aligned, need_uring

PAGE = 4096

MakeEngine = Callable[[int, int, Callable[[], None], SystemCalls], IoEngine]


class Bench:
    """A file of 16 distinct pages, an engine with a fault seam, and a way to wait for results."""

    def __init__(self, path: Path, make: MakeEngine) -> None:
        self.make = make
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(self.descriptor, b"".join(bytes([number]) * PAGE for number in range(1, 17)), 0)
        self.calls = FaultyCalls()
        self.bell = Bell()
        self.engine = make(2, 8, self.bell, self.calls)

    def request(self, operation: Operation, page: int, buffers: list[memoryview], tag: int = 0) -> IoRequest:
        return IoRequest(operation, self.descriptor, page * PAGE, tuple(buffers), tag)

    def results(self, count: int) -> dict[int, IoResult]:
        found: dict[int, IoResult] = {}
        end = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < end, "no result"
            found |= {result.tag: result for result in self.engine.poll()}
            if len(found) < count:
                self.bell.wait(0.05)
        return found

    def run(self, request: IoRequest) -> IoResult:
        assert self.engine.submit([request]) == 1
        return self.results(1)[request.tag]


def make_threads(at_once: int, queue_max: int, wake: Callable[[], None], calls: SystemCalls) -> IoEngine:
    return ThreadsEngine(at_once, at_once, queue_max, wake, calls)


def make_uring(at_once: int, queue_max: int, wake: Callable[[], None], calls: SystemCalls) -> IoEngine:
    return UringEngine(calls, at_once, at_once, queue_max, wake)


@pytest.fixture(params=[make_threads, make_uring], ids=["threads", "uring"])
def make(request: pytest.FixtureRequest) -> MakeEngine:
    """Makes an engine with so many calls at once for reads and for writes."""
    if request.param is make_uring:
        need_uring()
    chosen: MakeEngine = request.param
    return chosen


@pytest.fixture
def bench(tmp_path: Path, make: MakeEngine) -> Iterator[Bench]:
    made = Bench(tmp_path / "file", make)
    yield made
    made.calls.release()
    assert made.engine.close(60.0) == 0
    os.close(made.descriptor)


def test_reads_and_writes_move_the_right_bytes_through_several_buffers(bench: Bench) -> None:
    first, second = aligned(PAGE), aligned(2 * PAGE)
    result = bench.run(bench.request(Operation.READ, 3, [first, second]))
    assert (result.moved_bytes, result.error_number) == (3 * PAGE, None) and result.duration_ns > 0
    assert bytes(first) == b"\4" * PAGE and bytes(second) == b"\5" * PAGE + b"\6" * PAGE
    result = bench.run(bench.request(Operation.WRITE, 1, [second, first]))
    assert (result.moved_bytes, result.error_number) == (3 * PAGE, None)
    assert os.pread(bench.descriptor, 3 * PAGE, PAGE) == b"\5" * PAGE + b"\6" * PAGE + b"\4" * PAGE


def test_prepare_runs_before_and_then_after_the_bytes_move(bench: Bench) -> None:
    page = aligned(PAGE)

    def fill() -> None:
        page[:] = b"\xaa" * PAGE

    bench.run(IoRequest(Operation.WRITE, bench.descriptor, 0, (page,), 1, prepare=fill))
    assert os.pread(bench.descriptor, PAGE, 0) == b"\xaa" * PAGE
    page[:] = bytes(PAGE)
    result = bench.run(IoRequest(Operation.READ, bench.descriptor, 0, (page,), 1, then=lambda: bytes(page[:2])))
    assert result.value == b"\xaa\xaa"


def test_a_read_past_the_end_is_short_without_an_error_and_without_then(bench: Bench) -> None:
    result = bench.run(IoRequest(Operation.READ, bench.descriptor, 15 * PAGE, (aligned(3 * PAGE),), 1, then=lambda: 1))
    assert (result.moved_bytes, result.error_number, result.value) == (PAGE, None, None)


def test_what_then_raises_comes_out_of_poll(bench: Bench) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    bench.engine.submit([IoRequest(Operation.READ, bench.descriptor, 0, (aligned(PAGE),), 1, then=fail)])
    with pytest.raises(ZeroDivisionError):
        bench.results(1)
    assert bench.engine.in_flight == 0


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_short_and_interrupted_calls_are_continued_on_aligned_boundaries(bench: Bench, operation: Operation) -> None:
    call = Call(operation.value)
    bench.calls.inject(
        [
            Fault(call, 1, Effect.SHORT, PAGE + 700),
            Fault(call, 2, Effect.ERROR, errno.EINTR),
            Fault(call, 3, Effect.SHORT, 2 * PAGE),
        ]
    )
    buffers = [aligned(PAGE), aligned(4 * PAGE)]
    buffers[1][:] = b"\x77" * (4 * PAGE)
    result = bench.run(bench.request(operation, 0, buffers))
    assert (result.moved_bytes, result.error_number, bench.calls.count(call)) == (5 * PAGE, None, 4)
    assert os.pread(bench.descriptor, 5 * PAGE, 0) == bytes(buffers[0]) + bytes(buffers[1])
    if operation is Operation.READ:
        assert bytes(buffers[1]) == b"".join(bytes([number]) * PAGE for number in (2, 3, 4, 5))


def test_a_call_that_stopped_off_a_page_is_continued_from_its_start(bench: Bench) -> None:
    class Watching(FaultyCalls):
        def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            note(offset, buffers)
            return super().preadv(descriptor, buffers, offset)

        def ring(self, depth: int, slice_bytes: int) -> FaultyRing:
            return WatchingRing(self, KernelCalls().ring(depth, slice_bytes), depth)

    class WatchingRing(FaultyRing):
        def push(self, requests: list[IoRequest]) -> None:
            for request in requests:
                note(request.offset, request.buffers)
            super().push(requests)

    def note(offset: int, buffers: Sequence[memoryview]) -> None:
        offsets.append(offset)
        assert all(buffer.nbytes % PAGE == 0 for buffer in buffers)

    offsets: list[int] = []
    calls = Watching([Fault(Call.READ, 1, Effect.SHORT, PAGE + 700), Fault(Call.READ, 2, Effect.SHORT, 701)])
    engine = bench.make(1, 1, bench.bell, calls)
    engine.submit([bench.request(Operation.READ, 2, [aligned(4 * PAGE)])])
    assert engine.close(60.0) == 0
    assert [result.moved_bytes for result in engine.poll()] == [4 * PAGE]
    assert offsets == [2 * PAGE, 3 * PAGE, 3 * PAGE], "direct I/O takes no other offset"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_errors_are_results(bench: Bench, code: int) -> None:
    for call, operation in ((Call.READ, Operation.READ), (Call.WRITE, Operation.WRITE), (Call.SYNC, Operation.SYNC)):
        bench.calls.inject([Fault(call, bench.calls.count(call) + 1, Effect.ERROR, code)])
        assert bench.run(bench.request(operation, 0, [aligned(PAGE)])).error_number == code
        assert bench.run(bench.request(operation, 0, [aligned(PAGE)])).error_number is None


def test_endless_interruptions_and_writes_of_nothing_end(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.READ, 1, Effect.ERROR, errno.EINTR, sticky=True)])
    assert bench.run(bench.request(Operation.READ, 0, [aligned(PAGE)])).error_number == errno.EINTR
    assert bench.calls.count(Call.READ) == INTERRUPTS_MAX
    bench.calls.inject([Fault(Call.WRITE, 1, Effect.SHORT, 0, sticky=True)])
    assert bench.run(bench.request(Operation.WRITE, 0, [aligned(PAGE)])).error_number == errno.EIO


def test_hung_writes_never_delay_a_read(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.WRITE, 1, Effect.HANG, sticky=True)])
    writes = [bench.request(Operation.WRITE, number, [aligned(PAGE)], tag=100 + number) for number in range(8)]
    assert bench.engine.submit(writes) == 8
    target = aligned(PAGE)
    for tag in range(20):
        assert bench.run(bench.request(Operation.READ, 9, [target], tag)).moved_bytes == PAGE
    assert bytes(target) == b"\x0a" * PAGE and bench.engine.in_flight == 8
    bench.calls.release()
    assert set(bench.results(8)) == set(range(100, 108))


def test_a_disk_hangs_again_by_another_script(bench: Bench) -> None:
    hang = Fault(Call.READ, 1, Effect.HANG, sticky=True)
    for tag in range(3):
        bench.calls.inject([hang])
        assert bench.engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)], tag)]) == 1
        time.sleep(0.05)
        assert bench.engine.poll() == [] and bench.engine.in_flight == 1
        bench.calls.release()
        bench.calls.inject([])
        assert set(bench.results(1)) == {tag}


def test_queues_are_bounded_and_say_how_much_room_there_is(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.READ, 1, Effect.HANG, sticky=True)])
    reads = [bench.request(Operation.READ, 0, [aligned(PAGE)], tag) for tag in range(10)]
    assert bench.engine.room(Operation.READ) == 8
    assert bench.engine.submit(reads) == 8 and bench.engine.room(Operation.READ) == 0
    assert bench.engine.room(Operation.WRITE) == 8 and bench.engine.in_flight == 8
    bench.calls.release()
    bench.results(8)
    assert bench.engine.room(Operation.READ) == 8 and bench.engine.in_flight == 0


def test_wake_is_called_from_a_worker_when_something_has_ended(bench: Bench) -> None:
    callers: list[int] = []
    engine = bench.make(1, 4, lambda: callers.append(threading.get_ident()), KernelCalls())
    engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)])])
    assert engine.close(60.0) == 0
    assert len(engine.poll()) == 1 and len(callers) == 1 and callers[0] != threading.get_ident()


def test_closing_waits_for_what_runs_and_takes_no_more(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.READ, 1, Effect.DELAY, 0.1)])
    bench.engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)])])
    assert bench.engine.close(60.0) == 0
    assert bench.engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)])]) == 0
    assert bench.engine.room(Operation.READ) == 0 and len(bench.engine.poll()) == 1


def test_closing_on_a_hung_disk_ends_at_the_deadline_and_says_what_is_stuck(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.WRITE, 1, Effect.HANG, sticky=True)])
    bench.engine.submit([bench.request(Operation.WRITE, 0, [aligned(PAGE)], tag) for tag in range(5)])
    started = time.monotonic()
    assert bench.engine.close(0.1) == 2
    assert time.monotonic() - started < 5
    assert bench.engine.poll() == [] and bench.engine.in_flight == 2
    bench.calls.release()
    assert bench.engine.close(60.0) == 0 and len(bench.engine.poll()) == 2


def test_seeded_faults_are_the_same_for_the_same_seed() -> None:
    assert seeded_faults(1, 20, 50) == seeded_faults(1, 20, 50) != seeded_faults(2, 20, 50)


def test_faults_strike_once_or_stick() -> None:
    once, sticky = Fault(Call.READ, 2, Effect.DELAY), Fault(Call.READ, 2, Effect.DELAY, sticky=True)
    assert [once.strikes(Call.READ, number) for number in (1, 2, 3)] == [False, True, False]
    assert [sticky.strikes(Call.READ, number) for number in (1, 2, 3)] == [False, True, True]
    assert not once.strikes(Call.WRITE, 2)


def test_cancelling_ends_what_has_not_started_and_nothing_else(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.WRITE, 1, Effect.HANG, sticky=True)])
    requests = [bench.request(Operation.WRITE, 0, [aligned(PAGE)], tag) for tag in range(5)]
    assert bench.engine.submit(requests) == 5
    end = time.monotonic() + 60
    while bench.calls.count(Call.WRITE) < 2:
        assert time.monotonic() < end
    bench.engine.cancel(Operation.READ)
    assert bench.engine.poll() == []
    bench.engine.cancel(Operation.WRITE)
    cancelled = bench.results(3)
    assert [result.error_number for result in cancelled.values()] == [errno.ECANCELED] * 3
    assert bench.engine.in_flight == 2
    bench.calls.release()
    assert {*cancelled, *bench.results(2)} == set(range(5))


def test_what_prepare_raises_comes_out_of_poll(bench: Bench) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    bench.engine.submit([IoRequest(Operation.WRITE, bench.descriptor, 0, (aligned(PAGE),), 1, prepare=fail)])
    with pytest.raises(ZeroDivisionError):
        bench.results(1)
    assert bench.engine.in_flight == 0 and os.pread(bench.descriptor, 1, 0) == b"\1"


def test_many_more_requests_than_the_kernel_gets_at_once_all_move_the_right_bytes(bench: Bench) -> None:
    engine = bench.make(3, 400, bench.bell, KernelCalls())
    targets = [aligned(PAGE) for _ in range(400)]
    requests = [
        IoRequest(Operation.READ, bench.descriptor, number % 16 * PAGE, (target,), number)
        for number, target in enumerate(targets)
    ]
    assert engine.submit(requests) == 400
    assert engine.close(60.0) == 0
    results = engine.poll()
    assert sorted(result.tag for result in results) == list(range(400))
    assert all(result.moved_bytes == PAGE and result.error_number is None for result in results)
    assert all(bytes(target) == bytes([number % 16 + 1]) * PAGE for number, target in enumerate(targets))


def test_a_closed_engine_leaves_no_descriptor_and_no_thread(bench: Bench) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        engine = bench.make(2, 8, bench.bell, KernelCalls())
        engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)])])
        assert engine.close(60.0) == 0
    end = time.monotonic() + 60
    while threading.active_count() > threads:
        assert time.monotonic() < end
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "fewer: another test's engine has only now come to its end"


def test_errors_of_the_kernel_come_back_with_their_number(bench: Bench) -> None:
    write_only = os.open(f"/proc/self/fd/{bench.descriptor}", os.O_WRONLY)
    result = bench.run(IoRequest(Operation.READ, write_only, 0, (aligned(PAGE),), 3))
    assert (result.moved_bytes, result.error_number) == (0, errno.EBADF)
    os.close(write_only)


# ---- what was not synced ---------------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A file of four pages 'a' to 'd'."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(letter * PAGE for letter in (b"a", b"b", b"c", b"d")))
    descriptor = os.open(path, os.O_RDWR)
    yield path, descriptor
    os.close(descriptor)


def test_a_power_cut_takes_back_what_was_written_since_the_last_sync(pages: tuple[Path, int]) -> None:
    path, descriptor = pages
    calls = UnsyncedCalls()
    calls.pwritev(descriptor, [memoryview(b"1" * PAGE)], 0)
    calls.fdatasync(descriptor)
    calls.pwritev(descriptor, [memoryview(b"2" * (2 * PAGE))], 0)
    calls.pwritev(descriptor, [memoryview(b"3" * (2 * PAGE))], 3 * PAGE)
    page = bytearray(PAGE)
    assert calls.preadv(descriptor, [memoryview(page)], 0) == PAGE and bytes(page) == b"2" * PAGE
    assert calls.cut() == 4
    assert path.read_bytes() == b"1" * PAGE + b"b" * PAGE + b"c" * PAGE + b"d" * PAGE
    for call in (lambda: calls.pwritev(descriptor, [memoryview(page)], 0), lambda: calls.fdatasync(descriptor)):
        with pytest.raises(OSError, match="power"):
            call()


def test_a_power_cut_may_keep_any_page_in_any_state_since_the_last_sync(pages: tuple[Path, int]) -> None:
    path, descriptor = pages
    before, seen = path.read_bytes(), set()
    for seed in range(40):
        os.pwrite(descriptor, before, 0)
        calls = UnsyncedCalls()
        calls.pwritev(descriptor, [memoryview(b"1" * (2 * PAGE))], 0)
        calls.pwritev(descriptor, [memoryview(b"2" * PAGE)], 0)
        calls.cut(seed)
        seen.add(path.read_bytes()[: 2 * PAGE : PAGE])
    assert seen == {first + second for first in (b"a", b"1", b"2") for second in (b"b", b"1")}


def test_a_disk_that_lies_about_its_syncs_loses_all(pages: tuple[Path, int]) -> None:
    path, descriptor = pages
    before = path.read_bytes()
    calls = UnsyncedCalls(syncs=False)
    calls.pwritev(descriptor, [memoryview(b"1" * PAGE)], 0)
    calls.fdatasync(descriptor)
    calls.cut()
    assert path.read_bytes() == before


DOOMED = """
import os, sys
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.io.unsynced import UnsyncedCalls
from kvtier.io.uring import UringEngine
descriptor = os.open(sys.argv[1], os.O_RDWR)
calls = FaultyCalls([Fault(Call.WRITE, 3, Effect(sys.argv[2]))], UnsyncedCalls())
calls.pwritev(descriptor, [memoryview(b"0" * 4096)], 0)
calls.fdatasync(descriptor)
calls.pwritev(descriptor, [memoryview(b"1" * 4096)], 4096)
calls.pwritev(descriptor, [memoryview(b"2" * 4096)], 8192)
"""


@pytest.mark.parametrize(("effect", "left"), [(Effect.KILL, [b"01cd"]), (Effect.DROP_UNSYNCED, [b"01cd", b"0bcd"])])
def test_a_process_dies_at_the_call_that_the_script_says(
    pages: tuple[Path, int], effect: Effect, left: list[bytes]
) -> None:
    path, _ = pages
    child = subprocess.run([sys.executable, "-c", DOOMED, str(path), effect.value])
    assert child.returncode == -signal.SIGKILL
    assert path.read_bytes()[::PAGE] in left


def test_interrupted_calls_are_made_again_and_not_for_ever() -> None:
    faults = [Fault(Call.SYNC, nth, Effect.ERROR, errno.EINTR) for nth in range(1, INTERRUPTS_MAX)]
    descriptor = os.memfd_create("synced")
    calls = FaultyCalls(faults)
    uninterrupted(calls.fdatasync, descriptor)
    assert calls.count(Call.SYNC) == INTERRUPTS_MAX
    calls.inject([Fault(Call.SYNC, 1, Effect.ERROR, errno.EINTR, sticky=True)])
    with pytest.raises(InterruptedError):
        uninterrupted(calls.fdatasync, descriptor)
    os.close(descriptor)


def test_a_whole_write_goes_on_after_short_and_interrupted_calls() -> None:
    descriptor = os.memfd_create("written")
    script = [Fault(Call.WRITE, 1, Effect.SHORT, 100), Fault(Call.WRITE, 2, Effect.ERROR, errno.EINTR)]
    calls = FaultyCalls(script)
    write_all(calls, descriptor, memoryview(bytes(range(256)) * 4), 8)
    assert os.pread(descriptor, 2000, 8) == bytes(range(256)) * 4 and calls.count(Call.WRITE) == 3
    calls.inject([Fault(Call.WRITE, 1, Effect.SHORT, 0, sticky=True)])
    with pytest.raises(OSError, match="Input/output error"):
        write_all(calls, descriptor, memoryview(b"more"), 0)
    os.close(descriptor)


def test_workers_that_could_not_be_started_are_started_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: MakeEngine
) -> None:
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", _no_more_threads)
    engine = make(1, 8, lambda: None, KernelCalls())
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    request = IoRequest(Operation.WRITE, descriptor, 0, (aligned(PAGE),), 7)
    assert engine.room(Operation.WRITE) == engine.room(Operation.READ) == 0 and engine.submit([request]) == 0
    monkeypatch.setattr(threading.Thread, "start", start)
    assert engine.room(Operation.WRITE) == 8 and engine.submit([request]) == 1
    assert engine.close(60.0) == 0 and [result.tag for result in engine.poll()] == [7]
    os.close(descriptor)


def _no_more_threads(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
