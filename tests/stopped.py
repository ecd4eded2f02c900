"""Stops a process while something is tried beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

STOP_S = 60.0


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """SIGSTOP it, wait until none of its threads runs any more, and let it go on at the end.

    The signal alone returns before the threads stand still: on a crowded machine one may yet answer a greeting.
    """
    os.kill(process, signal.SIGSTOP)
    try:
        end = time.monotonic() + STOP_S
        while not _stands_still(process):
            assert time.monotonic() < end, "it does not stop"
            time.sleep(0.002)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def _stands_still(process: int) -> bool:
    """Whether all threads are stopped: their state is the first word behind the name, which may hold anything."""
    texts = [(task / "stat").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)
