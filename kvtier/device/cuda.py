"""A GPU as a device: weights and HBM in its memory, attention by the Triton-language programs, copies on side streams.

No GPU has run it yet. With the CPU as its place it rehearses: the same calls in the same order, by the interpreter of
the programs, with landing places and copies; so the tests run it. What only CUDA builds of torch have is called late.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtier.attention import AttentionBackend, make_backend
from kvtier.block import KVLayout
from kvtier.device.arena import DeviceArena
from kvtier.device.launcher import CudaLauncher, Launcher
from kvtier.device.ops import DeviceOps
from kvtier.errors import ConfigError
from kvtier.models.ops import Ops
from kvtier.tiers.memory import free_memory_bytes

WAY_OUT = "or set device: cpu"


class CudaDevice:
    """`Device` of one GPU, or of the CPU in its place."""

    lands_rows = True

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.launcher: Launcher | None = CudaLauncher(place)
        self._is_cuda = place.type == "cuda"

    @classmethod
    def find(cls, name: str) -> CudaDevice:
        """The GPU that the configuration calls `name`. ConfigError with what there is instead."""
        if torch.version.cuda is None:
            raise ConfigError(
                f'device: "{name}" needs a build of torch for CUDA, and torch {torch.__version__} is none; '
                f"install one and kvtier[gpu], {WAY_OUT}"
            )
        if not torch.cuda.is_available():
            raise ConfigError(
                f'device: "{name}" needs a GPU, and torch for CUDA {torch.version.cuda} finds none; '
                f"look for the driver and at CUDA_VISIBLE_DEVICES, {WAY_OUT}"
            )
        index, count = torch.device(name).index or 0, torch.cuda.device_count()
        if index >= count:
            there = "cuda:0 is the only GPU" if count == 1 else f"there are {count} GPUs, up to cuda:{count - 1}"
            raise ConfigError(f'device: "{name}" is not there: {there}; choose another, {WAY_OUT}')
        return cls(torch.device("cuda", index))

    def free_bytes(self) -> int:
        """See `Device`."""
        return int(torch.cuda.mem_get_info(self.place)[0]) if self._is_cuda else free_memory_bytes()

    def kernels(self, attention: str, threads: int, head_dim: int) -> tuple[AttentionBackend, Ops]:
        """See `Device`."""
        if attention not in ("auto", "triton_kernel"):
            raise ConfigError(f'attention: "{attention}" runs on the CPU alone; choose auto, {WAY_OUT}')
        if head_dim % 8:
            raise ConfigError(f"model: kernels of a GPU take heads in steps of 8, not {head_dim}; set device: cpu")
        return make_backend("triton_kernel", threads, head_dim), DeviceOps()

    def arena(self, layout: KVLayout, slot_count: int, landing_count: int, wake: Callable[[], None]) -> DeviceArena:
        """See `Device`."""
        return DeviceArena(layout, slot_count, self.place, landing_count, wake)

    def enter(self) -> None:
        """See `Device`."""
        if self._is_cuda:
            torch.cuda.set_device(self.place)

    def finish(self) -> None:
        """See `Device`. Copies on side streams go on."""
        if self._is_cuda:
            torch.cuda.current_stream(self.place).synchronize()
