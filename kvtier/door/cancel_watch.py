"""One thread that asks, for every request in flight, whether its client has gone: Triton tells nobody.

Owns the thread and the list of who is asked. Does not know the Triton server: a delivery asks its own response sender
and cancels its own request. Made by model.py.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

_log = logging.getLogger(__name__)

POLL_S = 0.05
"""How often clients are asked whether they have gone."""
SHARE = 0.05
"""Share of one thread that asking may take (about 22 us a request)."""


class Watched(Protocol):
    """A request on its way to a client."""

    def gone(self) -> bool:
        """Whether there is nothing left to ask about; cancels the request if its client has gone."""


class CancelWatch:
    """Asks until told otherwise. `add` and `close` may be called from any thread."""

    def __init__(self, poll_s: float = POLL_S) -> None:
        """Start the thread, which asks every `poll_s` seconds, or less often if there are many."""
        self._poll_s = poll_s
        self._watched: list[Watched] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-cancel", daemon=True)
        self._thread.start()

    def add(self, delivery: Watched) -> None:
        """Ask about this request from now on."""
        with self._lock:
            self._watched.append(delivery)

    def close(self, deadline_s: float) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.wait(pause_s):
            started = time.monotonic()
            with self._lock:
                asked, self._watched = self._watched, []
            left = [delivery for delivery in asked if not _gone(delivery)]
            with self._lock:
                self._watched += left
            pause_s = max(self._poll_s, (time.monotonic() - started) / SHARE)


def _gone(delivery: Watched) -> bool:
    """As `Watched.gone`. One that cannot be asked is not asked again: its answer goes on, and so does the watch."""
    try:
        return delivery.gone()
    except Exception:  # the server's own code: it must not cost the other requests their watch
        _log.exception("a request cannot be asked whether its client has gone")
        return True
