"""The device seam: where weights lie and passes run, and all that an engine needs to know of that place.

`HostDevice` is the CPU, `CudaDevice` a GPU. Rows are moved through the arena that a device gives (tiers/arena.py);
assembly and runner know only this. Made once by `make_device`; called at start, then on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvtier.attention import AttentionBackend
from kvtier.block import KVLayout
from kvtier.device.launcher import Launcher
from kvtier.models.ops import Ops
from kvtier.tiers.arena import Arena


class Device(Protocol):
    """A place for weights, rows and passes. Work that it is given is done in the order in which it was given."""

    @property
    def place(self) -> torch.device:
        """For tensors."""

    @property
    def lands_rows(self) -> bool:
        """Rows of its HBM are reached by way of landing places in host memory, which come out of DRAM's bytes."""

    @property
    def launcher(self) -> Launcher | None:
        """What it can do for passes on its own time; None: it has done what it is given when the call returns."""

    def free_bytes(self) -> int:
        """Of the memory that HBM is taken from."""

    def kernels(self, attention: str, threads: int, head_dim: int) -> tuple[AttentionBackend, Ops]:
        """Attention by its name in the configuration, and operations to go with it. Raises ConfigError."""

    def arena(self, layout: KVLayout, slot_count: int, landing_count: int, wake: Callable[[], None]) -> Arena:
        """HBM, with so many landing places for each shelf. ConfigError if that memory is not free.

        `wake` is called, from any thread, when copies of rows may have ended.
        """

    def enter(self) -> None:
        """This thread is about to give it work."""

    def finish(self) -> None:
        """Wait until it has done all that it was given: what passes have used may be used for something else."""
