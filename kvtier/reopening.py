"""Shelves that are away: not opened yet, or without their files. Opens them, again and again, on a thread.

Owns who is wanted and when the next try is due; a shelf that is gone is closed before its successor is opened. Opening
and closing may wait for a disk, the engine thread never does. Owned by the store, called on the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.block import Tier
from kvtier.errors import ConfigError
from kvtier.process_limits import what_is_short
from kvtier.shelf import Shelf

_log = logging.getLogger(__name__)

RETRY_S = 5.0
"""How often a shelf that could not be opened is tried again."""

LATE_CLOSE_S = 10.0
"""What a shelf that nobody wants any more gets to bring its journal to an end, so that the lock is given up."""

ShelfOpener = Callable[[], Shelf | None]


class ShelfSource(Protocol):
    """Where shelves come from that others have a say in: they come late, are lost, and others come in their place."""

    def poll(self, now: float) -> list[Shelf]:
        """Shelves that are there since the last call. Returns at once. Engine thread."""


class Reopening:
    """See the module."""

    def __init__(self) -> None:
        self._openers: dict[Tier, ShelfOpener] = {}
        self._wanted: list[Tier] = []
        self._leaving: list[Shelf] = []
        self._opened: queue.SimpleQueue[tuple[Tier | None, Shelf | None]] = queue.SimpleQueue()
        self._opening = False
        self._short = False
        """The last opener could not be sent off."""
        self._awaited = False
        self._failure: Exception | None = None
        self._retry_at = 0.0
        self._closed = False
        self._close_lock = threading.Lock()

    def know(self, tier: Tier, opener: ShelfOpener) -> None:
        """How to open a tier's shelf, should it get lost."""
        self._openers[tier] = opener

    def want(self, tier: Tier, opener: ShelfOpener) -> None:
        """A shelf that is not there: `opener` is called every `RETRY_S` until it returns one."""
        self.know(tier, opener)
        self._wanted.append(tier)

    def knows(self, tier: Tier) -> bool:
        """Whether a shelf of this tier could be opened again."""
        return tier in self._openers

    def replace(self, shelves: Sequence[Shelf], at: float = 0.0) -> None:
        """Close shelves that nobody uses any more and nothing is in flight on, and open others if it is known how.

        Not before `at`.
        """
        self._leaving += shelves
        self._wanted += [shelf.tier for shelf in shelves if shelf.tier in self._openers]
        self._retry_at = at

    def add(self, shelves: Sequence[Shelf], add: Callable[[Shelf], None], now: float) -> None:
        """`add` shelves that have come; what the device cannot reach (ConfigError) is done without, and replaced."""
        for shelf in shelves:
            try:
                add(shelf)
            except ConfigError as error:
                _log.warning("serving without the %s shelf: %s", shelf.tier.value, error)
                self.replace([shelf], now + RETRY_S)

    def wait(self, wait_s: float) -> list[Shelf]:
        """Send the next opener off and wait for its end; what it has opened by then. Not on the engine thread.

        Raises what the opener raises meanwhile, such as ConfigError.
        """
        now = time.monotonic()
        self._retry_at = now + RETRY_S
        self._awaited = True
        self._send_off()
        if self._opening:
            with contextlib.suppress(queue.Empty):
                self._opened.put(self._opened.get(timeout=wait_s))
        self._awaited = False
        if self._failure is not None:
            raise self._failure
        return self.opened(now)

    def opened(self, now: float) -> list[Shelf]:
        """Shelves that are there again; sends the next opener off."""
        found: list[Shelf] = []
        while not self._opened.empty():
            tier, shelf = self._opened.get()
            self._opening = False
            if shelf is None:
                self._wanted += [tier] if tier is not None else []  # the next one's turn comes next
            else:
                self._retry_at = 0.0
                found.append(shelf)
        if (self._wanted or self._leaving) and not self._opening and now >= self._retry_at:
            self._retry_at = now + RETRY_S
            self._send_off()
        return found

    def close(self) -> list[Shelf]:
        """Open no more; returns what has been opened and not been taken, and what was to be closed."""
        with self._close_lock:
            self._closed = True
        found, self._leaving = self._leaving, []
        while not self._opened.empty():
            _, shelf = self._opened.get()
            found += [shelf] if shelf is not None else []
        return found

    def _send_off(self) -> None:
        """Start the next opener; with no more threads to be had it stays the next."""
        tier, leaving = self._wanted[0] if self._wanted else None, self._leaving
        try:
            threading.Thread(target=self._open, args=(tier, leaving), name="kvtier-opener", daemon=True).start()
        except RuntimeError as error:
            if not self._short:
                _log.warning("a shelf cannot be opened now, trying again: %s", what_is_short(error) or error)
            self._short = True
            return
        self._short = False
        self._opening, self._leaving = True, []
        del self._wanted[:1]

    def _open(self, tier: Tier | None, leaving: Sequence[Shelf]) -> None:
        """Opener thread: a shelf opened for a store that has been closed meanwhile is closed again."""
        shelf = None
        try:
            for gone in leaving:
                gone.close(LATE_CLOSE_S)
            shelf = self._openers[tier]() if tier is not None else None
        except Exception as error:  # of configuration, or a bug: for whoever waits, else the thread's own
            if not self._awaited:
                raise
            self._failure = error
        finally:
            with self._close_lock:
                late = self._closed
                if not late:
                    self._opened.put((tier, shelf))
            if late and shelf is not None:
                shelf.close(LATE_CLOSE_S)
