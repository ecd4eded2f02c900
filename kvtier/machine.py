"""The rates of this machine that bound a plan or a benchmark: memory, disk, arithmetic. Measured, never looked up.

Knows neither tiers nor models. Each function takes a second or two; the best of a few tries is the rate. Used by
`kvtier plan` and the benchmarks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kvtier.models.huge_tensors import HugeTensors

BUFFER_BYTES = 1 << 30
"""More than any cache holds."""
TRIES = 5


def cpu_name() -> str:
    """The processor as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


class MemoryRead:
    """Reads memory on huge pages, as fast as this machine can; where there are no kernels, as fast as torch can."""

    def __init__(self, threads: int, size_bytes: int = BUFFER_BYTES) -> None:
        """`size_bytes`: whole MiB, and more than the caches hold. Without kernels torch's threads are used."""
        self.size_bytes = size_bytes
        self._numbers = HugeTensors().empty(size_bytes // 4 // 4096, 4096, dtype=torch.float32).fill_(1.0)
        self._vector = torch.ones(4096)
        try:
            from kvtier._native import Kernels
        except ImportError:
            self._kernels = None
        else:
            self._kernels = Kernels(threads)

    def __call__(self) -> None:
        """Read all of it."""
        if self._kernels is None:
            torch.mv(self._numbers, self._vector)
        else:
            self._kernels.read(self._numbers.data_ptr(), self.size_bytes)


def memory_read_bytes_s() -> float:
    """Bytes a second of a `MemoryRead` with as many threads as torch has."""
    return BUFFER_BYTES / _best_s(MemoryRead(torch.get_num_threads()))


def memory_copy_bytes_s() -> float:
    """Bytes a second of a plain copy on one thread."""
    source, target = np.ones(BUFFER_BYTES // 2, np.uint8), np.zeros(BUFFER_BYTES // 2, np.uint8)
    return source.nbytes / _best_s(lambda: np.copyto(target, source))


def matmul_flops_s(dtype: torch.dtype) -> float:
    """Operations a second of a 512 x 2048 x 2048 product; uses torch's threads."""
    left, right = torch.ones(512, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    return 2 * 512 * 2048 * 2048 / _best_s(lambda: torch.mm(left, right))


def disk_read_bytes_s(folder: Path, row_bytes: int, row_count: int, readers: int) -> float:
    """Bytes a second of direct reads of rows, in order, from a file made in `folder`; 0 if it has no direct I/O."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        block = os.urandom(row_bytes)
        for _ in range(row_count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return 0.0
        buffers: list[mmap.mmap] = []
        try:
            buffers += [mmap.mmap(-1, row_bytes) for _ in range(row_count)]
            with ThreadPoolExecutor(readers) as pool:

                def read_all() -> None:
                    list(pool.map(lambda row: os.preadv(descriptor, [buffers[row]], row * row_bytes), range(row_count)))

                return row_bytes * row_count / _best_s(read_all)
        finally:
            os.close(descriptor)
            for buffer in buffers:
                buffer.close()


def _best_s(action: Callable[[], object]) -> float:
    action()
    times = []
    for _ in range(TRIES):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)
