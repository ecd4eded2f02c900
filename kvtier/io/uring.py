"""The I/O engine made of two io_urings: reads have theirs, writes and syncs theirs.

A ring keeps its disk busy, collects what has ended and sums it without the GIL, and makes results of what has moved
whole. One thread for each runs `prepare` and `then`, goes on where a request ended short, and wakes the caller once for
all that ended together. Knows nothing of what the bytes mean. Used for NVMe, by shelves.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from kvtier.io.base import IoRequest, IoResult, Ring, SystemCalls
from kvtier.io.lanes import LanedEngine, Outcomes
from kvtier.io.piecemeal import Piecemeal
from kvtier.process_limits import why_not_registered
from kvtier.tiers.checksum import sum_rows

_log = logging.getLogger(__name__)

PREPARED_TOGETHER = 8
"""Requests whose buffers are summed in one go: what comes back to Python often waits long for the GIL."""
END_S = 1.0
"""How long the thread of a ring that has nothing left may take to end."""


class UringEngine(LanedEngine):
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
        """At most so many reads and writes are in the kernel at once.

        With `slice_bytes` sums are taken, where they are wanted, of last buffers that are whole such slices.
        OSError where an io_uring is not to be had.
        """
        assert read_depth > 0 and write_depth > 0
        outcomes = Outcomes(wake)
        reads, writes = (RingLane(calls, depth, slice_bytes, outcomes) for depth in (read_depth, write_depth))
        super().__init__(reads, writes, queue_max, outcomes)


class RingLane:
    """`Lane` of one ring and the thread that waits for it."""

    def __init__(self, calls: SystemCalls, depth: int, slice_bytes: int, outcomes: Outcomes) -> None:
        self.in_flight = 0
        self._ring: Ring = calls.ring(depth, slice_bytes)
        self._slice_bytes = slice_bytes
        self._outcomes = outcomes
        self._thread: threading.Thread | None = None
        self._preparing: deque[IoRequest] = deque()
        self._refused = False
        """The kernel would not register memory, and that has been said."""
        self._piecemeal: dict[int, Piecemeal] = {}
        """What did not move at once, by tag."""
        self._changed = threading.Condition()
        """Guards the following, and that a request ends and has a result at once; notified once it is closed."""
        self._under_way = 0
        """Requests that have no result yet."""
        self._closed = False
        _OPENED.add(self)

    def hire(self) -> bool:
        """See `Lane`."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._work, name="kvtier-io", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self._thread is not None and not self._closed

    def push(self, requests: list[IoRequest]) -> None:
        """See `Lane`."""
        with self._changed:
            self._under_way += len(requests)
        ready = [request for request in requests if request.prepare is None]
        if len(ready) < len(requests):
            self._preparing.extend([request for request in requests if request.prepare is not None])
            self._ring.wake()
        if ready:
            self._ring.push(ready)

    def register_memory(self, memory: memoryview) -> None:
        """See `Lane`."""
        self._ring.register_memory(memory)

    def cancel(self) -> list[int]:
        """See `Lane`."""
        with self._changed:
            return self._take_back()

    def close(self, end: float) -> int:
        """See `Lane`."""
        with self._changed:
            self._closed = True
            while self._under_way and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self.in_flight -= len(self._take_back())
            stuck = self._under_way
        self._ring.wake()
        if self._thread is None:
            self._close_ring()
        elif not stuck:
            self._thread.join(END_S)
        return stuck

    def after_fork_in_child(self) -> None:
        """Keep nothing open that is the parent's; there is no thread here, and so no room."""
        self._ring.after_fork_in_child()
        self._under_way, self._preparing, self._changed = 0, deque(), threading.Condition()
        self._closed, self._thread = True, None

    def _take_back(self) -> list[int]:
        """End what the kernel has not got; returns the tags."""
        tags: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                tags.append(self._preparing.popleft().tag)
        tags += self._ring.cancel()
        for tag in tags:
            self._piecemeal.pop(tag, None)
        self._under_way -= len(tags)
        return tags

    def _work(self) -> None:
        while self._under_way or not self._closed:
            os.eventfd_read(self._ring.bell)
            self._turn()
        self._close_ring()

    def _turn(self) -> None:
        """All that there is to do now. Nothing of a request is held on to after it."""
        if not self._refused and (refusal := self._ring.refusal()):
            self._refused = True
            _log.warning("io.engine: writes from DRAM cost more CPU: %s", why_not_registered(refusal))
        errors = self._prepare()
        results, others = self._ring.take()
        rest: list[IoRequest] = []
        for ended in others:
            try:
                outcome = self._outcome(*ended)
            except Exception as error:  # a bug in `then`: poll() raises it on the caller's thread
                errors.append(error)
                continue
            if isinstance(outcome, IoResult):
                results.append(outcome)
            else:
                rest.append(outcome)
        if rest:
            self._ring.push(rest)
        if not results and not errors:
            return
        with self._changed:
            self._under_way -= len(results) + len(errors)
            self._outcomes.add(self, results)
            for raised in errors:
                self._outcomes.fail(self, raised, 1)
            if self._closed:
                self._changed.notify_all()
        self._outcomes.wake()

    def _close_ring(self) -> None:
        """Wait for the end of a ring that has nothing left to move."""
        while not self._ring.close():
            os.eventfd_read(self._ring.bell)
            self._ring.take()

    def _prepare(self) -> list[Exception]:
        """Run what must run before bytes move, and let them move; returns what was raised instead."""
        errors: list[Exception] = []
        while self._preparing:
            requests: list[IoRequest] = []
            with contextlib.suppress(IndexError):  # cancelled just now
                while len(requests) < PREPARED_TOGETHER:
                    requests.append(self._preparing.popleft())
            if self._slice_bytes:
                self._sum([request for request in requests if request.sums is not None and not request.sums.taken])
            ready: list[IoRequest] = []
            for request in requests:
                assert request.prepare is not None
                try:
                    request.prepare()
                except Exception as error:  # likewise
                    errors.append(error)
                else:
                    ready.append(request)
            self._ring.push(ready)
        return errors

    def _sum(self, requests: list[IoRequest]) -> None:
        if requests:
            rows = sum_rows([request.buffers[-1] for request in requests], self._slice_bytes)
            for request, taken in zip(requests, rows, strict=True):
                assert request.sums is not None
                request.sums.taken = taken

    def _outcome(
        self, request: IoRequest, moved: int, whole: bool, started_ns: int, ended_ns: int
    ) -> IoResult | IoRequest:
        """Of a request, or a piece of one, that the ring made no result of: the result, or what is left to move."""
        error = None
        if not whole or request.tag in self._piecemeal:
            piecemeal = self._piecemeal.get(request.tag)
            if piecemeal is None:
                piecemeal = self._piecemeal[request.tag] = Piecemeal(request, started_ns)
            if piecemeal.goes_on(moved):
                return piecemeal.rest()
            del self._piecemeal[request.tag]
            request, started_ns = piecemeal.request, piecemeal.started_ns
            moved, error = piecemeal.moved_bytes, piecemeal.error
            whole = error is None and moved == request.total_bytes
        value = None
        if whole and request.then is not None:
            value = request.then()
            ended_ns = time.monotonic_ns()
        return IoResult(request.tag, moved, error, value, ended_ns - started_ns, ended_ns)


_OPENED: weakref.WeakSet[RingLane] = weakref.WeakSet()
"""All of this process, for the hook at forks, which the process has for good: one for each would be a leak."""


def _after_fork_in_child() -> None:
    for lane in list(_OPENED):
        lane.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
