"""The native ring and the engine over it, with io_uring itself; a pipe is the disk that hangs.

What both engines share is in test_io.py. `scripts/sanitize` runs these on sanitized builds of the ring.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.config import environment
from kvtier.io.base import Ended, IoRequest, IoResult, KernelCalls, Operation, Ring
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.io.uring import UringEngine
from kvtier.tiers.checksum import slice_sums
from tests.rows import Bell, Taken, aligned, need_uring

PAGE = 4096
CONTENT = random.Random(5).randbytes(16 * PAGE)
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def uring() -> None:
    need_uring()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file of 16 random pages."""
    (tmp_path / "file").write_bytes(CONTENT)
    descriptor = os.open(tmp_path / "file", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reads of its first end hang until something is written to its second."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_of(descriptor: int, page: int, *buffers: memoryview, tag: int = 1) -> IoRequest:
    return IoRequest(Operation.READ, descriptor, page * PAGE, buffers, tag)


def taken(ring: Ring, count: int) -> tuple[list[IoResult], list[Ended]]:
    """What a ring has to say of so many requests."""
    results, others = list[IoResult](), list[Ended]()
    while len(results) + len(others) < count:
        assert select.select([ring.bell], [], [], WAIT_S)[0], "the bell does not ring"
        os.eventfd_read(ring.bell)
        more = ring.take()
        results += more[0]
        others += more[1]
    return results, others


def close(ring: Ring) -> None:
    while not ring.close():
        os.eventfd_read(ring.bell)


def wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


# ---- the ring --------------------------------------------------------------------------------------------------------


def test_what_has_moved_whole_and_has_no_then_is_a_result_and_the_rest_is_told(file: int) -> None:
    ring = KernelCalls().ring(4, 0)
    row, past = aligned(2 * PAGE), aligned(2 * PAGE)
    asked = [
        read_of(file, 3, aligned(PAGE), row, tag=7),
        read_of(file, 15, past, tag=8),
        read_of(file, 0, aligned(PAGE), tag=9)._replace(then=int),
        IoRequest(Operation.SYNC, file, 0, (), 10),
    ]
    ring.push(asked)
    results, others = taken(ring, 4)
    assert sorted(result.tag for result in results) == [7, 10] and all(type(result) is IoResult for result in results)
    (whole,) = (result for result in results if result.tag == 7)
    assert (whole.moved_bytes, whole.error_number, whole.value) == (3 * PAGE, None, None)
    assert 0 < whole.duration_ns < whole.ended_ns <= time.monotonic_ns()
    assert bytes(row) == CONTENT[4 * PAGE : 6 * PAGE] and bytes(past[:PAGE]) == CONTENT[-PAGE:]
    assert {request.tag: how for request, *how, _, _ in others} == {8: [PAGE, False], 9: [PAGE, True]}
    assert all(request is asked[request.tag - 7] for request, *_ in others)
    assert all(0 < started_ns < ended_ns <= time.monotonic_ns() for *_, started_ns, ended_ns in others)
    close(ring)


def test_what_fails_is_told_with_the_number_of_its_error(file: int) -> None:
    ring = KernelCalls().ring(4, 0)
    read_only = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    ring.push([IoRequest(Operation.WRITE, read_only, 0, (aligned(PAGE),), 3), read_of(-1, 0, aligned(PAGE), tag=4)])
    results, others = taken(ring, 2)
    assert results == [] and {request.tag: result for request, result, *_ in others} == dict.fromkeys(
        (3, 4), -errno.EBADF
    )
    close(ring)
    os.close(read_only)


@pytest.mark.parametrize("slice_bytes", [0, PAGE])
def test_a_read_that_came_whole_leaves_the_sums_of_its_last_buffer_if_they_are_wanted(
    file: int, slice_bytes: int
) -> None:
    ring = KernelCalls().ring(4, slice_bytes)
    whole, short, unwanted = (
        read_of(file, page, aligned(PAGE), aligned(3 * PAGE), tag=tag) for page, tag in ((2, 0), (14, 1), (2, 2))
    )
    whole, short = whole._replace(sums=Taken(), then=int), short._replace(sums=Taken())
    ring.push([whole, short, unwanted])
    taken(ring, 3)
    assert whole.sums is not None and short.sums is not None
    wanted = slice_sums(memoryview(CONTENT)[3 * PAGE : 6 * PAGE], PAGE) if slice_bytes else b""
    assert (whole.sums.taken, short.sums.taken) == (wanted, b"")
    close(ring)


def test_a_request_that_is_none_is_refused_with_all_that_came_with_it(file: int) -> None:
    ring = KernelCalls().ring(4, PAGE)
    sums = Taken()
    good = read_of(file, 0, aligned(PAGE))._replace(sums=sums)
    kept = weakref.ref(sums)
    for bad, error in (
        (good[:5], TypeError),
        (good._replace(operation=3), ValueError),
        (good._replace(buffers=(memoryview(bytes(PAGE)),)), BufferError),
        (good._replace(buffers=(aligned(PAGE)[:100],)), ValueError),
        (good._replace(buffers=()), ValueError),
        (good._replace(offset=-1), Exception),
    ):
        with pytest.raises(error):
            ring.push([good, bad])  # type: ignore[list-item]
    ring.push([good._replace(sums=None)])
    assert [result.tag for result in taken(ring, 1)[0]] == [1]
    del good, bad, sums
    gc.collect()
    assert kept() is None
    close(ring)


def hanging(ring: Ring, file: int, pipe: tuple[int, int]) -> tuple[memoryview, weakref.ref[object]]:
    """Lets a read hang in the kernel; its target, and whether anybody has its request still."""
    target, sums = aligned(PAGE), Taken()
    ring.push([read_of(pipe[0], 0, target, tag=100)._replace(sums=sums), read_of(file, 0, aligned(PAGE), tag=101)])
    assert taken(ring, 1)[0][0].tag == 101, "the kernel got both"
    return target, weakref.ref(sums)


def test_what_the_kernel_has_not_got_is_taken_back_and_the_rest_is_waited_for(file: int, pipe: tuple[int, int]) -> None:
    ring = KernelCalls().ring(2, 0)
    target, kept = hanging(ring, file, pipe)
    sums = Taken()
    waits = weakref.ref(sums)
    ring.push([read_of(pipe[0], 0, aligned(PAGE), tag=1)])
    ring.push([read_of(pipe[0], 0, aligned(PAGE), tag=tag)._replace(sums=sums) for tag in (2, 3)])
    del sums
    gc.collect()
    assert waits() is not None
    tags = ring.cancel()
    assert tags in ([1, 2, 3], [2, 3]) and waits() is None, "the kernel may have got the first, but no more"
    assert ring.cancel() == [] and not ring.close() and not ring.close()
    with pytest.raises(RuntimeError, match="closed"):
        ring.push([read_of(file, 0, aligned(PAGE))])
    gc.collect()
    assert kept() is not None
    os.write(pipe[1], b"late" * (PAGE // 2))
    close(ring)
    assert {result.tag for result in ring.take()[0]} == {100, 1} - set(tags)
    assert bytes(target) == b"late" * (PAGE // 4) and kept() is None


def test_a_ring_that_is_dropped_leaves_what_it_was_given_to_the_kernel(file: int, pipe: tuple[int, int]) -> None:
    ring = KernelCalls().ring(2, 0)
    target, kept = hanging(ring, file, pipe)
    sums = Taken()
    waits = weakref.ref(sums)
    ring.push([read_of(pipe[0], 0, aligned(PAGE))])
    ring.push([read_of(file, 0, aligned(PAGE), tag=tag)._replace(sums=sums) for tag in range(2, 50)])
    del ring, sums
    gc.collect()
    assert waits() is None and kept() is not None
    os.write(pipe[1], b"late" * (PAGE // 2))
    wait_until(lambda: bytes(target) == b"late" * (PAGE // 4))


def test_while_much_waits_the_bell_is_held_back_for_more_to_end(pipe: tuple[int, int]) -> None:
    ring, count = KernelCalls().ring(1, 0), 12
    ring.push([read_of(pipe[0], 0, aligned(PAGE), tag=tag) for tag in range(count)])
    for ended_count in range(1, count + 1):
        os.write(pipe[1], bytes(PAGE))
        [result], _ = taken(ring, 1)
        waiting_count = count - ended_count - 2  # the kernel has another, and may have had this one when it rang
        held_ns = time.monotonic_ns() - result.ended_ns
        assert result.tag == ended_count - 1 and (waiting_count <= 2 or held_ns >= 10_000_000)
    close(ring)


def test_what_ended_before_the_disk_hung_is_told_whatever_waits(file: int, pipe: tuple[int, int]) -> None:
    ring = KernelCalls().ring(1, 0)
    hangs = read_of(pipe[0], 0, aligned(PAGE), tag=2)
    ring.push([read_of(file, 0, aligned(PAGE), tag=1), hangs, *[hangs._replace(tag=tag) for tag in range(3, 20)]])
    assert [result.tag for result in taken(ring, 1)[0]] == [1]
    assert len(ring.cancel()) == 17
    os.write(pipe[1], b"late" * (PAGE // 4))
    assert [result.tag for result in taken(ring, 1)[0]] == [2]
    close(ring)


def test_the_end_of_a_ring_rings_its_bell_though_nobody_has_taken_what_ended(file: int) -> None:
    ring = KernelCalls().ring(1, 0)
    ring.push([read_of(file, 0, aligned(PAGE))])
    os.eventfd_read(ring.bell)
    assert not ring.close()
    assert select.select([ring.bell], [], [], WAIT_S)[0], "the bell does not ring"
    assert ring.close() and [result.tag for result in ring.take()[0]] == [1]


def test_many_threads_push_at_once_and_each_request_ends_once_with_its_bytes(file: int) -> None:
    ring = KernelCalls().ring(3, PAGE)
    targets = [aligned(2 * PAGE) for _ in range(400)]
    sums = [Taken() for _ in targets]

    def push(first: int) -> None:
        for start in range(first, first + 50, 10):
            ring.push(
                [
                    read_of(file, tag % 15, targets[tag], tag=tag)._replace(sums=sums[tag])
                    for tag in range(start, start + 10)
                ]
            )

    threads = [threading.Thread(target=push, args=(first,)) for first in range(0, 400, 50)]
    for thread in threads:
        thread.start()
    results, others = taken(ring, 400)
    for thread in threads:
        thread.join()
    assert sorted(result.tag for result in results) == list(range(400)) and others == []
    for tag, (target, one) in enumerate(zip(targets, sums, strict=True)):
        page = tag % 15
        assert bytes(target) == CONTENT[page * PAGE : (page + 2) * PAGE]
        assert one.taken == slice_sums(target, PAGE)
    close(ring)


# ---- the engine over two rings ---------------------------------------------------------------------------------------


class Rows:
    """An engine that sums pages, and one request after another for a header page and a row of three."""

    def __init__(self, file: int, faults: list[Fault] | None = None) -> None:
        self.file = file
        self.bell = Bell()
        self.calls = FaultyCalls(faults or [])
        self.engine = UringEngine(self.calls, 2, 2, 8, self.bell, PAGE)
        self.row = aligned(3 * PAGE)

    def run(self, operation: Operation, sums: Taken, note: Callable[[], object]) -> IoResult:
        prepare, then = (None, note) if operation is Operation.READ else (note, None)
        buffers = (aligned(PAGE), self.row)
        assert self.engine.submit([IoRequest(operation, self.file, 0, buffers, 1, prepare, then, sums)]) == 1
        return self.result()

    def result(self) -> IoResult:
        end = time.monotonic() + WAIT_S
        while not (results := self.engine.poll()):
            assert time.monotonic() < end, "no result"
            self.bell.wait(0.05)
        return results[0]


@pytest.mark.parametrize(
    ("faults", "summed"),
    [
        ([], True),
        ([Fault(Call.READ, 1, Effect.SHORT, 3 * PAGE)], False),
        ([Fault(Call.READ, 1, Effect.ERROR, errno.EINTR), Fault(Call.READ, 2, Effect.SHORT, PAGE + 7)], False),
        ([Fault(Call.READ, 1, Effect.ERROR, errno.EAGAIN)], False),
    ],
    ids=["whole", "short", "interrupted", "again"],
)
def test_a_row_comes_whole_whatever_its_pieces_and_its_sums_with_it_only_if_there_was_one(
    file: int, faults: list[Fault], summed: bool
) -> None:
    rows, sums = Rows(file, faults), Taken()
    result = rows.run(Operation.READ, sums, lambda: bytes(rows.row))
    assert (result.moved_bytes, result.error_number, result.value) == (4 * PAGE, None, CONTENT[PAGE : 4 * PAGE])
    assert sums.taken == (slice_sums(rows.row, PAGE) if summed else b"")
    assert rows.calls.count(Call.READ) == 1 + len(faults)
    assert rows.engine.close(60.0) == 0 and rows.engine.poll() == []


def test_a_row_is_summed_before_it_is_written_unless_its_sums_are_known(file: int) -> None:
    rows, seen = Rows(file), list[bytes]()
    rows.row[:] = CONTENT[: 3 * PAGE]
    for known in (b"", b"known"):
        sums = Taken()
        sums.taken = known
        assert rows.run(Operation.WRITE, sums, lambda sums=sums: seen.append(sums.taken)).moved_bytes == 4 * PAGE
    assert seen == [slice_sums(rows.row, PAGE), b"known"]
    assert os.pread(file, 3 * PAGE, PAGE) == CONTENT[: 3 * PAGE]
    assert rows.engine.close(60.0) == 0


def test_an_engine_holds_nothing_of_a_request_whose_result_was_polled(file: int) -> None:
    rows = Rows(file, [Fault(Call.READ, 2, Effect.SHORT, PAGE), Fault(Call.READ, 4, Effect.ERROR, errno.EIO)])
    for operation in (Operation.READ, Operation.READ, Operation.READ, Operation.WRITE):
        sums = Taken()
        held = weakref.ref(sums)
        rows.run(operation, sums, int)
        del sums
        wait_until(lambda held=held: held() is None)
    assert rows.engine.close(60.0) == 0


def test_a_closing_engine_tells_what_hangs_in_the_kernel_and_gives_its_result_when_it_ends(
    file: int, pipe: tuple[int, int]
) -> None:
    rows, target = Rows(file), aligned(PAGE)
    rows.engine.submit([read_of(pipe[0], 0, target, tag=1), read_of(file, 5, aligned(PAGE), tag=2)])
    assert rows.result().tag == 2
    assert rows.engine.close(0.0) == 1 and rows.engine.in_flight == 1
    assert rows.engine.submit([read_of(file, 0, aligned(PAGE))]) == 0
    os.write(pipe[1], b"late" * (PAGE // 4))
    assert rows.engine.close(60.0) == 0
    assert rows.result().tag == 1 and bytes(target) == b"late" * (PAGE // 4) and rows.engine.in_flight == 0


def test_where_the_second_ring_is_not_to_be_had_nothing_is_left_of_the_first() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    calls = FaultyCalls([Fault(Call.SETUP, 2, Effect.ERROR, errno.ENOMEM)])
    with pytest.raises(OSError, match="injected"):
        UringEngine(calls, 2, 2, 8, Bell())
    gc.collect()
    assert threading.active_count() <= threads
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_one_submission_goes_to_both_rings_up_to_the_first_that_has_no_room(file: int) -> None:
    rows = Rows(file)
    reads = [read_of(file, tag, aligned(PAGE), tag=tag) for tag in range(9)]
    syncs = [IoRequest(Operation.SYNC, file, 0, (), tag) for tag in range(9, 11)]
    rows.calls.inject([Fault(Call.READ, 1, Effect.HANG, sticky=True)])
    assert rows.engine.submit([syncs[0], *reads, syncs[1]]) == 9
    assert (rows.engine.room(Operation.READ), rows.engine.in_flight) == (0, 8 + 1)
    rows.calls.release()
    assert rows.engine.close(60.0) == 0
    assert sorted(result.tag for result in rows.engine.poll()) == [*range(8), 9]


FORKED = """
import os, sys, threading
from kvtier.io.base import IoRequest, KernelCalls, Operation
from kvtier.io.uring import UringEngine
descriptor = os.open(sys.argv[1], os.O_RDONLY)
ended = threading.Event()
engine = UringEngine(KernelCalls(), 4, 4, 8, ended.set)
rings = [number for number in range(100) if os.path.exists(f"/proc/self/fd/{number}")]
rings = [number for number in rings if "anon_inode" in os.readlink(f"/proc/self/fd/{number}")]
assert len(rings) == 6, rings
page = memoryview(bytearray(4096))
read = IoRequest(Operation.READ, descriptor, 0, (page,), 1)
child = os.fork()
if child == 0:
    left = [number for number in rings if os.path.exists(f"/proc/self/fd/{number}")]
    taken = engine.submit([read])
    os._exit(1 if left or taken or engine.room(Operation.READ) or engine.close(1.0) else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert engine.submit([read]) == 1 and ended.wait(60)
assert engine.poll()[0].moved_bytes == 4096 and engine.close(60.0) == 0
"""


def test_a_forked_child_has_no_ring_and_the_parents_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * PAGE)
    plain = {name: value for name, value in environment().items() if name != "LD_PRELOAD"}  # no sanitizer of Python
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "file")], check=True, timeout=60, env=plain)


def test_a_child_may_ask_an_engine_of_its_parent_for_anything_and_gets_nothing(file: int) -> None:
    rows = Rows(file)
    read = read_of(file, 5, aligned(PAGE))
    child = os.fork()
    if child == 0:
        try:
            taken = rows.engine.submit([read]) + rows.engine.room(Operation.READ) + rows.engine.close(1.0)
            rows.engine.cancel(Operation.READ)
            os._exit(len(rows.engine.poll()) + taken)
        finally:
            os._exit(255)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rows.engine.submit([read]) == 1 and rows.result().moved_bytes == PAGE
    assert bytes(read.buffers[0]) == CONTENT[5 * PAGE : 6 * PAGE] and rows.engine.close(60.0) == 0


def test_what_an_engine_dropped_while_it_moves_bytes_was_given_stays_until_they_have_moved(tmp_path: Path) -> None:
    calls = FaultyCalls([Fault(Call.READ, 1, Effect.HANG)])
    (tmp_path / "file").write_bytes(b"x" * PAGE)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    rung = threading.Event()
    target = aligned(PAGE)
    engine = UringEngine(calls, 1, 1, 1, rung.set)
    engine.submit([IoRequest(Operation.READ, descriptor, 0, (target,), 1)])
    assert engine.close(0.0) == 1
    del engine
    calls.release()
    assert rung.wait(60) and bytes(target) == b"x" * PAGE
    os.close(descriptor)
