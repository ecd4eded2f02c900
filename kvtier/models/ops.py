"""The decoder's small operations outside attention, native or torch.

Owns row independence: in fp32 the bits of a row never depend on which rows it is computed with. Knows nothing of
sequences or the KV cache. Called by the decoder on the engine thread; CPU tensors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from kvtier.attention import AttentionBackend

if TYPE_CHECKING:
    from kvtier import _native

LINEAR_ROWS = 16
"""Rows of every fp32 product in torch: its kernels, and so a row's bits, depend on how many rows there are."""

VECTOR_ELEMENTS = 32
"""torch computes the last elements of a stretch, fewer than this, with other code and so other bits."""

SERIAL_ELEMENTS = 1 << 14
"""torch cuts longer stretches into pieces, one for each thread."""


class Ops(Protocol):
    """Norms, rotary embedding, gated activation and linear layers over `[token, ...]` tensors.

    MUST: a row's result depends on that row alone, bit for bit in fp32. Sums are fp32 whatever the dtypes.
    """

    name: str

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        """x `[..., dim]` times rsqrt(mean(x^2) + eps), rounded to `out_dtype`, then times weight `[dim]`; a new tensor.

        x is `[token, dim]` or `[token, head, dim]`, perhaps a view into a fused projection, with dim contiguous.
        weight has `out_dtype`.
        """

    def add_rmsnorm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds update to residual IN PLACE and returns (residual, its rmsnorm in update's dtype).

        Both `[token, dim]` and contiguous; residual may be fp32 while update and weight are fp16 or bf16.
        """

    def rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates q `[token, head, dim]` and k `[token, kv_head, dim]` IN PLACE, as Hugging Face's rotate_half does.

        cos and sin are fp32 `[token, dim / 2]`: HALF the width of Hugging Face's tables, whose two halves are equal.
        q and k may be views into one fused projection.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of gate_up `[token, 2 * inter]` = gate beside up; returns a new `[token, inter]`."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x `[token, in]` times the transpose of weight `[out, in]`, then plus bias `[out]`; all of one dtype."""

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What `linear` gives without a bias, as fp32."""


def make_ops(backend: AttentionBackend) -> Ops:
    """The small operations that go with an attention backend: a native one lends its kernels and threads."""
    if backend.name != "native":
        return TorchOps()
    from kvtier.attention.native import NativeAttention

    assert isinstance(backend, NativeAttention)
    return NativeOps(backend.kernels)


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
        inter = gate.shape[1]
        silu = F.pad(gate.float(), (0, -inter % VECTOR_ELEMENTS))
        for stretch in torch.split(silu.view(-1), SERIAL_ELEMENTS):
            F.silu(stretch, inplace=True)
        return (silu[:, :inter] * up.float()).to(gate_up.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype == torch.float32:
            tokens = x.shape[0]
            padded = F.pad(x, (0, 0, 0, -tokens % LINEAR_ROWS))
            out = torch.cat([F.linear(tile, weight) for tile in torch.split(padded, LINEAR_ROWS)])[:tokens]
        else:
            out = F.linear(x, weight)
        return out if bias is None else out.add_(bias)

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.linear(x, weight, None).float()


class NativeOps:
    """`Ops` through the kernels of `kvtier._native`.

    In 16 bit, linear layers of many rows stay torch's, which is faster. So they do for few rows, which decoding has,
    unless the CPU has a matrix unit or dot products for them (`few_rows_max` is above 0; bf16 only).
    """

    name = "native"

    def __init__(self, kernels: _native.Kernels) -> None:
        from kvtier.attention.native import TYPES

        self.kernels = kernels
        self._types = TYPES
        self._few_rows_max = kernels.few_rows_max

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=out_dtype)
        assert x.stride(-1) == 1 and weight.is_contiguous() and weight.dtype == out_dtype and x.dim() in (2, 3)
        outer, inner = (x.shape[0], 1) if x.dim() == 2 else x.shape[:2]
        outer_stride, inner_stride = (x.stride(0), 0) if x.dim() == 2 else x.stride()[:2]
        self.kernels.rmsnorm(
            *(self._types[x.dtype], x.data_ptr(), outer, inner, outer_stride, inner_stride),
            *(self._types[out_dtype], weight.data_ptr(), out.data_ptr(), x.shape[-1], eps),
        )
        return out

    def add_rmsnorm(
        self, residual: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert residual.is_contiguous() and update.is_contiguous() and weight.is_contiguous()
        assert residual.shape == update.shape and weight.dtype == update.dtype
        out = torch.empty_like(update)
        self.kernels.add_rmsnorm(
            *(self._types[residual.dtype], residual.data_ptr(), self._types[update.dtype], update.data_ptr()),
            *(weight.data_ptr(), out.data_ptr(), *update.shape, eps),
        )
        return residual, out

    def rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
        for x in (q, k):
            assert x.stride(2) == 1 and cos.shape == sin.shape == (x.shape[0], x.shape[2] // 2)
            tokens, heads, dim = x.shape
            kind, strides = self._types[x.dtype], x.stride()
            self.kernels.rope(
                *(kind, x.data_ptr(), tokens, heads, dim, strides[0], strides[1]), *(cos.data_ptr(), sin.data_ptr())
            )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, inter = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1
        out = torch.empty(tokens, inter, dtype=gate_up.dtype)
        kind = self._types[gate_up.dtype]
        self.kernels.silu_mul(kind, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), tokens, inter)
        return out

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dtype != torch.float32:
            out = self._linear_few(x, weight) if self._takes_few(x, weight) else F.linear(x, weight)
            return out if bias is None else out.add_(bias)
        assert weight.dtype == x.dtype and weight.is_contiguous() and x.stride(1) == 1
        assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
        out = torch.empty(x.shape[0], weight.shape[0])
        self.kernels.linear(
            *(x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr()),
            *(out.data_ptr(), x.shape[0], x.shape[1], weight.shape[0]),
        )
        return out

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = self.linear(x, weight, None)
        if product.dtype == torch.float32:
            return product
        out = torch.empty(product.shape)
        self.kernels.widen(self._types[product.dtype], product.data_ptr(), out.data_ptr(), *product.shape)
        return out

    def _takes_few(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        fits = 0 < x.shape[0] <= self._few_rows_max and weight.shape[0] % 16 == weight.shape[1] % 32 == 0
        return fits and x.dtype == torch.bfloat16

    def _linear_few(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product alone, at the cost of reading `weight` once."""
        assert weight.dtype == x.dtype and weight.is_contiguous() and x.stride(1) == 1
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        (rows, in_dim), out_dim = x.shape, weight.shape[0]
        self.kernels.linear_few(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), rows, in_dim, out_dim)
        return out
