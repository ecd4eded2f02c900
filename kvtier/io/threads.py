"""The I/O engine made of threads: a few workers, each of which moves the bytes of some requests and comes back.

How they move is a `Mover`'s: by blocking preadv, pwritev and fdatasync here, within mapped memory in tiers/mapped.py.
Threads are daemons: a worker stuck in the kernel does not keep the process alive. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.io.base import (
    IoRequest,
    IoResult,
    KernelCalls,
    Mover,
    Operation,
    SystemCalls,
    buffers_after,
    last_boundary,
    uninterrupted,
)
from kvtier.io.lanes import LanedEngine, Outcomes


class ThreadsEngine(LanedEngine):
    """`IoEngine` over workers that wait for what they do."""

    def __init__(
        self,
        read_workers: int,
        write_workers: int,
        queue_max: int,
        wake: Callable[[], None],
        calls: SystemCalls | None = None,
        mover: Mover | None = None,
    ) -> None:
        """Without a `mover` bytes move with `calls`, the kernel's if there are none."""
        mover = mover if mover is not None else CallMover(calls if calls is not None else KernelCalls())
        outcomes = Outcomes(wake)
        reads, writes = (ThreadLane(mover, count, outcomes) for count in (read_workers, write_workers))
        super().__init__(reads, writes, queue_max, outcomes)


class ThreadLane:
    """`Lane` of some workers."""

    def __init__(self, mover: Mover, workers: int, outcomes: Outcomes) -> None:
        assert workers > 0
        self.in_flight = 0
        self._mover = mover
        self._outcomes = outcomes
        self._missing = workers
        """Workers that could not be started yet; only the caller's thread changes it, and the next."""
        self._working = 0
        self._changed = threading.Condition()
        """Guards the following."""
        self._waiting: deque[IoRequest] = deque()
        self._running = 0
        self._closed = False

    def hire(self) -> bool:
        """See `Lane`."""
        while self._missing and not self._closed:
            try:
                threading.Thread(target=self._work, name="kvtier-io", daemon=True).start()
            except RuntimeError:
                break
            self._missing -= 1
            self._working += 1
        return self._working > 0 and not self._closed

    def push(self, requests: list[IoRequest]) -> None:
        """See `Lane`."""
        with self._changed:
            self._waiting.extend(requests)
            self._changed.notify(len(requests))

    def register_memory(self, memory: memoryview) -> None:
        """See `Lane`: calls know no such memory."""

    def cancel(self) -> list[int]:
        """See `Lane`."""
        with self._changed:
            tags = [request.tag for request in self._waiting]
            self._waiting.clear()
        return tags

    def close(self, end: float) -> int:
        """See `Lane`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while (self._waiting or self._running) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self.in_flight -= len(self._waiting)
            self._waiting.clear()
            return self._running

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                share = -(-len(self._waiting) // max(1, self._working))
                requests = [self._waiting.popleft() for _ in range(min(share, self._mover.batch_max))]
                count = len(requests)
                self._running += count
            try:
                self._outcomes.add(self, self._mover.move(requests))
            except Exception as error:  # a bug in `prepare` or `then`: poll() raises it on the caller's thread
                self._outcomes.fail(self, error, count)
            del requests
            with self._changed:
                self._running -= count
                if self._closed:
                    self._changed.notify_all()
            self._outcomes.wake()


class CallMover:
    """`Mover` with blocking calls, one request after the other."""

    batch_max = 1

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls

    def move(self, requests: Sequence[IoRequest]) -> list[IoResult]:
        """See `Mover`."""
        return [_run(request, self._calls) for request in requests]


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
    ended = time.monotonic_ns()
    return IoResult(request.tag, moved, error, value, ended - started, ended)


def _move(request: IoRequest, calls: SystemCalls) -> tuple[int, int | None]:
    """Bytes moved and the error number, looping over short and interrupted calls; a read may end at the end of file."""
    if request.operation is Operation.SYNC:
        uninterrupted(calls.fdatasync, request.descriptor)
        return 0, None
    call = calls.preadv if request.operation is Operation.READ else calls.pwritev
    total = request.total_bytes
    moved = 0
    while moved < total:
        start = last_boundary(moved)
        count = uninterrupted(call, request.descriptor, buffers_after(request.buffers, start), request.offset + start)
        if start + count <= moved:
            return moved, None if request.operation is Operation.READ else errno.EIO
        moved = start + count
    return moved, None
