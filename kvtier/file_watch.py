"""Looks once a second whether an open shelf's files are still those of their names, and whole.

A thread of its own, because a look may hang with the disk. What it finds is told once and for good: whoever owns the
files closes them and opens others. Knows not what is in them. Used by shelves.py and the keeper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

WATCH_S = 1.0


class FileWatch:
    """See the module. `gone` may be read from any thread."""

    def __init__(self, is_well: Callable[[], bool], wake: Callable[[], None]) -> None:
        """`is_well` is asked on the watch's thread; `wake` is called there once the answer was no."""
        self.gone = False
        self._is_well = is_well
        self._wake = wake
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvtier-file-watch", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> bool:
        """Look no more; False if a look hangs (the thread is left behind)."""
        self._ended.set()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            if not self._is_well():
                self.gone = True
                self._wake()
                return
