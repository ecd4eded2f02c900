"""Drains: wishes to push all that nobody holds in a tier down to the next one.

Asked for from any thread, worked off by the engine thread between passes, one after the other. Knows neither sequences
nor requests. Owned by the loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from kvtier.block import Tier
from kvtier.store import Store

DRAIN_S = 60.0
"""How long a drain tries to copy before it lets go without a copy."""


@dataclass(eq=False, slots=True)
class Drain:
    """One wish; `done` is set when nothing is left to push, or nobody works it off any more."""

    tier: Tier
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)


class Drains:
    """See the module. Its length is that of what is left to do."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._drains: deque[Drain] = deque()

    def __len__(self) -> int:
        return len(self._drains)

    def add(self, tier: Tier) -> Drain:
        """Any thread: a wish more."""
        drain = Drain(tier, time.monotonic() + DRAIN_S)
        self._drains.append(drain)
        return drain

    def work_off(self, now: float, closing: bool) -> None:
        """Go on with the first one; what cannot be copied in time, or while the engine is `closing`, is let go of."""
        while self._drains:
            drain = self._drains[0]
            if not self._store.drain(drain.tier, give_up=now > drain.deadline or closing):
                self._store.poll(now)  # starts the writes that the drain wants: their ends ring the bell
                return
            self._drains.popleft()
            drain.done.set()

    def end(self) -> None:
        """Nobody works them off any more."""
        for drain in self._drains:
            drain.done.set()
