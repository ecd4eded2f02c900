"""A clock for bounds on a busy machine: it stands still while the machine lets nothing of this process run.

A thread counts ticks, and one that comes late counts no more than one in time. So what takes longer only because others
run takes no longer by it, and whoever really waits is seen to wait. `starved_s` is what the scheduler says of that.
"""

from __future__ import annotations

import contextlib
import os
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


def starved_s(process: int | str = "self") -> float:
    """How long the threads of a process together were ready to run and got no CPU; for differences.

    0 where the kernel does not say. Threads that have ended are not in it any more, so a difference may be negative.
    """
    starved_ns = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(tasks := f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"{tasks}/{thread}/schedstat") as told:
                starved_ns += int(told.read().split()[1])
    return starved_ns / 1e9


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
