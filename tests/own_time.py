"""A clock for bounds on a busy machine: it stands still while the machine lets nothing of this process run.

A thread counts ticks, and one that comes late counts no more than one in time. So what takes longer only because others
run takes no longer by it, and whoever really waits is seen to wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.01


class OwnTime:
    """Seconds that this process has had since the clock began; never more than have passed."""

    def __init__(self) -> None:
        self._ticks = 0
        self._over = threading.Event()

    @property
    def seconds(self) -> float:
        """For differences."""
        return self._ticks * TICK_S

    def run(self) -> None:
        """Count until it is over."""
        while not self._over.wait(TICK_S):
            self._ticks += 1

    def end(self) -> None:
        """Count no more."""
        self._over.set()


@contextmanager
def own_time() -> Iterator[OwnTime]:
    """A clock that runs meanwhile."""
    clock = OwnTime()
    thread = threading.Thread(target=clock.run, name="own-time", daemon=True)
    thread.start()
    try:
        yield clock
    finally:
        clock.end()
        thread.join()
