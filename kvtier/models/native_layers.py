"""A run of the decoder's layers in one native call, for passes of few tokens.

There the kernels of a layer take little more time than Python takes to call them one after the other. They are the
ones that `NativeOps` and `NativeAttention` call, in the decoder's order, so all bits are the same. Owns the addresses
of the weights, which it keeps alive, and the memory between the kernels. Called by the decoder, engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtier.attention import AttentionBackend, AttentionBatch
from kvtier.block import KVLayout
from kvtier.models.config import ModelConfig
from kvtier.models.ops import NativeOps, Ops
from kvtier.models.weights import DecoderWeights, LayerWeights, Projection

if TYPE_CHECKING:
    from kvtier import _native


class NativeLayers:
    """See the module."""

    def __init__(
        self, kernels: _native.Kernels, config: ModelConfig, weights: DecoderWeights, layout: KVLayout, scale: float
    ) -> None:
        from kvtier import _native
        from kvtier.attention.native import rows_of

        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._hidden, self._turns = config.hidden, config.head_dim // 2
        following = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        self._layers = _native.Layers(
            kernels,
            rows_of(layout, 0, self._dtype),
            slice_bytes=layout.slice_bytes,
            heads=config.heads,
            hidden=config.hidden,
            intermediate=config.intermediate,
            eps=config.rms_eps,
            scale=scale,
            layers=[
                _addresses(layer, window, next_norm, config, self._dtype)
                for layer, window, next_norm in zip(weights.layers, config.windows, following, strict=True)
            ],
        )
        self.rows_max = self._layers.rows_max
        """Tokens of the largest pass; 0: these weights need operations that are torch's."""

    def run(
        self,
        residual: torch.Tensor,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layers: range,
        batch: AttentionBatch,
    ) -> None:
        """Run `layers` of a pass of 1 to `rows_max` tokens; `residual` and `normed` [token, hidden] change IN PLACE.

        What the tensors hold is in `decoder.Hidden`. K and V of all tokens are written to the rows of these layers.
        """
        tokens = len(residual)
        assert residual.dtype == normed.dtype == self._dtype and cos.dtype == sin.dtype == torch.float32
        assert residual.shape == normed.shape == (tokens, self._hidden) and len(batch.append_rows) == tokens
        assert cos.shape == sin.shape == (tokens, self._turns)
        assert all(tensor.is_contiguous() for tensor in (residual, normed, cos, sin))
        self._layers.run(
            *(layers.start, layers.stop, tokens, len(batch.lengths)),
            residual=residual.data_ptr(),
            normed=normed.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            tables=batch.tables.data_ptr(),
            table_stride=batch.tables.stride(0),
            query_starts=batch.query_starts.data_ptr(),
            lengths=batch.lengths.data_ptr(),
            append_rows=batch.append_rows.data_ptr(),
            append_offsets=batch.append_offsets.data_ptr(),
        )


def native_layers(
    backend: AttentionBackend,
    ops: Ops,
    config: ModelConfig,
    weights: DecoderWeights,
    layout: KVLayout,
    scale: float,
) -> NativeLayers | None:
    """The layers as `backend` and `ops` compute them; None where those are not the kernels of one native set."""
    if not isinstance(ops, NativeOps):
        return None
    from kvtier.attention.native import NativeAttention

    if not (isinstance(backend, NativeAttention) and backend.kernels is ops.kernels):
        return None
    return NativeLayers(ops.kernels, config, weights, layout, scale)


def _addresses(
    layer: LayerWeights, window: int | None, next_norm: torch.Tensor, config: ModelConfig, dtype: torch.dtype
) -> _native.LayerWeights:
    """One layer's, of contiguous tensors of the shapes that the configuration says."""
    from kvtier import _native

    hidden, q_width = config.hidden, config.heads * config.head_dim

    def vector(tensor: torch.Tensor | None, width: int) -> int:
        if tensor is None:
            return 0
        assert tensor.shape == (width,) and tensor.is_contiguous() and tensor.dtype == dtype
        return tensor.data_ptr()

    def matrix(projection: Projection, outputs: int, inputs: int) -> tuple[int, int]:
        weight = projection.weight
        assert weight.shape == (outputs, inputs) and weight.is_contiguous() and weight.dtype == dtype
        return weight.data_ptr(), vector(projection.bias, outputs)

    return _native.LayerWeights(
        qkv=matrix(layer.qkv, q_width + 2 * config.kv_heads * config.head_dim, hidden),
        output=matrix(layer.output, hidden, q_width),
        gate_up=matrix(layer.gate_up, 2 * config.intermediate, hidden),
        down=matrix(layer.down, hidden, config.intermediate),
        q_norm=vector(layer.q_norm, config.head_dim),
        k_norm=vector(layer.k_norm, config.head_dim),
        post_norm=vector(layer.post_norm, hidden),
        next_norm=vector(next_norm, hidden),
        window=window or 0,
    )
