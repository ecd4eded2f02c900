"""Attention on the CPU through the C++ kernels of `kvtier._native`, one call a layer.

Owns the kernels and their threads, which the decoder's small operations share (models/ops.py). Hands over addresses and
strides only. Not usable after fork(): the threads stay behind, and the kernels then raise RuntimeError.
"""

from __future__ import annotations

import torch

from kvtier import _native
from kvtier.attention.base import AttentionBatch
from kvtier.block import KVLayout
from kvtier.errors import ConfigError

TYPES = {
    torch.float32: _native.Type.float32,
    torch.bfloat16: _native.Type.bfloat16,
    torch.float16: _native.Type.float16,
}
HEAD_DIMS = range(8, 1025, 8)
"""What the kernels take."""


class NativeAttention:
    """`AttentionBackend` in C++. Bits do not depend on `threads`; they may differ between ISAs.

    `isa`: "auto", or one of `_native.supported_isas()`; ValueError if this CPU lacks it. ConfigError if there cannot be
    so many threads.
    """

    name = "native"

    def __init__(self, threads: int, isa: str = "auto") -> None:
        try:
            self.kernels = _native.Kernels(threads, isa)
        except OSError as error:
            raise ConfigError(
                f"threads: {threads} cannot be started ({error.strerror}); lower it, or raise `ulimit -u`, pids.max of "
                "the cgroup, or its memory"
            ) from None

    def append(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int) -> None:
        assert k.shape == v.shape == (len(batch.append_rows), layout.kv_heads, layout.head_dim)
        assert k.stride(2) == v.stride(2) == 1 and k.dtype == v.dtype
        self.kernels.append(
            rows_of(layout, layer, k.dtype),
            k=k.data_ptr(),
            v=v.data_ptr(),
            k_token_stride=k.stride(0),
            k_head_stride=k.stride(1),
            v_token_stride=v.stride(0),
            v_head_stride=v.stride(1),
            append_rows=batch.append_rows.data_ptr(),
            append_offsets=batch.append_offsets.data_ptr(),
            tokens=len(k),
        )

    def attend(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        layout: KVLayout,
        layer: int,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, dim = q.shape
        assert dim == layout.head_dim and heads % layout.kv_heads == 0 and q.stride(2) == 1
        assert window is None or window > 0
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(tokens, heads)
        self.kernels.attend(
            rows_of(layout, layer),
            q_type=TYPES[q.dtype],
            q=q.data_ptr(),
            q_token_stride=q.stride(0),
            q_head_stride=q.stride(1),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            tables=batch.tables.data_ptr(),
            table_stride=batch.tables.stride(0),
            query_starts=batch.query_starts.data_ptr(),
            lengths=batch.lengths.data_ptr(),
            sequences=len(batch.lengths),
            heads=heads,
            scale=scale,
            window=window or 0,
        )
        return out, lse


def rows_of(layout: KVLayout, layer: int, dtype: torch.dtype | None = None) -> _native.Rows:
    """What the kernels need to know of a layer's slice; asserts that `dtype` is the layout's."""
    kind: _native.Type = getattr(_native.Type, layout.dtype)
    assert dtype is None or TYPES[dtype] == kind
    return _native.Rows(
        kind,
        layout.kv_heads,
        layout.head_dim,
        layout.block_tokens,
        layer_bytes=layer * layout.slice_bytes,
        value_bytes=layout.value_offset,
        head_bytes=layout.head_bytes,
    )
