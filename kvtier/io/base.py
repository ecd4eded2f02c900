"""The I/O contract: requests in, results out, nobody waits.

`IoEngine` moves bytes between descriptors and memory; `SystemCalls`, and the `Ring` that they may have, are the seam
below it where faults are injected.
Knows nothing of slots, hashes or checksums: those ride along as `prepare` and `then`. Called by the shelf (from the
engine thread) and by the journal (from its own).
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from kvtier.block import ALIGNMENT

INTERRUPTS_MAX = 64
"""Interrupted calls in a row before one fails with EINTR."""

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class Operation(enum.Enum):
    """What an I/O does."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class SliceSums(Protocol):
    """Where an engine that checksums what it moves leaves the sums of the slices."""

    taken: bytes
    """Empty where it does not. Not empty before a write: the sums are known and need not be taken."""


class IoRequest(NamedTuple):
    """One transfer between a run of bytes of a file and memory.

    `buffers` are contiguous; for direct I/O their addresses, lengths and `offset` are multiples of 4 KiB. They and the
    bytes of the file belong to this I/O until its result has been polled.
    """

    operation: Operation
    descriptor: int
    offset: int
    buffers: tuple[memoryview, ...]
    tag: int
    """Chosen by the caller and handed back; unique among what is in flight."""
    prepare: Callable[[], None] | None = None
    """Run on the worker thread before the bytes move, e.g. to checksum them; MUST NOT change the last buffer.

    That one has moved already where the engine gives `sums`.
    """
    then: Callable[[], object] | None = None
    """Run on the worker thread once all bytes have moved, e.g. to verify them."""
    sums: SliceSums | None = None
    """Of the last buffer, for an engine that takes them: there before `prepare` or `then` runs."""

    @property
    def total_bytes(self) -> int:
        """Bytes to move."""
        return sum([buffer.nbytes for buffer in self.buffers])


class IoResult(NamedTuple):
    """How a request ended. A read that met the end of the file has moved less than asked and has no error number."""

    tag: int
    moved_bytes: int
    error_number: int | None
    value: object
    """What `then` returned; None if it did not run."""
    duration_ns: int
    """From the start on the worker to the end, time in the queue left out."""
    ended_ns: int = 0
    """When it ended on the worker, monotonic; 0: it never began."""


class IoEngine(Protocol):
    """Moves bytes off the caller's thread. `submit`, `poll`, `room` and `close` are called from one thread.

    MUST keep reads and writes apart, so that hung writes never delay a read. MUST NOT hold a request's buffers after
    its result was polled, nor give a result before the kernel is done with them. Calls `wake` (from any thread) after
    each result that can be polled.
    """

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """Queue the leading requests that there is room for; returns how many."""

    def room(self, operation: Operation) -> int:
        """How many more requests of this operation's queue would be taken now."""

    def poll(self) -> list[IoResult]:
        """Results since the last call, in order of completion. Re-raises what a `prepare` or `then` raised."""

    def register_memory(self, memory: memoryview) -> None:
        """Writes will come from this memory, again and again: an engine may have its pages pinned once for all of them.

        It is kept mapped until the engine is closed. Returns at once; whatever comes of it, writes go on as before.
        """

    def cancel(self, operation: Operation) -> None:
        """End what waits in this operation's queue and has not started, with ECANCELED; the next poll says so."""

    @property
    def in_flight(self) -> int:
        """Requests submitted whose result has not been polled."""

    def close(self, deadline_s: float) -> int:
        """Take no more requests, wait up to `deadline_s` for those in flight; returns how many still are."""


class Mover(Protocol):
    """What a worker does with requests: moves their bytes and runs what rides along. Any thread, many at once."""

    @property
    def batch_max(self) -> int:
        """How many requests it is worth to be given together; their results come together, too."""

    def move(self, requests: Sequence[IoRequest]) -> list[IoResult]:
        """A result each, in order. Raises what a `prepare` or `then` raises."""


Ended = tuple[IoRequest, int, bool, int, int]
"""A request without a result yet: it, bytes or minus the error number, whether it is whole, begin and end in ns."""


