"""The CPU as a device: what it is given is done when the call returns, and HBM is memory of the process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier.attention import AttentionBackend, make_backend
from kvtier.block import KVLayout
from kvtier.device.launcher import Launcher
from kvtier.models.ops import Ops, make_ops
from kvtier.tiers.hbm import HbmArena
from kvtier.tiers.memory import free_memory_bytes


class HostDevice:
    """`Device` of the CPU."""

    place = torch.device("cpu")
    lands_rows = False
    launcher: Launcher | None = None

    def free_bytes(self) -> int:
        """See `Device`: it is DRAM, too."""
        return free_memory_bytes()

    def kernels(self, attention: str, threads: int, head_dim: int) -> tuple[AttentionBackend, Ops]:
        """See `Device`."""
        backend = make_backend(attention, threads, head_dim)
        return backend, make_ops(backend)

    def arena(self, layout: KVLayout, slot_count: int, landing_count: int, wake: Callable[[], None]) -> HbmArena:  # noqa: ARG002
        """See `Device`: nothing is copied, so nobody is woken."""
        return HbmArena(layout, slot_count)

    def enter(self) -> None:
        """See `Device`."""

    def finish(self) -> None:
        """See `Device`."""
