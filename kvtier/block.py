"""Blocks, tiers and the geometry of a row.

Owns the words that every floor above shares: what a block is called (`BlockHash`), where its copies can be (`Tier`,
`Placement`) and how its bytes lie (`KVLayout`). Knows nothing of files, tensors or requests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 4096
"""Direct-I/O alignment in bytes: every slice and every row is a multiple of it."""

BlockHash = bytes
"""32-byte chained content key of a sealed block (see namespace.py)."""


class Tier(enum.Enum):
    """The three places a block can lie in; `value` is the metric label and the key in `Completion.origin`."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Placement:
    """One copy of a block: its tier and its slot there. `generation` is 0 for HBM, whose slots are private."""

    tier: Tier
    slot: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of a row: `[layer, kv, head, token, dim]`, each layer's slice padded to `ALIGNMENT`.

    A block's row is the same bytes on every tier, so this one value fixes slot addresses, I/O lengths and checksums.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    """"float32", "bfloat16" or "float16"."""

    def __post_init__(self) -> None:
        assert self.layers > 0 and self.kv_heads > 0 and self.head_dim > 0 and self.block_tokens > 0, self
        assert self.dtype in ITEM_BYTES, self.dtype

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one `[token, dim]` plane: one KV head's K (or V) of a block in one layer."""
        return self.block_tokens * self.head_dim * self.item_bytes

    @property
    def value_offset(self) -> int:
        """Offset in bytes of V within a slice (K starts at 0)."""
        return self.kv_heads * self.head_bytes

    @property
    def slice_payload_bytes(self) -> int:
        """Bytes of one layer's K and V without padding."""
        return 2 * self.value_offset

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer's slice, padded to `ALIGNMENT`."""
        return -(-self.slice_payload_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        return self.layers * self.slice_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers, padding left out."""
        return self.layers * self.slice_payload_bytes // self.block_tokens

    def block_count(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, the last one perhaps partial."""
        return -(-tokens // self.block_tokens)


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class DeviceRow(NamedTuple):
    """A slot's row in the memory of a device, which is not this process's to read or write."""

    slot: int
    nbytes: int


Row = memoryview | DeviceRow
"""A row as whoever reads or writes it is given it."""
