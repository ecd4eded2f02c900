"""The bell that the engine thread sleeps on: one for all that could wake it.

Knows nothing of who rings or why. Made by the engine, rung by intake, cancellations and the shelves' workers.
"""

from __future__ import annotations

import threading


class Bell:
    """See the module."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung = False

    def ring(self) -> None:
        """End the current or next `wait`. Any thread."""
        with self._condition:
            self._rung = True
            self._condition.notify()

    def wait(self, timeout_s: float) -> None:
        """Sleep until rung, or for `timeout_s`. Engine thread."""
        with self._condition:
            if not self._rung:
                self._condition.wait(timeout_s)
            self._rung = False
