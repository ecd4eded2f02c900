"""The I/O engine made of two io_urings: reads have theirs, writes and syncs theirs, so hung writes never block a read.

A ring keeps its disk busy, collects what has ended and sums it without the GIL; one thread for each runs `prepare` and
`then`, goes on where a move ended short, and wakes the caller once for all that ended together. Knows nothing of what
the bytes mean. Used for NVMe, by shelves.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.io.base import (
    IoRequest,
    IoResult,
    Move,
    Operation,
    Ring,
    SystemCalls,
    buffers_after,
    last_boundary,
)
from kvtier.io.piecemeal import Piecemeal
from kvtier.tiers.checksum import sum_rows

CODES = {Operation.READ: 0, Operation.WRITE: 1, Operation.SYNC: 2}
PREPARED_TOGETHER = 8
"""Requests whose buffers are summed in one go: what comes back to Python often waits long for the GIL."""
END_S = 1.0
"""How long the thread of a ring that has nothing left may take to end."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One ring and its thread. `changed` guards that a flight ends and has a result at once; notified once closed."""

    ring: Ring
    flights: dict[int, IoRequest] = field(default_factory=dict)
    """Everything that has no result yet, by tag."""
    piecemeal: dict[int, Piecemeal] = field(default_factory=dict)
    """Of these what did not move at once."""
    preparing: deque[IoRequest] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False
    in_flight: int = 0
    """As the caller knows it."""
    thread: threading.Thread | None = None


