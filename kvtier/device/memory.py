"""Memory of a device whose bytes have addresses that kernels may count on. Allocated at start, freed with its owner."""

from __future__ import annotations

import torch

from kvtier.block import ALIGNMENT
from kvtier.byte_text import needed_text
from kvtier.errors import ConfigError


def aligned_bytes(byte_count: int, place: torch.device, key: str = "tiers.hbm.bytes") -> torch.Tensor:
    """uint8 `[byte]` from a multiple of 4 KiB on. ConfigError, naming `key`, if `place` has not that much left."""
    try:
        with torch.inference_mode(False):  # it is written outside it, too
            memory = torch.empty(byte_count + ALIGNMENT, dtype=torch.uint8, device=place)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}: {needed_text(byte_count)} of memory of {place} refused ({reason})") from None
    skipped = -memory.data_ptr() % ALIGNMENT
    return memory[skipped : skipped + byte_count]
