"""Death at a chosen step: what books do is counted at its entry and exit, and the process kills itself at the nth.

A step is a method of the directory's books that begins or returns: a reservation, its entry in the slot table, its line
for the journal, the answer. Put into a worker or a keeper (tests/nursery.py) before it starts. Nothing else knows it.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from kvtier.journal import Journal
from kvtier.keeper.asked import AskedRows
from kvtier.keeper.connection import Connection
from kvtier.keeper.leases import Leases
from kvtier.keeper.ledger import Ledger
from kvtier.keeper.link import Link
from kvtier.keeper.shared import SharedBooks
from kvtier.keeper.slot_table import SlotTable

KEEPER_STEPS: dict[type, tuple[str, ...]] = {
    Ledger: ("reserve", "publish", "abandon", "drop", "acquire", "release", "reserved", "published", "dropped"),
    SlotTable: ("put",),
    Journal: ("reserved", "published", "dropped"),
    Connection: ("_following",),
}
ENGINE_STEPS: dict[type, tuple[str, ...]] = {
    SharedBooks: ("reserve", "publish", "abandon", "drop", "told", "answered"),
    Leases: ("ask", "end"),
    AskedRows: ("ask", "give"),
    Link: ("send",),
}


class Steps:
    """Counts from when it is armed; at step `kill_at` (from 1; 0: never) this process is gone."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.count = 0
        self.armed = False

    def note(self) -> None:
        """One step."""
        if self.armed:
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, watched: dict[type, tuple[str, ...]]) -> None:
        """Count the calls of these methods, in this process only."""
        for owner, names in watched.items():
            for name in names:
                setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*arguments: Any, **more: Any) -> Any:
            self.note()
            value = method(*arguments, **more)
            self.note()
            return value

        return counted
