"""The HBM arena of a CPU-only machine: a private, populated run of memory cut into rows.

Owns the memory and the addresses of its slots, not who uses them (pool.py does). Rows are 4 KiB aligned, so shelves
read and write them directly. Allocated once at start; called from the engine thread.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from kvtier.block import KVLayout
from kvtier.byte_text import needed_text
from kvtier.errors import ConfigError
from kvtier.tiers.memory import address_of, advise_huge, check_memory, populate


@dataclass(frozen=True, slots=True)
class HostWindow:
    """`Window` of passes on the CPU, which reach all memory of the process."""

    address: int

    def close(self) -> None:
        """See `Window`."""


class HbmArena:
    """`Arena` in anonymous memory, huge pages where the kernel gives them."""

    def __init__(self, layout: KVLayout, slot_count: int, key: str = "tiers.hbm.bytes") -> None:
        """Raises ConfigError, naming `key`, if that much memory is not free."""
        assert slot_count > 0
        self.layout = layout
        self.slot_count = slot_count
        self.bytes_total = slot_count * layout.row_bytes
        check_memory(key, self.bytes_total)
        try:
            mapping = mmap.mmap(-1, self.bytes_total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            advise_huge(mapping)
            populate(mapping)
        except OSError as error:
            raise ConfigError(f"{key}: {needed_text(self.bytes_total)} of memory refused ({error.strerror})") from None
        self._address = address_of(mapping)
        self._view: memoryview | None = memoryview(mapping)

    def __repr__(self) -> str:
        return f"HbmArena(slots={self.slot_count}, row_bytes={self.layout.row_bytes})"

    def address(self, slot: int) -> int:
        """Address of a slot's row; valid until `close`."""
        assert 0 <= slot < self.slot_count and self._view is not None, slot
        return self._address + slot * self.layout.row_bytes

    def view(self, slot: int) -> memoryview:
        """A slot's row as writable bytes. The memory lives at least as long as the view."""
        assert 0 <= slot < self.slot_count and self._view is not None, slot
        row_bytes = self.layout.row_bytes
        return self._view[slot * row_bytes : (slot + 1) * row_bytes]

    def window(self, address: int, length: int) -> HostWindow:
        """See `Arena`."""
        assert length > 0
        return HostWindow(address)

    def ferry(self) -> None:
        """See `Arena`: shelves reach rows themselves."""

    def close(self) -> None:
        """Give the memory back, once the last view of a row is gone too."""
        self._view = None
