"""Rows of a device on their way between their slots and landing places in host memory, for the transfers of one shelf.

Owns which places are taken; half of them are for reads and half for writes, so that hung writes never keep a read from
landing. Knows neither records nor files. Owned by `RowTransfers`, on its thread.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtier.tiers.arena import Ferry


class Crossing(NamedTuple):
    """A row between a slot and a landing place."""

    place: int
    slot: int


class Crossings:
    """See the module."""

    def __init__(self, ferry: Ferry, row_bytes: int) -> None:
        self._ferry = ferry
        self._row_bytes = row_bytes
        place_count = ferry.memory.nbytes // row_bytes
        half = place_count // 2
        assert half > 0, place_count
        self._free = {True: list(range(half)), False: list(range(half, place_count))}
        self._half = half
        self._place_count = place_count
        self.under_way: dict[int, Crossing] = {}
        """Copies that have not ended, by place."""

    def room(self, upward: bool) -> int:
        """How many more rows may be taken on their way."""
        return len(self._free[upward])

    def take(self, slot: int, upward: bool) -> Crossing:
        """A landing place for a row; there must be one."""
        return Crossing(self._free[upward].pop(), slot)

    def view(self, crossing: Crossing) -> memoryview:
        """Its landing place."""
        start = crossing.place * self._row_bytes
        return self._ferry.memory[start : start + self._row_bytes]

    def start(self, crossing: Crossing, upward: bool) -> None:
        """Copy the row to where it is going; place and slot are the copy's until `ended` names them."""
        assert crossing.place not in self.under_way
        self.under_way[crossing.place] = crossing
        self._ferry.start(crossing.place, crossing.slot, upward)

    def ended(self) -> list[Crossing]:
        """Copies that have ended since the last call."""
        if not self.under_way:
            return []
        return [self.under_way.pop(place) for place in self._ferry.ended()]

    def give(self, crossing: Crossing) -> None:
        """The place is free again; neither copy nor I/O uses it any more."""
        assert crossing.place not in self.under_way
        self._free[crossing.place < self._half].append(crossing.place)

    def check(self, flying: int) -> None:
        """Assert that no place is lost: `flying` transfers have one each."""
        free = [*self._free[True], *self._free[False]]
        assert len(set(free)) == len(free) == self._place_count - flying, "a landing place is lost"
        assert not self.under_way.keys() & set(free)

    def close(self, deadline_s: float) -> bool:
        """Let copies end, up to the deadline, and give the memory back; False: some hang, and keep it."""
        return self._ferry.close(deadline_s)
