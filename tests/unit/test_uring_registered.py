"""Memory that is registered with a ring: the same bytes move and the same is said of them, whatever the kernel grants.

`scripts/sanitize` runs these on sanitized builds of the ring. Memory of several pieces: test_uring_pieces.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from kvtier.config import environment
from kvtier.io.base import IoRequest, IoResult, KernelCalls, Operation
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.io.uring import UringEngine
from kvtier.tiers.checksum import slice_sums
from tests.rows import Bell, Taken, aligned, need_registered_memory
from tests.unit.test_uring import CONTENT, PAGE, WAIT_S, close, file, read_of, taken, wait_until

try:
    from kvtier._native import Ring
except ImportError:
    pytest.skip("kvtier._native was not built", allow_module_level=True)

__all__ = ["file"]


@pytest.fixture(autouse=True)
def uring() -> None:
    need_registered_memory()


def native_ring(depth: int = 4, slice_bytes: int = 0) -> Ring:
    ring = KernelCalls().ring(depth, slice_bytes)
    assert isinstance(ring, Ring)
    return ring


def memory_of(pages: int) -> memoryview:
    """Shared memory as a DRAM shelf has it, of random bytes."""
    descriptor = os.memfd_create("registered")
    os.ftruncate(descriptor, pages * PAGE)
    memory = memoryview(mmap.mmap(descriptor, pages * PAGE))
    os.close(descriptor)
    memory[:] = random.Random(pages).randbytes(pages * PAGE)
    return memory


def pages_of(memory: memoryview, first: int, count: int) -> memoryview:
    return memory[first * PAGE : (first + count) * PAGE]


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def ended(ring: Ring, count: int) -> dict[int, int]:
    """Of so many requests what moved, or minus the number of the error, by tag."""
    results, others = taken(ring, count)
    said = {result.tag: result.moved_bytes for result in results}
    return said | {request.tag: moved for request, moved, *_ in others}


@pytest.mark.parametrize("header_too", [False, True], ids=["row", "header-too"])
def test_a_row_in_registered_memory_is_written_and_read_with_its_header_page(file: int, header_too: bool) -> None:
    ring, memory, header = native_ring(slice_bytes=PAGE), memory_of(16), aligned(PAGE)
    header[:] = b"h" * PAGE
    for one in (memory, header) if header_too else (memory,):
        ring.register_memory(one)
    row, back, sums = pages_of(memory, 2, 3), pages_of(memory, 8, 3), Taken()
    ring.push([IoRequest(Operation.WRITE, file, 5 * PAGE, (header, row), 1)])
    assert ended(ring, 1) == {1: 4 * PAGE} and ring.registered_moves == 1
    assert os.pread(file, 16 * PAGE, 0) == CONTENT[: 5 * PAGE] + bytes(header) + bytes(row) + CONTENT[9 * PAGE :]
    header[:] = bytes(PAGE)
    ring.push([read_of(file, 5, header, back, tag=2)._replace(sums=sums), read_of(file, 6, pages_of(memory, 12, 1))])
    assert ended(ring, 2) == {2: 4 * PAGE, 1: PAGE} and ring.registered_moves == 3
    assert bytes(header) == b"h" * PAGE and bytes(back) == bytes(row)
    assert sums.taken == slice_sums(back, PAGE)
    assert bytes(pages_of(memory, 12, 1)) == bytes(pages_of(row, 0, 1)) and ring.refusal() == 0
    close(ring)


def test_what_lies_not_whole_in_it_moves_as_ever(file: int) -> None:
    ring, memory = native_ring(), memory_of(8)
    ring.register_memory(pages_of(memory, 2, 2))
    ring.register_memory(pages_of(memory, 4, 2))
    spans = [(1, 2), (3, 2), (5, 2), (0, 8)]
    ring.push([read_of(file, 4 + tag, pages_of(memory, *span), tag=tag) for tag, span in enumerate(spans)])
    assert ended(ring, 4) == {tag: count * PAGE for tag, (_, count) in enumerate(spans)}
    ring.push([read_of(file, 1, pages_of(memory, 2, 1), pages_of(memory, 5, 1), pages_of(memory, 4, 1))])
    assert ended(ring, 1) == {1: 3 * PAGE} and ring.registered_moves == 0
    assert bytes(memory[2 * PAGE : 3 * PAGE]) == CONTENT[PAGE : 2 * PAGE]
    for start in (2, 4):
        ring.push([read_of(file, 9, pages_of(memory, start, 2))])
        assert ended(ring, 1) == {1: 2 * PAGE}
        assert bytes(pages_of(memory, start, 2)) == CONTENT[9 * PAGE : 11 * PAGE]
    assert ring.registered_moves == 2 and ring.refusal() == 0
    close(ring)


@pytest.mark.parametrize("page", [12, 13, 14, 15, 16])
def test_the_end_of_a_file_is_told_alike(file: int, page: int) -> None:
    said = []
    for registers in (False, True):
        ring, memory = native_ring(), memory_of(3)
        if registers:
            ring.register_memory(memory)
        ring.push([read_of(file, page, aligned(PAGE), memory)])
        said.append(ended(ring, 1)[1])
        assert ring.registered_moves == registers
        close(ring)
    assert said == [(16 - page) * PAGE] * 2


def test_an_error_of_header_or_row_is_the_rows_and_nothing_counts_as_moved(file: int) -> None:
    read_only = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    ring, memory = native_ring(), memory_of(3)
    ring.register_memory(memory)
    ring.push([IoRequest(Operation.WRITE, read_only, 0, (aligned(PAGE), memory), 1)])
    unreadable = memoryview(mmap.mmap(-1, PAGE, prot=mmap.PROT_WRITE))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address(unreadable)), PAGE, 0) == 0
    ring.push([IoRequest(Operation.WRITE, file, 17 * PAGE, (unreadable, memory), 2)])
    full = os.memfd_create("full", os.MFD_ALLOW_SEALING)
    os.ftruncate(full, PAGE)
    fcntl.fcntl(full, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    ring.push([IoRequest(Operation.WRITE, full, 0, (aligned(PAGE), memory), 3)])
    said = ended(ring, 3)
    assert said == {1: -errno.EBADF, 2: -errno.EFAULT, 3: -errno.EPERM} and ring.registered_moves == 3
    assert os.pread(file, 16 * PAGE, 0) == CONTENT
    assert libc.mprotect(ctypes.c_void_p(address(unreadable)), PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    close(ring)
    os.close(read_only)
    os.close(full)


def test_memory_stays_mapped_until_the_ring_is_closed() -> None:
    ring, memory = native_ring(), memory_of(2)
    kept = weakref.ref(memory)
    ring.register_memory(memory)
    ring.register_memory(memory)
    del memory
    gc.collect()
    assert kept() is not None
    close(ring)
    assert kept() is None
    assert ring.refusal() == 0, "the same once more changes nothing"


def test_memory_that_overlaps_is_refused_and_what_was_registered_still_counts(file: int) -> None:
    ring, memory = native_ring(), memory_of(8)
    ring.register_memory(pages_of(memory, 2, 4))
    for first, count in ((1, 2), (5, 2), (3, 1), (0, 8)):
        ring.register_memory(pages_of(memory, first, count))
    wait_until(lambda: ring.refusal() == errno.EEXIST)
    ring.push([read_of(file, 3, pages_of(memory, 2, 4))])
    assert ended(ring, 1) == {1: 4 * PAGE} and ring.registered_moves == 1
    assert bytes(pages_of(memory, 2, 4)) == CONTENT[3 * PAGE : 7 * PAGE]
    close(ring)


def test_a_row_that_moves_in_pieces_comes_whole(file: int) -> None:
    faults = [Fault(Call.WRITE, nth, Effect.SHORT, PAGE * nth) for nth in (1, 2)]
    faults.append(Fault(Call.WRITE, 3, Effect.ERROR, errno.EINTR))
    bell, calls = Bell(), FaultyCalls(faults)
    engine = UringEngine(calls, 2, 2, 8, bell, PAGE)
    memory, header = memory_of(6), aligned(PAGE)
    engine.register_memory(memory)
    assert engine.submit([IoRequest(Operation.WRITE, file, PAGE, (header, memory), 1)]) == 1
    results: list[IoResult] = []
    while not results:
        bell.wait(WAIT_S)
        results = engine.poll()
    assert (results[0].moved_bytes, results[0].error_number) == (7 * PAGE, None) and calls.count(Call.WRITE) == 4
    assert os.pread(file, 16 * PAGE, 0) == CONTENT[:PAGE] + bytes(header) + bytes(memory) + CONTENT[8 * PAGE :]
    assert engine.close(WAIT_S) == 0


LIMITED = """
import errno, logging, mmap, os, resource, sys, threading
from kvtier.io.base import IoRequest, KernelCalls, Operation
from kvtier.io.uring import UringEngine

