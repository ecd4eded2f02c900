"""An arena whose rows are reached by copies that come late: bytes move polls after a copy was started, in any order.

Until then its target holds 0xFF (NaN), so whoever uses a row or a landing place too early is seen by its bytes; and
whoever lets go of a source too early has others' bytes copied. The rows themselves lie in an `HbmArena`.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable

from kvtier.block import DeviceRow, KVLayout
from kvtier.device.host import HostDevice
from kvtier.tiers.hbm import HbmArena, HostWindow


class LateFerry:
    """`Ferry` with real bytes, moved within `ended`."""

    def __init__(self, rows: HbmArena, place_count: int, chance: random.Random, wake: Callable[[], None]) -> None:
        self.memory = memoryview(mmap.mmap(-1, place_count * rows.layout.row_bytes))
        self.waiting: list[tuple[int, int, bool]] = []
        self.late_count = 0
        """Copies that were still under way when they were asked for."""
        self._rows = rows
        self._chance = chance
        self._wake = wake

    def start(self, place: int, slot: int, upward: bool) -> None:
        assert all(place != other for other, _, _ in self.waiting), "two copies have one landing place"
        self.waiting.append((place, slot, upward))
        target = self._rows.view(slot) if upward else self._place(place)
        target[:] = b"\xff" * target.nbytes
        self._wake()

    def ended(self) -> list[int]:
        self._chance.shuffle(self.waiting)
        count = self._chance.randrange(len(self.waiting) + 1)
        moving, self.waiting = self.waiting[:count], self.waiting[count:]
        self.late_count += len(self.waiting)
        self._move(moving)
        if self.waiting:
            self._wake()
        return [place for place, _, _ in moving]

    def close(self, deadline_s: float) -> bool:  # noqa: ARG002
        self._move(self.waiting)
        self.waiting = []
        return True

    def _move(self, copies: list[tuple[int, int, bool]]) -> None:
        for place, slot, upward in copies:
            near, far = self._rows.view(slot), self._place(place)
            if upward:
                near[:] = far
            else:
                far[:] = near

    def _place(self, place: int) -> memoryview:
        row_bytes = self._rows.layout.row_bytes
        return self.memory[place * row_bytes : (place + 1) * row_bytes]


class LateDevice(HostDevice):
    """The CPU with such an arena as its HBM."""

    lands_rows = True

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def arena(self, layout: KVLayout, slot_count: int, landing_count: int, wake: Callable[[], None]) -> LateArena:
        self.made = LateArena(HbmArena(layout, slot_count), self.seed, landing_count, wake)
        return self.made


class LateArena:
    """`Arena` over the rows of another, which nobody but its ferries reaches."""

    def __init__(
        self, rows: HbmArena, seed: int, landing_count: int = 12, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._landing_count = landing_count
        self.rows = rows
        self.layout, self.slot_count, self.bytes_total = rows.layout, rows.slot_count, rows.bytes_total
        self.ferries: list[LateFerry] = []
        self._chance = random.Random(f"late {seed}")
        self._wake = wake

    @property
    def late_count(self) -> int:
        """Copies that were asked for before they had ended, each as often as it was."""
        return sum(ferry.late_count for ferry in self.ferries)

    @property
    def waiting_count(self) -> int:
        """Copies under way."""
        return sum(len(ferry.waiting) for ferry in self.ferries)

    def address(self, slot: int) -> int:
        return self.rows.address(slot)

    def view(self, slot: int) -> DeviceRow:
        return DeviceRow(slot, self.layout.row_bytes)

    def window(self, address: int, length: int) -> HostWindow:
        return self.rows.window(address, length)

    def ferry(self) -> LateFerry:
        self.ferries.append(LateFerry(self.rows, self._landing_count, self._chance, self._wake))
        return self.ferries[-1]

    def close(self) -> None:
        assert self.waiting_count == 0, "copies are under way"
        self.rows.close()
