"""Opens the shelves that engines on one cache directory share: seat, line and books, then a `Shelf` over each slab.

The counterpart of `open_dram_shelf` and `open_nvme_shelf` for `sharing: on`. Called at start, and by the store again
while there is no keeper to be had.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.block import KVLayout, Tier
from kvtier.cache_directory import CacheDirectory
from kvtier.config import IoConfig
from kvtier.io.base import SystemCalls
from kvtier.io.threads import ThreadsEngine
from kvtier.keeper.client import KeeperClient
from kvtier.keeper.kept import DRAM, NVME
from kvtier.keeper.link import Link
from kvtier.keeper.seat import Seat
from kvtier.keeper.shared import SharedBooks
from kvtier.shelf import Shelf
from kvtier.shelves import row_format
from kvtier.ticket import ShelfLimits

TIERS = {Tier.DRAM: DRAM, Tier.NVME: NVME}
POLL_S = 0.002
CLOSE_S = 1.0


class SharedShelves:
    """The shelves of one engine on one cache directory. `shelves` is empty until `try_open` has found a keeper."""

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
        limits: ShelfLimits | None = None,
        calls: SystemCalls | None = None,
    ) -> None:
        """`budgets`: bytes of DRAM and NVMe, 0 for off; the first engine's count. ShelfError: the path is of no use."""
        self._form = row_format(layout, namespace)
        self._io = io
        self._wake = wake
        self._limits = limits if limits is not None else ShelfLimits(io.in_flight_max)
        self._calls = calls
        self.seat = Seat(CacheDirectory(path, None), layout, self._form, budgets, policy)
        self.link = Link(KeeperClient(self.seat, wake, linger_s))
        self.books: dict[Tier, SharedBooks] = {}
        self._given: set[Tier] = set()
        self._stuck = False
        self._closed = False
        self.wanted = [tier for tier, index in TIERS.items() if budgets[index]]
        self.shelves: dict[Tier, Shelf] = {}

    @property
    def refusal(self) -> str:
        """Why there is no keeper yet, or what it could not give."""
        return "; ".join(self.seat.notes) or self.link.client.refusal or "the keeper has not answered yet"

    def try_open(self, wait_s: float = 0.0) -> bool:
        """Make the shelves once the keeper has said welcome, waiting up to `wait_s`; whether they are there."""
        end = time.monotonic() + wait_s
        while not self.link.client.seated.is_set():
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_S)
        if not self.shelves:
            self.shelves = {tier: self._make(tier, index) for tier, index in TIERS.items() if index in self.seat.slabs}
        while not all(books.whole for books in self.books.values()) and time.monotonic() < end:
            self.link.pump(time.monotonic())
            time.sleep(POLL_S)
        return True

    def opened(self, tier: Tier) -> Shelf | None:
        """The shelf of a tier, once the keeper has said welcome and the nearer one has been asked for."""
        if self.try_open():
            nearer = itertools.takewhile(lambda other: other is not tier, self.shelves)
            if all(other in self._given for other in nearer):
                self._given.add(tier)
                return self.shelves.get(tier)
        return None

    def close(self) -> None:
        """Close what is open, and hang up."""
        for shelf in list(self.shelves.values()):
            shelf.close(CLOSE_S)
        self._hang_up()

    def _hang_up(self) -> None:
        """End the line and give the number up, once no shelf is open any more."""
        if self.books or self._closed:
            return
        self._closed = True
        ended = self.link.client.close(CLOSE_S)
        self.seat.close(self._stuck or not ended)

    def _make(self, tier: Tier, index: int) -> Shelf:
        shared = self.seat.slabs[index]
        books = SharedBooks(index, shared.slab.slot_count, shared.table, self.link, self._limits.in_flight_max)
        engine = ThreadsEngine(self._io.readers, self._io.writers, self._limits.in_flight_max, self._wake, self._calls)
        self.books[tier] = books

        def close_files(_: float, stuck: int) -> None:
            self._stuck |= stuck > 0
            books.close()
            del self.books[tier]
            self._hang_up()

        return Shelf(tier, self._form, shared.slab, books, engine, self._limits, close_files)
