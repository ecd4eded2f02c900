"""What every I/O engine has twice: a lane for reads and one for writes and syncs, so hung writes never block a read.

`LanedEngine` is all of `IoEngine` that does not depend on how bytes move: what is in flight, room, and the way of the
results back to the caller. A lane has threads of its own and moves bytes: see threads.py and uring.py.
"""

from __future__ import annotations

import errno
import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.io.base import IoRequest, IoResult, Operation


class Lane(Protocol):
    """One queue and the threads behind it. Called from the caller's thread; gives results to its `Outcomes`."""

    in_flight: int
    """As the caller knows it; only the caller's thread changes it."""

    def hire(self) -> bool:
        """Whether it takes requests, once threads that it lacks have been started as far as this machine has them."""

    def push(self, requests: list[IoRequest]) -> None:
        """Take requests; `hire` has just said yes."""

    def register_memory(self, memory: memoryview) -> None:
        """Requests will come with buffers in this memory; see `IoEngine`."""

    def cancel(self) -> list[int]:
        """Take back what has not started; returns its tags, which get no result."""

    def close(self, end: float) -> int:
        """Take no more, wait until `end` (monotonic) and drop what has not started; returns how many are stuck."""


class Outcomes:
    """Results on their way from the lanes to the caller."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._batches: deque[tuple[Lane, Sequence[IoResult], int, Exception | None]] = deque()

    def add(self, lane: Lane, results: Sequence[IoResult]) -> None:
        """Requests of a lane have ended. Any thread; `wake` is the lane's business."""
        self._batches.append((lane, results, len(results), None))

    def fail(self, lane: Lane, error: Exception, count: int) -> None:
        """A bug in the `prepare` or `then` of one of so many requests, which end with it. Any thread."""
        self._batches.append((lane, (), count, error))

    def poll(self) -> list[IoResult]:
        """See `IoEngine`."""
        polled: list[IoResult] = []
        while self._batches:
            lane, results, count, error = self._batches.popleft()
            lane.in_flight -= count
            if error is not None:
                raise error
            polled += results
        return polled


class LanedEngine:
    """`IoEngine` over two lanes."""

    def __init__(self, reads: Lane, writes: Lane, queue_max: int, outcomes: Outcomes) -> None:
        """`queue_max` bounds the reads in flight and, separately, the writes and syncs. Hires for both lanes."""
        assert queue_max > 0
        self._reads, self._writes = reads, writes
        reads.hire()
        writes.hire()
        self._queue_max = queue_max
        self._outcomes = outcomes

    def __repr__(self) -> str:
        reads, writes = self._reads.in_flight, self._writes.in_flight
        return f"{type(self).__name__}(reads={reads}, writes={writes}, queue_max={self._queue_max})"

    def submit(self, requests: Sequence[IoRequest]) -> int:
        """See `IoEngine`."""
        taken = 0
        for operation, group in itertools.groupby(requests, _OPERATION):
            batch = list(group)
            if len(batch) > (room := self.room(operation)):
                requests, batch = (), batch[:room]
            if batch:
                lane = self._lane(operation)
                lane.in_flight += len(batch)
                lane.push(batch)
                taken += len(batch)
            if not requests:
                break
        return taken

    def room(self, operation: Operation) -> int:
        """See `IoEngine`."""
        lane = self._lane(operation)
        return self._queue_max - lane.in_flight if lane.hire() else 0

    @property
    def in_flight(self) -> int:
        """See `IoEngine`."""
        return self._reads.in_flight + self._writes.in_flight

    def poll(self) -> list[IoResult]:
        """See `IoEngine`."""
        return self._outcomes.poll()

    def register_memory(self, memory: memoryview) -> None:
        """See `IoEngine`."""
        self._writes.register_memory(memory)

    def cancel(self, operation: Operation) -> None:
        """See `IoEngine`."""
        lane = self._lane(operation)
        if tags := lane.cancel():
            self._outcomes.add(lane, [IoResult(tag, 0, errno.ECANCELED, None, 0) for tag in tags])

    def close(self, deadline_s: float) -> int:
        """See `IoEngine`. What has not started by then is dropped without a result; results can still be polled."""
        end = time.monotonic() + deadline_s
        return sum([lane.close(end) for lane in (self._reads, self._writes)])

    def _lane(self, operation: Operation) -> Lane:
        return self._reads if operation is Operation.READ else self._writes


_OPERATION = operator.itemgetter(0)
