"""When rows expire: slots in the order of their time, so that a sweep costs nothing while nothing is due.

Reads no clock. Owned by the index of HBM, by the directory of a shelf and by an engine's mirror of one.
"""

from __future__ import annotations

import heapq

_SLACK = 64
"""Stale entries that are always allowed."""


class Expiries:
    """Unix seconds at which the row of a slot expires. See the module."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        """(time, slot), some of them stale."""

    def __len__(self) -> int:
        return len(self._at)

    def put(self, slot: int, expiry_s: int) -> None:
        """The row in a slot expires then and at no other time; 0: never."""
        if expiry_s == 0:
            self._at.pop(slot, None)
        elif self._at.get(slot) != expiry_s:
            self._at[slot] = expiry_s
            heapq.heappush(self._heap, (expiry_s, slot))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, of) for of, at in self._at.items()]
            heapq.heapify(self._heap)

    def take(self, unix_s: float) -> list[int]:
        """Slots whose time has come, each once; they have none any more."""
        due: list[int] = []
        heap, at = self._heap, self._at
        while heap and heap[0][0] <= unix_s:
            expiry_s, slot = heapq.heappop(heap)
            if at.get(slot) == expiry_s:
                del at[slot]
                due.append(slot)
        return due

    def at(self, slot: int) -> int:
        """When the row of a slot expires; 0: never."""
        return self._at.get(slot, 0)

    def check(self) -> None:
        """Assert that every time is on the heap, and that the heap is bounded."""
        assert {(at, slot) for slot, at in self._at.items()} <= set(self._heap)
        assert len(self._heap) <= 2 * len(self._at) + _SLACK
