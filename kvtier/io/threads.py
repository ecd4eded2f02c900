"""The I/O engine made of threads: blocking preadv, pwritev and fdatasync on a few workers.

Reads have workers and a queue of their own, writes and syncs theirs, so hung writes never block a read. Threads are
daemons: a worker stuck in the kernel does not keep the process alive. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.block import ALIGNMENT
from kvtier.io.base import IoRequest, IoResult, KernelCalls, Operation, SystemCalls

INTERRUPTS_MAX = 64
"""Interrupted calls in a row before a request fails with EINTR."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One queue and its workers; `changed` guards all but `in_flight`, which only the caller's thread touches."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[IoRequest] = field(default_factory=deque)
    running: int = 0
    closed: bool = False
    in_flight: int = 0


class ThreadsEngine:
    """`IoEngine` over blocking calls."""

    def __init__(
        self,
        read_workers: int,
        write_workers: int,
        queue_max: int,
        wake: Callable[[], None],
        calls: SystemCalls | None = None,
    ) -> None:
        """`queue_max` bounds the reads in flight and, separately, the writes and syncs."""
        assert read_workers > 0 and write_workers > 0 and queue_max > 0
        self._queue_max = queue_max
        self._wake = wake
        self._calls = calls if calls is not None else KernelCalls()
        self._done: deque[tuple[_Lane, IoResult | Exception]] = deque()
        self._reads, self._writes = _Lane(), _Lane()
        for lane, workers in ((self._reads, read_workers), (self._writes, write_workers)):
            for _ in range(workers):
                threading.Thread(target=self._work, args=(lane,), name="kvtier-io", daemon=True).start()

    def __repr__(self) -> str:
        reads, writes = self._reads.in_flight, self._writes.in_flight
        return f"ThreadsEngine(reads={reads}, writes={writes}, queue_max={self._queue_max})"

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """See `IoEngine`."""
        for taken, request in enumerate(requests):
            lane = self._lane(request.operation)
            with lane.changed:
                if lane.closed or lane.in_flight >= self._queue_max:
                    return taken
                lane.in_flight += 1
                lane.waiting.append(request)
                lane.changed.notify()
        return len(requests)

    def room(self, operation: Operation) -> int:
        """See `IoEngine`."""
        lane = self._lane(operation)
        return 0 if lane.closed else self._queue_max - lane.in_flight

    @property
    def in_flight(self) -> int:
        """See `IoEngine`."""
        return self._reads.in_flight + self._writes.in_flight

    def poll(self) -> list[IoResult]:
        """See `IoEngine`."""
        results: list[IoResult] = []
        while self._done:
            lane, result = self._done.popleft()
            lane.in_flight -= 1
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return results

    def cancel(self, operation: Operation) -> None:
        """See `IoEngine`."""
        lane = self._lane(operation)
        with lane.changed:
            waiting = list(lane.waiting)
            lane.waiting.clear()
        self._done.extend((lane, IoResult(request.tag, 0, errno.ECANCELED, None, 0)) for request in waiting)

    def close(self, deadline_s: float) -> int:
        """See `IoEngine`. What has not started by then is dropped without a result; results can still be polled."""
        end = time.monotonic() + deadline_s
        stuck = 0
        for lane in (self._reads, self._writes):
            with lane.changed:
                lane.closed = True
                lane.changed.notify_all()
                while (lane.waiting or lane.running) and (left := end - time.monotonic()) > 0:
                    lane.changed.wait(left)
                lane.in_flight -= len(lane.waiting)
                lane.waiting.clear()
                stuck += lane.running
        return stuck

    def _lane(self, operation: Operation) -> _Lane:
        return self._reads if operation is Operation.READ else self._writes

    def _work(self, lane: _Lane) -> None:
        while True:
            with lane.changed:
                while not lane.waiting:
                    if lane.closed:
                        return
                    lane.changed.wait()
                request = lane.waiting.popleft()
                lane.running += 1
            result = self._outcome(request)
            del request
            self._done.append((lane, result))
            with lane.changed:
                lane.running -= 1
                if lane.closed:
                    lane.changed.notify_all()
            self._wake()

    def _outcome(self, request: IoRequest) -> IoResult | Exception:
        try:
            return _run(request, self._calls)
        except Exception as error:  # a bug in `prepare` or `then`: poll() raises it on the caller's thread
            return error


def _run(request: IoRequest, calls: SystemCalls) -> IoResult:
    started = time.monotonic_ns()
    if request.prepare is not None:
        request.prepare()
    try:
        moved, error = _move(request, calls)
    except OSError as failure:
        moved, error = 0, failure.errno or errno.EIO
    value = None
    if error is None and moved == request.total_bytes and request.then is not None:
        value = request.then()
    return IoResult(request.tag, moved, error, value, time.monotonic_ns() - started)


def _move(request: IoRequest, calls: SystemCalls) -> tuple[int, int | None]:
    """Bytes moved and the error number, looping over short and interrupted calls; a read may end at the end of file."""
    if request.operation is Operation.SYNC:
        calls.fdatasync(request.descriptor)
        return 0, None
    call = calls.preadv if request.operation is Operation.READ else calls.pwritev
    total = request.total_bytes
    moved = interrupts = 0
    while moved < total:
        start = moved - moved % ALIGNMENT  # a short call may stop anywhere, direct I/O may not start anywhere
        try:
            count = call(request.descriptor, _after(request.buffers, start), request.offset + start)
        except InterruptedError:
            interrupts += 1
            if interrupts >= INTERRUPTS_MAX:
                return moved, errno.EINTR
            continue
        interrupts = 0
        if start + count <= moved:
            return moved, None if request.operation is Operation.READ else errno.EIO
        moved = start + count
    return moved, None


def _after(buffers: Sequence[memoryview], start: int) -> list[memoryview]:
    """`buffers` without their first `start` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if start < buffer.nbytes:
            rest.append(buffer[start:] if start else buffer)
            start = 0
        else:
            start -= buffer.nbytes
    return rest
