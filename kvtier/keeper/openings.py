"""Which tiers of which layouts the keeper opens, out of whose budget, and when it tries again.

A tier is opened on a thread of its own, so that nobody waits for another's disk or memory; what fails is tried again
while an engine is there that wants it. Owns the byte totals, which the first engine sets. Called by greeting and
server, on the keeper's thread.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Sequence

from kvtier.keeper.house import House
from kvtier.keeper.kept import KeptLayout, Opening
from kvtier.keeper.takeover import Handover, Opened, make_dram, open_nvme, take_dram
from kvtier.keeper.wire import DRAM, NVME
from kvtier.process_limits import what_is_short

RETRY_S = 5.0
RECOVERING = "waits for an engine of the keeper before this one"


class Openings:
    """See the module."""

    def __init__(self, house: House, done: Callable[[], None]) -> None:
        """`done` is called from a thread when there is something to take in."""
        self._house = house
        self._done = done
        self._totals = [0, 0]
        self._nvme_turn = threading.Lock()
        """One at a time: each counts the bytes that the others have taken on the disk."""
        self._retry_at = 0.0

    def want(
        self, kept: KeptLayout, budgets: Sequence[int], handed: dict[int, Handover], may_make: Collection[int]
    ) -> None:
        """Open what is not there: what is handed over (taken from `handed`), or if it may be, what has a budget."""
        for tier in (DRAM, NVME):
            if tier in kept.opened or tier in kept.openings:
                continue
            brought = handed.pop(tier, None)
            if brought is not None:
                self._start(kept, tier, budgets[tier], brought)
            elif budgets[tier] and tier in may_make:
                self._start(kept, tier, budgets[tier], None)
            elif budgets[tier]:
                kept.note(tier, RECOVERING)

    def retry(self, may_make: Collection[int], now: float) -> None:
        """Every few seconds: open what an engine that is here wants and has not got."""
        if now < self._retry_at:
            return
        self._retry_at = now + RETRY_S
        for kept in self._house.layouts.values():
            for connection in self._house.joined(kept.name):
                self.want(kept, connection.budgets, {}, may_make)

    def take_in(self) -> None:
        """End what has been opened. An engine that misses what is there now is hung up on: it comes again at once."""
        for kept in self._house.layouts.values():
            found = kept.take_in() if kept.openings else []
            for connection in self._house.connections.values() if found else ():
                if connection.layout == kept.name and connection.owner is not None:
                    lacks = (tier not in connection.tiers and connection.budgets[tier] > 0 for tier in found)
                    connection.closing |= any(lacks)

    def _start(self, kept: KeptLayout, tier: int, budget_bytes: int, brought: Handover | None) -> None:
        self._totals[tier] = self._totals[tier] or budget_bytes
        now = time.monotonic()
        budget_bytes = min(budget_bytes, self._totals[tier])
        work: Callable[[], Opened]
        promised_bytes = 0
        if tier == NVME:
            rules = (kept.form, kept.policy, kept.terms[NVME])
            work = functools.partial(open_nvme, self._house.cache, kept.name, *rules, budget_bytes, brought, now)
            work = functools.partial(_in_turn, self._nvme_turn, work)
        elif brought is not None:
            promised_bytes = brought.slot_count * kept.form.slot_bytes
            work = functools.partial(take_dram, kept.form, kept.policy, kept.terms[DRAM], brought, now)
        else:
            promised_bytes = max(0, min(budget_bytes, self._totals[DRAM] - self._dram_bytes()))
            work = functools.partial(make_dram, kept.form, kept.policy, kept.terms[DRAM], promised_bytes)
        try:
            kept.openings[tier] = Opening(work, promised_bytes, self._done)
        except RuntimeError as error:
            if brought is not None:
                brought.close()
            kept.note(tier, what_is_short(error) or str(error))

    def _dram_bytes(self) -> int:
        """What all layouts have of DRAM, will have in a moment or have not given back yet."""
        layouts = self._house.layouts.values()
        there = sum(kept.ledgers[DRAM].slab.total_bytes for kept in layouts if DRAM in kept.opened)
        leaving = sum(kept.leaving_bytes for kept in layouts)
        return there + leaving + sum(kept.openings[DRAM].promised_bytes for kept in layouts if DRAM in kept.openings)


def _in_turn(turn: threading.Lock, work: Callable[[], Opened]) -> Opened:
    with turn:
        return work()
