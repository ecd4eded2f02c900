"""Memory for weights: CPU tensors side by side in mappings for which huge pages are asked.

Decoding reads all weights for each token, and out of huge pages a core reads them faster (docs/LOG.md). Owns no bytes
that no tensor uses but the last mapping's rest, which is never touched. Called by weights.py while it loads.
"""

from __future__ import annotations

import math
import mmap

import torch

from kvtier.byte_text import needed_text
from kvtier.errors import CheckpointError
from kvtier.tiers.memory import advise_huge

CHUNK_BYTES = 256 << 20
CACHE_LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20


class HugeTensors:
    """Makes uninitialized tensors, each at a cache line. A mapping lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """As `torch.empty`; every size must be above 0. CheckpointError: there is no such memory."""
        count = math.prod(shape)
        size_bytes = -(-count * dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        if self._chunk is None or self._used_bytes + size_bytes > len(self._chunk):
            whole_pages = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._chunk, self._used_bytes = _mapping(max(CHUNK_BYTES, whole_pages)), 0
        start, self._used_bytes = self._used_bytes, self._used_bytes + size_bytes
        return torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=start).view(shape)


def _mapping(size_bytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(f"no memory for weights, {needed_text(size_bytes)} more: {error.strerror}") from None
    advise_huge(mapping)
    return mapping
