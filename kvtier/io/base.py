"""The I/O contract: requests in, results out, nobody waits.

`IoEngine` moves bytes between descriptors and memory; `SystemCalls` is the seam below it where faults are injected.
Knows nothing of slots, hashes or checksums: those ride along as `prepare` and `then`. Called by the shelf (from the
engine thread) and by the journal (from its own).
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Operation(enum.Enum):
    """What an I/O does."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class IoRequest:
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
    """Run on the worker thread before the bytes move, e.g. to checksum them."""
    then: Callable[[], object] | None = None
    """Run on the worker thread once all bytes have moved, e.g. to verify them."""

    @property
    def total_bytes(self) -> int:
        """Bytes to move."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class IoResult:
    """How a request ended. A read that met the end of the file has moved less than asked and has no error number."""

    tag: int
    moved_bytes: int
    error_number: int | None
    value: object
    """What `then` returned; None if it did not run."""
    duration_ns: int
    """From the start on the worker to the end, time in the queue left out."""


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

    def cancel(self, operation: Operation) -> None:
        """End what waits in this operation's queue and has not started, with ECANCELED; the next poll says so."""

    @property
    def in_flight(self) -> int:
        """Requests submitted whose result has not been polled."""

    def close(self, deadline_s: float) -> int:
        """Take no more requests, wait up to `deadline_s` for those in flight; returns how many still are."""


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
