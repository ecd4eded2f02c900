"""Rings the engine's bell when copies have ended: a thread waits for their fences, one after the other.

Without it an engine that has nothing else to do would sleep on. What a fence says is read by whoever polls, not here.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.device.copies import Fence


class FenceWatch:
    """Any thread may call `watch` and `close`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called from any thread."""
        self._wake = wake
        self._fences: queue.SimpleQueue[Fence | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kvtier-copies", daemon=True).start()

    def watch(self, fence: Fence) -> None:
        """Ring once it is passed."""
        if fence.query():
            self._wake()
        else:
            self._fences.put(fence)

    def close(self) -> None:
        """End the thread once the fences before are passed."""
        self._fences.put(None)

    def _run(self) -> None:
        while (fence := self._fences.get()) is not None:
            with contextlib.suppress(RuntimeError):  # the device has failed: the poll that follows meets it, too
                fence.synchronize()
            self._wake()