class Ring(Protocol):
    """An io_uring. Bounds what is in the kernel, but not its queue. All calls return at once.

    Moves the buffers of requests and runs nothing that rides along; for a read with `sums` it leaves them there if the
    row has come whole. What it was given stays until it has ended.
    """

    def push(self, requests: list[IoRequest]) -> None:
        """Queue requests; from any thread."""

    def cancel(self) -> list[int]:
        """Take back what is not in the kernel yet; returns its tags."""

    @property
    def bell(self) -> int:
        """An eventfd; rings once until the next `take`: when something ended, at `wake`; and when `close` says True.

        While two or more wait for each that has ended it may ring up to 10 ms later, once for all of them.
        """

    def take(self) -> tuple[list[IoResult], list[Ended]]:
        """What has ended: results of what has moved whole and has no `then`, and the others."""

    def wake(self) -> None:
        """Ring the bell; from any thread."""

    def register_memory(self, memory: memoryview) -> None:
        """Have the kernel pin this memory once, not for each request whose last buffer lies in it.

        Keeps it mapped until `close`. If the kernel refuses, the bell rings, `refusal` says the number of its error,
        and nothing else changes.
        """

    def refusal(self) -> int:
        """The number of the last error with memory to be registered; 0: none."""

    def close(self) -> bool:
        """Take no more. Whether it is gone, once nothing is in the kernel any more; ask again when the bell rings."""

    def after_fork_in_child(self) -> None:
        """Give up its descriptors; nothing else may be called there."""


class SystemCalls(Protocol):
    """The calls that touch a shelf's files, raising OSError as the kernel does."""

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into `buffers`; returns bytes, 0 at the end of the file."""

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write `buffers`; returns bytes."""

    def fdatasync(self, descriptor: int) -> None:
        """Make written bytes durable."""

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """Give the file real bytes on its disk (or in memory)."""

    def ring(self, depth: int, slice_bytes: int) -> Ring:
        """An io_uring with at most `depth` requests in the kernel at once. OSError where there is none.

        With `slice_bytes` sums are taken of last buffers, which are whole such slices.
        """

    def mover(self, mover: Mover) -> Mover:
        """What moves rows of mapped memory, which needs no calls: `mover`, or what stands before it."""


class KernelCalls:
    """`SystemCalls` as the kernel serves them."""

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """os.preadv."""
        return os.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """os.pwritev."""
        return os.pwritev(descriptor, buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        """os.fdatasync."""
        os.fdatasync(descriptor)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """os.posix_fallocate."""
        os.posix_fallocate(descriptor, offset, length)

    def ring(self, depth: int, slice_bytes: int) -> Ring:
        """`kvtier._native.Ring`; ENOSYS where that was not built."""
        try:
            from kvtier._native import Ring as NativeRing
        except ImportError:
            raise OSError(errno.ENOSYS, "kvtier._native was not built") from None
        return NativeRing(depth, slice_bytes, tuple(Operation), IoResult)

    def mover(self, mover: Mover) -> Mover:
        """Nothing stands before it."""
        return mover


def uninterrupted(call: Callable[_Given, _Answer], /, *arguments: _Given.args, **named: _Given.kwargs) -> _Answer:
    """Make a call, again while signals interrupt it; EINTR after `INTERRUPTS_MAX` in a row."""
    for _ in range(INTERRUPTS_MAX - 1):
        with contextlib.suppress(InterruptedError):
            return call(*arguments, **named)
    return call(*arguments, **named)


def buffers_after(buffers: Sequence[memoryview], start: int) -> list[memoryview]:
    """`buffers` without their first `start` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if start < buffer.nbytes:
            rest.append(buffer[start:] if start else buffer)
            start = 0
        else:
            start -= buffer.nbytes
    return rest


def last_boundary(moved: int) -> int:
    """Where to go on after `moved` bytes: a short call may stop anywhere, direct I/O may not start anywhere."""
    return moved - moved % ALIGNMENT


def write_all(calls: SystemCalls, descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, going on after short and interrupted calls; OSError once nothing moves any more."""
    written = 0
    while written < data.nbytes:
        count = uninterrupted(calls.pwritev, descriptor, [data[written:]], offset + written)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written += count
