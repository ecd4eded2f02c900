"""A request whose bytes move in pieces: how far it has come, and what of it is to move next.

For rings, where each piece is a request of its own; threads loop over their calls. Used by uring.py, on its threads.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from kvtier.io.base import INTERRUPTS_MAX, IoRequest, Operation, buffers_after, last_boundary

INTERRUPTIONS = frozenset({errno.EINTR, errno.EAGAIN})


@dataclass(slots=True, eq=False)
class Piecemeal:
    """A request that did not move all its bytes at once."""

    request: IoRequest
    started_ns: int
    moved_bytes: int = 0
    interruptions: int = 0
    """In a row."""
    error: int | None = None

    def goes_on(self, result: int) -> bool:
        """Whether there is more to move after another piece has ended so."""
        if -result in INTERRUPTIONS and self.interruptions < INTERRUPTS_MAX - 1:
            self.interruptions += 1
            return True
        self.interruptions = 0
        if result < 0:
            self.moved_bytes, self.error = 0, -result
        elif self.request.operation is not Operation.SYNC:
            reached = last_boundary(self.moved_bytes) + result
            if reached > self.moved_bytes:
                self.moved_bytes = reached
                return reached < self.request.total_bytes
            self.error = None if self.request.operation is Operation.READ else errno.EIO
        return False

    def rest(self) -> IoRequest:
        """The next piece. It has a `then`, so that no ring makes a result of it."""
        start = last_boundary(self.moved_bytes)
        buffers = tuple(buffers_after(self.request.buffers, start))
        return self.request._replace(offset=self.request.offset + start, buffers=buffers, then=_no_result, sums=None)


def _no_result() -> None:
    raise AssertionError("only the request as a whole has a result")
