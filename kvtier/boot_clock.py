"""The time since the machine was started: a clock that nobody can set.

Unlike the monotonic one it goes on while the machine sleeps. Used where a day must be a day whatever becomes of the
wall clock.
"""

from __future__ import annotations

import time


def boot_s() -> float:
    """Seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
