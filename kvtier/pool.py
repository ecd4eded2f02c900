"""Slots of HBM: which are free and how many holders each of the others has.

Pure counts, single-threaded, owned by the store. Knows neither hashes nor bytes; a holder is a sequence or a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence


class SlotPool:
    """`slot_count` slots with counted holds: each is free, held (count > 0) or idle (count 0, kept for its content)."""

    def __init__(self, slot_count: int) -> None:
        assert slot_count > 0
        self.slot_count = slot_count
        self._free = list(range(slot_count - 1, -1, -1))
        self._holds = [0] * slot_count

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free slots, each with one hold. The caller has checked `free_count`."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            assert self._holds[slot] == 0
            self._holds[slot] = 1
        return slots

    def retain(self, slots: Sequence[int]) -> None:
        """One more hold on each."""
        for slot in slots:
            self._holds[slot] += 1

    def release(self, slots: Sequence[int]) -> list[int]:
        """One hold less on each; returns those that nobody holds any more. They are idle, not free: see `free`."""
        idle = []
        for slot in slots:
            assert self._holds[slot] > 0, f"slot {slot} released more often than held"
            self._holds[slot] -= 1
            if self._holds[slot] == 0:
                idle.append(slot)
        return idle

    def free(self, slots: Sequence[int]) -> None:
        """Give idle slots back."""
        for slot in slots:
            assert self._holds[slot] == 0
            self._free.append(slot)

    def holds(self, slot: int) -> int:
        """Number of holders of a slot."""
        return self._holds[slot]

    def check(self) -> None:
        """Assert that the books add up."""
        assert len(set(self._free)) == len(self._free)
        assert all(self._holds[slot] == 0 for slot in self._free)
        assert min(self._holds) >= 0
