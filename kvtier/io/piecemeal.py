"""A request whose bytes move in pieces: how far it has come, and whether it goes on.

For rings, where each piece is a move of its own; threads loop over their calls. Used by uring.py, on its threads.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from kvtier.io.base import INTERRUPTS_MAX, IoRequest, Operation, last_boundary

INTERRUPTIONS = frozenset({errno.EINTR, errno.EAGAIN})


@dataclass(slots=True, eq=False)
class Piecemeal:
    """A request that did not move all its bytes at once."""

    started_ns: int
    moved_bytes: int = 0
    interruptions: int = 0
    """In a row."""
    error: int | None = None

    def goes_on(self, request: IoRequest, result: int) -> bool:
        """Whether there is more to move after another piece has ended so."""
        if -result in INTERRUPTIONS and self.interruptions < INTERRUPTS_MAX - 1:
            self.interruptions += 1
            return True
        self.interruptions = 0
        if result < 0:
            self.moved_bytes, self.error = 0, -result
        elif request.operation is not Operation.SYNC:
            reached = last_boundary(self.moved_bytes) + result
            if reached > self.moved_bytes:
                self.moved_bytes = reached
                return reached < request.total_bytes
            self.error = None if request.operation is Operation.READ else errno.EIO
        return False
