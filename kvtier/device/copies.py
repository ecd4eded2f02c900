"""Work of a device beside its passes, and copies of rows that nobody waits for: started, then polled for their end.

On a CUDA device a lane is a stream of its own, and an event behind each piece of work tells that it has ended; on the
CPU work has ended when it was started. Knows bytes only. Used from one thread.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source): of one dtype and length."""


class Fence(Protocol):
    """A place in the order of a device's work."""

    def query(self) -> bool:
        """Whether everything before it has ended."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Lane(Protocol):
    """Where work runs beside that of the current stream, in the order in which it is started."""

    def here(self) -> Fence:
        """The fence behind everything that the current stream has been given so far."""

    def run(self, work: Callable[[], None], after: Fence | None) -> Fence:
        """Give it work, to begin once `after` is passed; returns the fence behind it. This thread goes on."""

    def join(self, fence: Fence) -> None:
        """Let the current stream's next work wait for the fence; this thread goes on."""


class _Passed:
    """The fence behind work that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostLane:
    """`Lane` of the CPU."""

    def here(self) -> Fence:
        return _Passed()

    def run(self, work: Callable[[], None], after: Fence | None) -> Fence:
        assert after is None or after.query()
        work()
        return _Passed()

    def join(self, fence: Fence) -> None:
        assert fence.query()


class CudaLane:
    """`Lane` on a stream of its own. Host memory that is copied must be pinned, or each copy waits for itself."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def here(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def run(self, work: Callable[[], None], after: Fence | None) -> Fence:
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            self._stream.wait_event(after)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            work()
            event.record(self._stream)
        return event

    def join(self, fence: Fence) -> None:
        assert isinstance(fence, torch.cuda.Event)
        torch.cuda.current_stream(self._stream.device).wait_event(fence)


def make_lane(device: torch.device) -> Lane:
    """A lane of `device`."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


def copy_all(pairs: Sequence[Pair]) -> None:
    """On the current stream."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


class Copies:
    """Batches of copies under way, at most `in_flight_max`; what they use belongs to them until `poll` names them."""

    def __init__(self, lane: Lane, in_flight_max: int, watch: Callable[[Fence], None] | None = None) -> None:
        """`watch` is given the fence behind each batch."""
        assert in_flight_max > 0
        self._watch = watch
        self._lane = lane
        self._in_flight_max = in_flight_max
        self._numbers = itertools.count(1)
        self._flights: deque[tuple[int, Fence]] = deque()

    @property
    def room(self) -> int:
        """How many more batches may be started now."""
        return self._in_flight_max - len(self._flights)

    def start(self, pairs: Sequence[Pair]) -> int:
        """Start a batch behind what the current stream has been given; there must be room. Returns its ticket."""
        assert self.room > 0
        assert all(target.nbytes == source.nbytes for target, source in pairs)
        ticket = next(self._numbers)
        fence = self._lane.run(functools.partial(copy_all, pairs), self._lane.here())
        self._flights.append((ticket, fence))
        if self._watch is not None:
            self._watch(fence)
        return ticket

    def poll(self) -> list[int]:
        """Tickets of batches that have ended since the last call, oldest first. Never waits."""
        ended: list[int] = []
        while self._flights and self._flights[0][1].query():
            ended.append(self._flights.popleft()[0])
        return ended

    def close(self) -> None:
        """Wait for what is under way."""
        while self._flights:
            self._flights.popleft()[1].synchronize()
