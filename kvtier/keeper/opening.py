"""Opens the shelves that engines on one cache directory share: seat, line and books, then a `Shelf` over each slab.

The counterpart of `open_dram_shelf` and `open_nvme_shelf` for `sharing: on`. Gives the store shelves as they can be
had: with the first keeper, later for a tier that was not there, and anew when the old ones are over. Never waits, but
at start. All but the making of a seat on the engine thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.block import KVLayout, Tier
from kvtier.cache_directory import CacheDirectory, layout_name
from kvtier.config import IoConfig
from kvtier.io.base import SystemCalls
from kvtier.keeper.client import KeeperClient
from kvtier.keeper.fields import ROWS_MAX
from kvtier.keeper.link import Link
from kvtier.keeper.seat import Seat
from kvtier.keeper.shared import SharedBooks
from kvtier.keeper.stock import Stock
from kvtier.keeper.wire import DRAM, NVME
from kvtier.shelf import Shelf
from kvtier.shelves import dram_engine, nvme_engine, row_format
from kvtier.terms import STANDARD, Terms
from kvtier.ticket import ShelfLimits

TIERS = {Tier.DRAM: DRAM, Tier.NVME: NVME}
POLL_S = 0.002
CLOSE_S = 1.0


class SharedShelves:
    """The shelves of one engine on one cache directory. `shelves` is empty until there is a keeper."""

    def __init__(
        self,
        layout: KVLayout,
        namespace: bytes,
        path: Path,
        budgets: tuple[int, int],
        io: IoConfig,
        wake: Callable[[], None],
        linger_s: float,
        policy: str,
        *,
        terms: tuple[Terms, Terms] = (STANDARD, STANDARD),
        limits: ShelfLimits | None = None,
        calls: SystemCalls | None = None,
    ) -> None:
        """`budgets`: bytes of DRAM and NVMe, 0 for off. They, `terms` and `policy` count for the first engine.

        ShelfError: the path is of no use.
        """
        self._form = form = row_format(layout, namespace)
        self._io = io
        self._wake = wake
        self._limits = limits if limits is not None else ShelfLimits(io.in_flight_max)
        self._calls = calls

        def make_seat() -> Seat:
            return Seat(CacheDirectory(path, None), layout_name(layout), form, budgets, policy, terms)

        self.link = Link(KeeperClient(make_seat, wake, linger_s), self._seated, self._over)
        self.books: dict[Tier, SharedBooks] = {}
        self.shelves: dict[Tier, Shelf] = {}
        self._fresh: list[Shelf] = []
        self._stuck = False
        self._closing = False

    @property
    def seat(self) -> Seat:
        """The place at the keeper."""
        return self.link.client.seat

    @property
    def refusal(self) -> str:
        """Why there is no keeper yet, or what it could not give."""
        return "; ".join(self.seat.notes) or self.link.client.refusal or "the keeper has not answered yet"

    def poll(self, now: float) -> list[Shelf]:
        """Shelves that are there since the last call. What is lost must be closed before others come."""
        if not self.books:
            self.link.pump(now)  # else the books do that
        fresh, self._fresh = self._fresh, []
        return fresh

    def try_open(self, wait_s: float = 0.0) -> bool:
        """Wait for a keeper and for whole mirrors; whether there is a keeper. `poll` gives the shelves."""
        end = time.monotonic() + wait_s
        while True:
            self.link.pump(time.monotonic())
            if self.link.line is not None and all(books.whole for books in self.books.values()):
                return True
            if time.monotonic() >= end:
                return self.link.line is not None
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close what is open, and hang up."""
        if self._closing:
            return
        self._closing = True
        for shelf in list(self.shelves.values()):
            shelf.close(CLOSE_S)
        ended = self.link.client.close(CLOSE_S)
        self.seat.close(self._stuck or not ended)

    def _seated(self) -> None:
        """The keeper has said welcome: make shelves of what it has given and we have not got."""
        for tier, index in TIERS.items():
            if index in self.seat.slabs and tier not in self.shelves:
                self.shelves[tier] = shelf = self._make(tier, index)
                self._fresh.append(shelf)

    def _over(self) -> None:
        """The shelves are over; with none of them open the seat is free."""
        self._fresh.clear()
        if not self.books:
            self.link.client.vacate()

    def _make(self, tier: Tier, index: int) -> Shelf:
        shared = self.seat.slabs[index]
        slab, batch_max = shared.slab, min(self._limits.in_flight_max, ROWS_MAX)
        stock = Stock(slab.slot_count, batch_max, self.seat.terms[index].day_slots(slab.slot_bytes))
        books = SharedBooks(index, slab.slot_count, shared.table, self.link, stock)
        limits, wake, calls = self._limits, self._wake, self._calls
        make_engine = dram_engine if tier is Tier.DRAM else nvme_engine
        engine = make_engine(shared.slab, self._form, self._io, limits, wake, calls)
        self.books[tier] = books
        close_files = functools.partial(self._closed, tier)
        return Shelf(tier, self._form, slab, books, engine, limits, close_files, lambda: self.link.over)

    def _closed(self, tier: Tier, _: float, stuck: int) -> None:
        """A shelf has been closed."""
        self._stuck |= stuck > 0
        self.books[tier].close(stuck > 0)
        self.link.remove(TIERS[tier])
        self.shelves = {other: shelf for other, shelf in self.shelves.items() if other is not tier}
        del self.books[tier]  # from here on `poll` listens
        if self.link.over and not self.books and not self._closing:
            self.link.client.vacate()
