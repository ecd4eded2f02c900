"""Attention on a GPU through Triton-language programs (triton_programs.py), by the addresses of rows.

A row may lie in device memory or in pinned host memory that the device has mapped: to the programs both are
addresses. Knows neither tiers nor streams: it runs on torch's current one. With TRITON_INTERPRET=1 the programs run on
CPU tensors, one by one and slowly; so the tests run them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtier.attention import triton_programs as programs
from kvtier.attention.base import AttentionBatch
from kvtier.block import KVLayout

TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
INTERPRETED = bool(triton.knobs.runtime.interpret)
"""The programs are run by Python, on CPU tensors."""
TILE_ROWS = {"float32": 16, "bfloat16": 64, "float16": 64}
"""Queries times heads that a program multiplies at once, where a pass has several queries of a sequence. More in fp32,
where there are no tensor cores to do it, take minutes to compile."""
DECODE_ROWS = 16
"""Rows of a program with one query: tensor cores take no fewer."""
APPEND_TOKENS = 16
"""Tokens whose K and V one program writes."""
GATHER_PROGRAMS = 64
"""Programs that copy slices beside those of passes: a piece of each under way hides PCIe's latency twice over."""
PARTS_BYTES_MAX = 256 << 20
"""Segments get programs of their own while what these leave to be joined takes no more memory than this."""


class TritonKernelAttention:
    """`AttentionBackend` on the device that its tensors are on. No call waits for the device.

    Rows and their K and V vectors (head_dim elements) must lie at multiples of 16 bytes.
    """

    name = "triton_kernel"

    def append(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch, layout: KVLayout, layer: int) -> None:
        assert k.shape == v.shape == (len(batch.append_rows), layout.kv_heads, layout.head_dim)
        assert k.stride(2) == v.stride(2) == 1 and k.dtype == v.dtype == getattr(torch, layout.dtype)
        programs.append[(triton.cdiv(len(k), APPEND_TOKENS), layout.kv_heads)](
            *(k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1)),
            *(batch.append_rows, batch.append_offsets, len(k), layer * layout.slice_bytes),
            TOKENS=APPEND_TOKENS,
            HEAD_BYTES=layout.head_bytes,
            VALUE_BYTES=layout.value_offset,
            DIM=layout.head_dim,
            DIM_PADDED=_padded_dim(layout),
            VECTOR_BYTES=_vector_bytes(layout),
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
        sequences, segments = len(batch.lengths), _segments(batch, layout)
        window = window or 2**30
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(tokens, heads, device=q.device)
        split = segments > 1 and tokens * heads * segments * (dim + 2) * 4 <= PARTS_BYTES_MAX
        if split:
            parts = torch.empty(tokens, heads, segments, dim, device=q.device)
            sums = torch.empty(tokens, heads, segments, 2, device=q.device)
        decode = tokens == sequences
        group = heads // layout.kv_heads
        group_padded = max(triton.next_power_of_2(group), DECODE_ROWS if decode else 1)
        queries = 1 if decode else max(1, TILE_ROWS[layout.dtype] // group_padded)
        tiles = sequences if decode else tokens // queries + sequences
        kind = TYPES[layout.dtype]
        programs.attend[(tiles, layout.kv_heads, segments if split else 1)](
            *(q, q.stride(0), q.stride(1), batch.tables, batch.tables.stride(0), batch.query_starts, batch.lengths),
            *(sequences, parts if split else out, sums if split else lse),
            *(layer * layout.slice_bytes, scale, window, segments),
            KV_HEADS=layout.kv_heads,
            GROUP=group,
            GROUP_PADDED=group_padded,
            QUERIES=queries,
            DECODE=decode,
            SPLIT=split,
            DIM=dim,
            DIM_PADDED=_padded_dim(layout),
            BLOCK_TOKENS=layout.block_tokens,
            VECTOR_BYTES=_vector_bytes(layout),
            DTYPE=kind,
            # The interpreter multiplies the bits of bf16 as if they were whole numbers.
            DOT=tl.float32 if kind == tl.bfloat16 and INTERPRETED else kind,
            enable_fp_fusion=False,
            num_stages=_stages(layout),
        )
        if split:
            programs.join[(tokens, layout.kv_heads)](
                *(parts, sums, batch.query_starts, batch.lengths, sequences, out, lse, window, segments),
                KV_HEADS=layout.kv_heads,
                GROUP=group,
                GROUP_PADDED=triton.next_power_of_2(group),
                DECODE=decode,
                DIM=dim,
                DIM_PADDED=_padded_dim(layout),
                enable_fp_fusion=False,
            )
        return out, lse


def gather(rows: torch.Tensor, offset: int, target: torch.Tensor) -> None:
    """Copy the bytes at `rows` int64 [row] + offset into `target` uint8 [row, byte]: a multiple of 4 KiB from each."""
    count, byte_count = target.shape
    assert len(rows) == count and target.is_contiguous() and byte_count % programs.PIECE_BYTES.value == 0
    pieces = count * (byte_count // programs.PIECE_BYTES.value)
    programs.gather[(min(pieces, GATHER_PROGRAMS),)](
        *(rows, offset, target.view(torch.int32), pieces), ROW_BYTES=byte_count
    )


def _segments(batch: AttentionBatch, layout: KVLayout) -> int:
    """Segments that the longest sequence may have, by the width of the tables: nothing on the device is asked."""
    return int(triton.cdiv(batch.tables.shape[1] * layout.block_tokens, programs.SEGMENT.value))


def _padded_dim(layout: KVLayout) -> int:
    return max(16, int(triton.next_power_of_2(layout.head_dim)))


def _stages(layout: KVLayout) -> int:
    """Tiles under way at once: as many as shared memory holds, of which devices have 160 KiB and more."""
    tile_bytes = 2 * programs.TILE.value * _padded_dim(layout) * layout.item_bytes
    return 3 if tile_bytes <= 32 << 10 else 2 if tile_bytes <= 64 << 10 else 1


def _vector_bytes(layout: KVLayout) -> int:
    vector_bytes = layout.head_dim * layout.item_bytes
    assert vector_bytes % programs.ALIGNMENT.value == 0, "head_dim is no multiple of 16 bytes"
    return vector_bytes
