"""The I/O engine made of threads: a few workers, each of which moves the bytes of some requests and comes back.

How they move is a `Mover`'s: by blocking preadv, pwritev and fdatasync here, within mapped memory in tiers/mapped.py.
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


@dataclass(slots=True, eq=False)
class _Lane:
    """One queue and its workers; `changed` guards all but the last three, which only the caller's thread changes."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: deque[IoRequest] = field(default_factory=deque)
    running: int = 0
    closed: bool = False
    in_flight: int = 0
    missing: int = 0
    """Workers that could not be started yet."""
    working: int = 0


class ThreadsEngine:
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
        """`queue_max` bounds the reads in flight and, separately, the writes and syncs.

        Without a `mover` bytes move with `calls`, the kernel's if there are none.
        """
        assert read_workers > 0 and write_workers > 0 and queue_max > 0
        self._queue_max = queue_max
        self._wake = wake
        self._mover = mover if mover is not None else CallMover(calls if calls is not None else KernelCalls())
        self._done: deque[tuple[_Lane, IoResult | Exception]] = deque()
        self._reads, self._writes = _Lane(missing=read_workers), _Lane(missing=write_workers)
        self._hire(self._reads)
        self._hire(self._writes)

    def __repr__(self) -> str:
        reads, writes = self._reads.in_flight, self._writes.in_flight
        return f"ThreadsEngine(reads={reads}, writes={writes}, queue_max={self._queue_max})"

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """See `IoEngine`."""
        for taken, request in enumerate(requests):
            lane = self._lane(request.operation)
            with lane.changed:
                if lane.closed or not lane.working or lane.in_flight >= self._queue_max:
                    return taken
                lane.in_flight += 1
                lane.waiting.append(request)
                lane.changed.notify()
        return len(requests)

    def room(self, operation: Operation) -> int:
        """See `IoEngine`."""
        lane = self._lane(operation)
        self._hire(lane)
        return 0 if lane.closed or not lane.working else self._queue_max - lane.in_flight

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

    def _hire(self, lane: _Lane) -> None:
        """Start the workers that are missing, as far as this machine has threads; without one there is no room."""
        while lane.missing and not lane.closed:
            try:
                threading.Thread(target=self._work, args=(lane,), name="kvtier-io", daemon=True).start()
            except RuntimeError:
                return
            lane.missing -= 1
            lane.working += 1

    def _work(self, lane: _Lane) -> None:
        while True:
            with lane.changed:
                while not lane.waiting:
                    if lane.closed:
                        return
                    lane.changed.wait()
                share = -(-len(lane.waiting) // lane.working)
                requests = [lane.waiting.popleft() for _ in range(min(share, self._mover.batch_max))]
                count = len(requests)
                lane.running += count
            results = self._outcomes(requests)
            del requests
            self._done.extend((lane, result) for result in results)
            with lane.changed:
                lane.running -= count
                if lane.closed:
                    lane.changed.notify_all()
            self._wake()

    def _outcomes(self, requests: list[IoRequest]) -> Sequence[IoResult | Exception]:
        try:
            return self._mover.move(requests)
        except Exception as error:  # a bug in `prepare` or `then`: poll() raises it on the caller's thread
            return [error] * len(requests)


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
