"""The I/O contract, run against every engine there is, and the seam of faults below it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.io.base import IoRequest, IoResult, Operation
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls, seeded_faults
from kvtier.io.threads import INTERRUPTS_MAX, ThreadsEngine
from tests.rows import Bell, aligned

PAGE = 4096


class Bench:
    """A file of 16 distinct pages, an engine with a fault seam, and a way to wait for results."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(self.descriptor, b"".join(bytes([number]) * PAGE for number in range(1, 17)), 0)
        self.calls = FaultyCalls()
        self.bell = Bell()
        self.engine = ThreadsEngine(2, 2, 8, self.bell, self.calls)

    def request(self, operation: Operation, page: int, buffers: list[memoryview], tag: int = 0) -> IoRequest:
        return IoRequest(operation, self.descriptor, page * PAGE, tuple(buffers), tag)

    def results(self, count: int) -> dict[int, IoResult]:
        found: dict[int, IoResult] = {}
        end = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < end, "no result"
            found |= {result.tag: result for result in self.engine.poll()}
            if len(found) < count:
                self.bell.wait(0.05)
        return found

    def run(self, request: IoRequest) -> IoResult:
        assert self.engine.submit([request]) == 1
        return self.results(1)[request.tag]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "file")
    yield made
    made.calls.release()
    assert made.engine.close(10.0) == 0
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
            offsets.append(offset)
            assert all(buffer.nbytes % PAGE == 0 for buffer in buffers)
            return super().preadv(descriptor, buffers, offset)

    offsets: list[int] = []
    calls = Watching([Fault(Call.READ, 1, Effect.SHORT, PAGE + 700), Fault(Call.READ, 2, Effect.SHORT, 701)])
    engine = ThreadsEngine(1, 1, 1, bench.bell, calls)
    engine.submit([bench.request(Operation.READ, 2, [aligned(4 * PAGE)])])
    assert engine.close(10.0) == 0
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
    engine = ThreadsEngine(1, 1, 4, lambda: callers.append(threading.get_ident()))
    engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)])])
    assert engine.close(10.0) == 0
    assert len(engine.poll()) == 1 and len(callers) == 1 and callers[0] != threading.get_ident()


def test_closing_waits_for_what_runs_and_takes_no_more(bench: Bench) -> None:
    bench.calls.inject([Fault(Call.READ, 1, Effect.DELAY, 0.1)])
    bench.engine.submit([bench.request(Operation.READ, 0, [aligned(PAGE)])])
    assert bench.engine.close(10.0) == 0
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
    assert bench.engine.close(10.0) == 0 and len(bench.engine.poll()) == 2


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
    end = time.monotonic() + 20
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
