"""Staging memory: slices that lie near for one use, in runs of consecutive layers.

Owns the memory and which of it is taken, not by whom. Asked for at start, so that nothing can fail or stall later.
Called by the stager, engine thread.
"""

from __future__ import annotations

import mmap

from kvtier.byte_text import needed_text
from kvtier.errors import ConfigError
from kvtier.tiers.arena import Arena, Window
from kvtier.tiers.memory import address_of, advise_huge, check_memory, populate


class StagingMemory:
    """As many units of one slice as fit the budget, taken in runs and given back as they were taken."""

    def __init__(self, budget_bytes: int, unit_bytes: int, key: str = "tiers.dram.staging_bytes") -> None:
        """Raises ConfigError, naming `key`, if that much memory is not free. It must hold one unit."""
        self.unit_bytes = unit_bytes
        self.unit_count = budget_bytes // unit_bytes
        self.bytes_total = self.unit_count * unit_bytes
        assert self.unit_count > 0, budget_bytes
        check_memory(key, self.bytes_total)
        try:
            mapping = mmap.mmap(-1, self.bytes_total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            advise_huge(mapping)
            populate(mapping)
        except OSError as error:
            raise ConfigError(f"{key}: {needed_text(self.bytes_total)} of memory refused ({error.strerror})") from None
        self._address = address_of(mapping)
        self._window: Window | None = None
        self._view = memoryview(mapping)
        self._taken = bytearray(self.unit_count)
        self._next = 0

    def __repr__(self) -> str:
        return f"StagingMemory(taken={self.taken_count}, units={self.unit_count}, unit_bytes={self.unit_bytes})"

    def serve(self, arena: Arena) -> None:
        """Let the passes over this HBM reach it."""
        self._window = arena.window(self._address, self.bytes_total)

    @property
    def address(self) -> int:
        """Where passes find the first unit."""
        return self._address if self._window is None else self._window.address

    @property
    def taken_count(self) -> int:
        """Units that somebody has."""
        return self._taken.count(1)

    def take(self, count: int) -> int | None:
        """The first unit of a free run of `count`, or None. Looks behind the last one first: memory goes round."""
        run = bytes(count)
        start = self._taken.find(run, self._next)
        if start < 0:
            start = self._taken.find(run)
            if start < 0:
                return None
        self._next = start + count
        self._taken[start : start + count] = b"\1" * count
        return start

    def give(self, start: int, count: int) -> None:
        """A run as it was taken is free again; no I/O may use it any more."""
        assert self._taken.find(0, start, start + count) < 0, (start, count)
        self._taken[start : start + count] = bytes(count)

    def view(self, start: int, count: int) -> memoryview:
        """A run as writable bytes. The memory lives at least as long as the view."""
        return self._view[start * self.unit_bytes : (start + count) * self.unit_bytes]

    def close(self) -> None:
        """No pass reaches it any more."""
        if self._window is not None:
            self._window.close()