class UringEngine:
    """`IoEngine` over two rings."""

    def __init__(
        self,
        calls: SystemCalls,
        read_depth: int,
        write_depth: int,
        queue_max: int,
        wake: Callable[[], None],
        slice_bytes: int = 0,
    ) -> None:
        """At most so many reads and writes are in the kernel at once; `queue_max` bounds those of each in flight.

        With `slice_bytes` sums are taken, where they are wanted, of last buffers that are whole such slices.
        OSError where an io_uring is not to be had.
        """
        assert read_depth > 0 and write_depth > 0 and queue_max > 0
        self._queue_max = queue_max
        self._wake = wake
        self._slice_bytes = slice_bytes
        self._done: deque[tuple[_Lane, IoResult | Exception]] = deque()
        self._reads, self._writes = _Lane(calls.ring(read_depth)), _Lane(calls.ring(write_depth))
        self._hire(self._reads)
        self._hire(self._writes)
        _OPENED.add(self)

    def __repr__(self) -> str:
        reads, writes = self._reads.in_flight, self._writes.in_flight
        return f"UringEngine(reads={reads}, writes={writes}, queue_max={self._queue_max})"

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """See `IoEngine`."""
        moves: dict[Operation, list[Move]] = {}
        taken = 0
        for request in requests:
            lane = self._lane(request.operation)
            if lane.closed or lane.thread is None or lane.in_flight >= self._queue_max:
                break
            taken += 1
            lane.in_flight += 1
            lane.flights[request.tag] = request
            if request.prepare is None:
                moves.setdefault(request.operation, []).append(self._move(request))
            else:
                lane.preparing.append(request)
                lane.ring.wake()
        for operation, batch in moves.items():
            self._lane(operation).ring.push(batch)
        return taken

    def room(self, operation: Operation) -> int:
        """See `IoEngine`."""
        lane = self._lane(operation)
        self._hire(lane)
        return 0 if lane.closed or lane.thread is None else self._queue_max - lane.in_flight

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
        for tag in _taken_back(lane):
            self._done.append((lane, IoResult(tag, 0, errno.ECANCELED, None, 0)))

    def close(self, deadline_s: float) -> int:
        """See `IoEngine`. What the kernel has not got by then is dropped; results can still be polled."""
        end = time.monotonic() + deadline_s
        stuck = 0
        for lane in (self._reads, self._writes):
            with lane.changed:
                lane.closed = True
                while lane.flights and (left := end - time.monotonic()) > 0:
                    lane.changed.wait(left)
                lane.in_flight -= len(_taken_back(lane))
                stuck += len(lane.flights)
            lane.ring.wake()
            if lane.thread is None:
                _close(lane.ring)
            elif not lane.flights:
                lane.thread.join(END_S)
        return stuck

    def after_fork_in_child(self) -> None:
        """Keep nothing open that is the parent's; there are no threads here, and so no room."""
        for lane in (self._reads, self._writes):
            lane.ring.after_fork_in_child()
            lane.flights, lane.preparing, lane.changed = {}, deque(), threading.Condition()
            lane.closed, lane.thread = True, None

    def _lane(self, operation: Operation) -> _Lane:
        return self._reads if operation is Operation.READ else self._writes

    def _hire(self, lane: _Lane) -> None:
        """Start the lane's thread if this machine has one; without it there is no room."""
        if lane.thread is None and not lane.closed:
            thread = threading.Thread(target=self._work, args=(lane,), name="kvtier-io", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return
            lane.thread = thread

    def _work(self, lane: _Lane) -> None:
        while lane.flights or not lane.closed:
            os.eventfd_read(lane.ring.bell)
            outcomes = self._prepare(lane)
            rest: list[Move] = []
            for end in lane.ring.take():
                tag = end[0]
                try:
                    outcome: IoResult | Exception | Move = self._ended(lane, *end)
                except Exception as error:  # a bug in `then`: poll() raises it on the caller's thread
                    outcome = error
                if isinstance(outcome, Move):
                    rest.append(outcome)
                else:
                    outcomes.append((tag, outcome))
            if rest:
                lane.ring.push(rest)
            with lane.changed:
                for tag, outcome in outcomes:
                    del lane.flights[tag]
                    self._done.append((lane, outcome))
                if lane.closed:
                    lane.changed.notify_all()
            if outcomes:
                self._wake()
        _close(lane.ring)

    def _prepare(self, lane: _Lane) -> list[tuple[int, IoResult | Exception]]:
        """Run what must run before bytes move, and let them move; returns what failed at that."""
        failed: list[tuple[int, IoResult | Exception]] = []
        while lane.preparing:
            requests: list[IoRequest] = []
            with contextlib.suppress(IndexError):  # cancelled just now
                while len(requests) < PREPARED_TOGETHER:
                    requests.append(lane.preparing.popleft())
            summed = [request for request in requests if request.sums is not None and self._slice_bytes]
            taken = sum_rows([request.buffers[-1] for request in summed], self._slice_bytes) if summed else []
            for request, sums in zip(summed, taken, strict=True):
                assert request.sums is not None
                request.sums.taken = sums
            for request in requests:
                try:
                    assert request.prepare is not None
                    request.prepare()
                except Exception as error:  # likewise
                    failed.append((request.tag, error))
                else:
                    lane.ring.push([self._move(request)])
        return failed

    def _ended(
        self, lane: _Lane, tag: int, result: int, started_ns: int, ended_ns: int, sums: bytes
    ) -> IoResult | Move:
        """A move has ended: the result of its request, or what is left to move."""
        request = lane.flights[tag]
        total_bytes = request.total_bytes
        moved_bytes, error = result, None
        if result != total_bytes or tag in lane.piecemeal:
            piecemeal = lane.piecemeal.setdefault(tag, Piecemeal(started_ns))
            if piecemeal.goes_on(request, result):
                return self._move(request, last_boundary(piecemeal.moved_bytes))
            del lane.piecemeal[tag]
            started_ns, moved_bytes, error = piecemeal.started_ns, piecemeal.moved_bytes, piecemeal.error
        elif request.sums is not None and sums:
            request.sums.taken = sums
        value = None
        if request.then is not None and error is None and moved_bytes == total_bytes:
            value = request.then()
            ended_ns = time.monotonic_ns()
        return IoResult(tag, moved_bytes, error, value, ended_ns - started_ns, ended_ns)

    def _move(self, request: IoRequest, start: int = 0) -> Move:
        """What is left to move of a request after its first bytes."""
        operation, descriptor, offset, buffers, tag, _, _, sums = request
        if start:
            return Move(tag, CODES[operation], descriptor, offset + start, tuple(buffers_after(buffers, start)))
        summed = operation is Operation.READ and sums is not None
        return Move(tag, CODES[operation], descriptor, offset, buffers, self._slice_bytes if summed else 0)


def _close(ring: Ring) -> None:
    """Wait for the end of a ring that has nothing left to move."""
    while not ring.close():
        os.eventfd_read(ring.bell)
        ring.take()


def _taken_back(lane: _Lane) -> list[int]:
    """End what the kernel has not got; returns the tags."""
    tags: list[int] = []
    with contextlib.suppress(IndexError):
        while True:
            tags.append(lane.preparing.popleft().tag)
    tags += lane.ring.cancel()
    for tag in tags:
        del lane.flights[tag]
        lane.piecemeal.pop(tag, None)
    return tags


_OPENED: weakref.WeakSet[UringEngine] = weakref.WeakSet()
"""All of this process, for the hook at forks, which the process has for good: one for each would be a leak."""


def _after_fork_in_child() -> None:
    for engine in list(_OPENED):
        engine.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
