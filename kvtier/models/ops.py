"""The decoder's operations outside attention, native or torch.

Owns row independence outside attention: in fp32 the bits of a row never depend on which rows it is computed with.
Knows nothing of sequences or the KV cache. Called by the decoder on the engine thread.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from kvtier.attention import AttentionBackend

LINEAR_ROWS = 16
"""Rows of every fp32 product in torch: its kernels, and so a row's bits, depend on how many rows there are."""


class Ops(Protocol):
    """Norms, rotary embedding and gated activation over `[token, ...]` tensors on the CPU.

    MUST: a row's result depends on that row alone, bit for bit in fp32. Sums are fp32 whatever the dtypes.
    """

    name: str

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        """x `[..., dim]` times rsqrt(mean(x^2) + eps), rounded to `out_dtype`, then times weight `[dim]`; a new tensor.

        x may be strided over its leading dimensions (a view into a fused projection); dim is contiguous.
        """

    def add_rmsnorm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds update to residual IN PLACE and returns (residual, its rmsnorm in update's dtype).

        Both `[token, dim]` and contiguous; residual may be fp32 while update and weight are fp16 or bf16.
        """

    def rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates q `[token, head, dim]` and k `[token, kv_head, dim]` IN PLACE (Hugging Face's rotate_half convention).

        cos and sin are fp32 `[token, dim / 2]`: HALF the width of Hugging Face's tables, whose two halves are equal.
        q and k may be views into one fused projection.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up `[token, 2 * inter]` = gate beside up; returns a new `[token, inter]`."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x `[token, in]` times the transpose of weight `[out, in]`, then plus bias `[out]`; all of one dtype."""


class TorchOps:
    """`Ops` in plain torch, for machines without the native extension."""

    name = "torch"

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(out_dtype) * weight

    def add_rmsnorm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual += update
        return residual, self.rmsnorm(residual, weight, eps, update.dtype)

    def rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        cos, sin = cos[:, None], sin[:, None]
        for x in (q, k):
            left, right = x.float().chunk(2, dim=-1)
            x.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype == torch.float32:
            count = x.shape[0]
            padded = F.pad(x, (0, 0, 0, -count % LINEAR_ROWS))
            out = torch.cat([F.linear(tile, weight) for tile in padded.split(LINEAR_ROWS)])[:count]
        else:
            out = F.linear(x, weight)
        return out if bias is None else out.add_(bias)


def make_ops(backend: AttentionBackend) -> Ops:
    """The small operations that go with an attention backend (a native one lends its kernels and threads)."""
    return TorchOps()