logging.basicConfig(format="%(message)s")
descriptor = os.open(sys.argv[1], os.O_RDWR)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 18, 1 << 18))
if os.geteuid() == 0:
    os.setuid(65534)
ended = threading.Event()
engine = UringEngine(KernelCalls(), 4, 4, 8, ended.set)
large, small = (memoryview(mmap.mmap(-1, length)) for length in (1 << 20, 1 << 12))
for memory in (large, large, small):
    memory[:] = os.urandom(len(memory))
    engine.register_memory(memory)
    assert engine.submit([IoRequest(Operation.WRITE, descriptor, 0, (memory,), 1)]) == 1 and ended.wait(60)
    ended.clear()
    assert engine.poll()[0].moved_bytes == len(memory)
    assert os.pread(descriptor, len(memory), 0) == bytes(memory)
assert engine._writes._ring.registered_moves == 0, "what little may be locked is left to others"
assert engine.close(60.0) == 0
"""


def test_who_may_lock_too_little_memory_is_told_once_and_writes_as_before(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plain = {name: value for name, value in environment().items() if name != "LD_PRELOAD"}  # no sanitizer of Python
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "file")]
    done = subprocess.run(command, check=False, timeout=60, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert "may lock 256 KiB here; raise `ulimit -l`" in line
