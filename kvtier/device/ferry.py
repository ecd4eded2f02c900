"""The ferry of a device: rows between its memory and landing places in host memory that it has mapped.

Rows that go up and rows that go down have a lane each, since devices copy both ways at once. Knows neither shelves nor
hashes. Made by the arena for each shelf; engine thread.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvtier.device.copies import Copies, make_lane
from kvtier.device.fence_watch import FenceWatch
from kvtier.tiers.memory import address_of, advise_huge, check_memory, populate

if TYPE_CHECKING:
    from kvtier.device.arena import DeviceArena

CLOSE_PAUSE_S = 0.001


class DeviceFerry:
    """`Ferry` over `Copies`."""

    def __init__(self, arena: DeviceArena, place_count: int, wake: Callable[[], None]) -> None:
        row_bytes = arena.layout.row_bytes
        size_bytes = place_count * row_bytes
        check_memory("tiers.dram.bytes", size_bytes)
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge(mapping)
        populate(mapping)
        self.memory = memoryview(mapping)
        self._arena = arena
        self._window = arena.window(address_of(mapping), len(mapping))
        with torch.inference_mode(False):
            self._places = torch.frombuffer(mapping, dtype=torch.uint8).view(place_count, row_bytes)
        self._watch = FenceWatch(wake)
        self._copies = {
            upward: Copies(make_lane(arena.device), place_count, self._watch.watch) for upward in (True, False)
        }
        self._place_of: dict[tuple[bool, int], int] = {}

    def start(self, place: int, slot: int, upward: bool) -> None:
        """See `Ferry`."""
        near, far = self._arena.row(slot), self._places[place]
        ticket = self._copies[upward].start([(near, far) if upward else (far, near)])
        self._place_of[(upward, ticket)] = place

    def ended(self) -> list[int]:
        """See `Ferry`."""
        return [
            self._place_of.pop((upward, ticket)) for upward, copies in self._copies.items() for ticket in copies.poll()
        ]

    def close(self, deadline_s: float) -> bool:
        """See `Ferry`."""
        end = time.monotonic() + deadline_s
        self.ended()
        while self._place_of:
            if time.monotonic() >= end:
                return False
            time.sleep(CLOSE_PAUSE_S)
            self.ended()
        self._watch.close()
        self._window.close()
        return True
