"""Rows in the memory of a device: one piece of bytes, allocated at start.

The counterpart of tiers/hbm.py. Owns the memory and the addresses of its slots, not who uses them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier.block import DeviceRow, KVLayout
from kvtier.device.ferry import DeviceFerry
from kvtier.device.mapped import MappedHost, cuda_runtime
from kvtier.device.memory import aligned_bytes
from kvtier.tiers.arena import Window
from kvtier.tiers.hbm import HostWindow


class DeviceArena:
    """`Arena` on `device`, whose rows lie at multiples of 4 KiB."""

    def __init__(
        self,
        layout: KVLayout,
        slot_count: int,
        device: torch.device,
        landing_count: int = 2,
        wake: Callable[[], None] = lambda: None,
        key: str = "tiers.hbm.bytes",
    ) -> None:
        """Raises ConfigError, naming `key`, if the device has not that much memory left.

        Each ferry has `landing_count` places; `wake` is called when copies may have ended.
        """
        assert slot_count > 0
        self.layout = layout
        self.device = device
        self._landing_count = landing_count
        self._wake = wake
        self.slot_count = slot_count
        self.bytes_total = slot_count * layout.row_bytes
        self._rows = aligned_bytes(self.bytes_total, device, key).view(slot_count, layout.row_bytes)

    def address(self, slot: int) -> int:
        """The device's address of a slot's row; valid while the arena lives."""
        return self._rows.data_ptr() + self._checked(slot) * self.layout.row_bytes

    def row(self, slot: int) -> torch.Tensor:
        """A slot's row as uint8 `[byte]` on the device, to copy to or from."""
        return self._rows[self._checked(slot)]

    def view(self, slot: int) -> DeviceRow:
        """See `Arena`."""
        return DeviceRow(self._checked(slot), self.layout.row_bytes)

    def window(self, address: int, length: int) -> Window:
        """See `Arena`. MappingError if the device cannot have this memory."""
        return HostWindow(address) if self.device.type == "cpu" else MappedHost(cuda_runtime(), address, length)

    def ferry(self) -> DeviceFerry:
        """See `Arena`."""
        return DeviceFerry(self, self._landing_count, self._wake)

    def close(self) -> None:
        """See `Arena`: the memory goes with the arena."""

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.slot_count, slot
        return slot
