"""A process that runs out of descriptors or threads: as many of them as a test leaves it, and what it has of both."""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NO_THREAD = "can't start new thread"


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Only so many more can be opened meanwhile."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]  # threads that accept have numbers, too
    for descriptor in opened:
        os.close(descriptor)
    limit = opened[-1]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def threads_left(count: int) -> Iterator[None]:
    """Only so many more can be started from Python meanwhile."""
    begin, left = threading.Thread.start, [count]

    def start(thread: threading.Thread) -> None:
        if left[0] <= 0:
            raise RuntimeError(NO_THREAD)
        left[0] -= 1
        begin(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def descriptors() -> dict[int, str]:
    """What is open, and what it leads to. Others may end meanwhile what they had begun: compare with `<=`."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # that of the list
    return found


def threads() -> Counter[str]:
    """Names of the package's own threads. Compare as `descriptors` are."""
    return Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-"))
