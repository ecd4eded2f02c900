"""The device that check_gpu works on, or the CPU in its place for a rehearsal."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvtier.attention.triton_kernel import TritonKernelAttention
from kvtier.device.launcher import CudaLauncher
from kvtier.device.mapped import MappedHost, cuda_runtime


@dataclass
class Machine:
    """A device, its kernels, and how to wait for it and to give it host memory."""

    device: torch.device
    name: str
    backend: TritonKernelAttention = field(default_factory=TritonKernelAttention)
    launcher: CudaLauncher = field(init=False)

    def __post_init__(self) -> None:
        self.launcher = CudaLauncher(self.device)

    @classmethod
    def cuda(cls) -> Machine:
        """The first GPU."""
        versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        return cls(torch.device("cuda", 0), f"{torch.cuda.get_device_name(0)}, {versions}")

    @classmethod
    def rehearsal(cls) -> Machine:
        """The CPU; its host memory is the device's."""
        return cls(torch.device("cpu"), "rehearsal on the CPU: no speed below means anything")

    @property
    def is_cuda(self) -> bool:
        """Not a rehearsal."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until everything that the device was given has ended."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object], rounds: int) -> float:
        """Of one `action`, the quickest of `rounds` after one to warm up; the device's work included."""
        action()
        taken = []
        for _ in range(rounds):
            self.wait()
            began = time.perf_counter()
            action()
            self.wait()
            taken.append(time.perf_counter() - began)
        return min(taken)

    def map_host(self, byte_count: int) -> HostMemory:
        """Host memory that the device can read."""
        mapping = mmap.mmap(-1, byte_count)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        tensor.fill_(1)  # every page is there before it is registered
        mapped = MappedHost(cuda_runtime(), tensor.data_ptr(), byte_count) if self.is_cuda else None
        return HostMemory(mapping, tensor, mapped)


@dataclass
class HostMemory:
    """Bytes of the host: as memory for I/O, as a tensor for copies, by the device's addresses for kernels."""

    mapping: mmap.mmap
    tensor: torch.Tensor
    mapped: MappedHost | None

    def device_address(self, offset: int) -> int:
        """The device's address of a byte."""
        return self.tensor.data_ptr() + offset if self.mapped is None else self.mapped.device_address(offset)

    def close(self) -> None:
        """No longer the device's."""
        if self.mapped is not None:
            self.mapped.close()
