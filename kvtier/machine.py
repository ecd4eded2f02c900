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

BUFFER_BYTES = 1 << 30
"""More than any cache holds."""
TRIES = 5


def cpu_name() -> str:
    """The processor as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def memory_read_bytes_s() -> float:
    """Bytes a second of a matrix-vector product, which reads its matrix once; uses torch's threads."""
    matrix, vector = torch.ones(BUFFER_BYTES // 4 // 4096, 4096), torch.ones(4096)
    return BUFFER_BYTES / _best_s(lambda: torch.mv(matrix, vector))


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
        buffers = [mmap.mmap(-1, row_bytes) for _ in range(row_count)]
        try:
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
