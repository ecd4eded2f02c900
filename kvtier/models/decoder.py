"""The forward pass of a dense decoder-only transformer over paged K and V.

One class for all families: their differences are flags of `ModelConfig`. Knows addresses (through `AttentionBatch`)
but neither tiers nor sequences. In fp32 each token's result has the same bits whatever else is in the batch, because
every operation it is made of keeps rows independent (`ops`, `AttentionBackend`). A pass may rest between two layers.
Called by the runner, engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from kvtier.attention import AttentionBackend, AttentionBatch
from kvtier.block import KVLayout
from kvtier.errors import CheckpointError, RequestError
from kvtier.models.config import DTYPES, ModelConfig
from kvtier.models.fingerprint import DigestMemory
from kvtier.models.native_layers import native_layers
from kvtier.models.ops import Ops
from kvtier.models.rope import rope_table
from kvtier.models.weights import CPU, DecoderWeights, LayerWeights, Progress, load_weights


class NonFiniteError(RequestError):
    """The model gave NaN or infinity for `tokens`: their K, V and logits are not usable. No fault of the client's.

    `tokens` are indices into the pass, or positions in the sequence once it is one request's error.
    """

    def __init__(self, tokens: tuple[int, ...], dtype: torch.dtype) -> None:
        way_out = "use dtype bfloat16 or float32" if dtype == torch.float16 else "the checkpoint may be damaged"
        name = str(dtype).removeprefix("torch.")
        super().__init__(f"the model gave NaN or infinity in {name} for {len(tokens)} tokens: {way_out}")
        self.tokens = tokens
        self.dtype = dtype


@dataclass(eq=False, slots=True)
class Hidden:
    """A pass between two layers: all that the next one needs, besides the rows."""

    residual: torch.Tensor
    """[token, hidden]; the decoder adds to it in place."""
    normed: torch.Tensor
    """[token, hidden]: the residual through the next layer's input norm; perhaps overwritten by the next layers."""
    cos: torch.Tensor
    sin: torch.Tensor
    """fp32 [token, dim / 2] of the tokens' positions."""
    reach: torch.Tensor
    """fp32 [token]: not finite if a q, k or v was not (float16)."""
    layer: int = 0
    """The next layer."""


class Decoder:
    """A loaded model. Immutable; `forward` runs on the engine thread under `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        weights_digest: bytes,
        block_tokens: int,
        backend: AttentionBackend,
        ops: Ops,
        vocab_limit: int | None = None,
    ) -> None:
        self.config = config
        self.weights_digest = weights_digest
        self.dtype = weights.embedding.dtype
        dtype_name = str(self.dtype).removeprefix("torch.")
        self.layout = KVLayout(config.layers, config.kv_heads, config.head_dim, block_tokens, dtype_name)
        self.vocab_limit = min(config.vocab, vocab_limit or config.vocab)
        self._weights = weights
        self._backend = backend
        self._ops = ops
        self._residual_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        self._scale = config.head_dim**-0.5
        tables = rope_table(config.rope, config.head_dim, config.context)
        self._cos, self._sin = (table.to(weights.embedding.device) for table in tables)
        following = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        self._layers = list(zip(weights.layers, config.windows, following, strict=True))
        self._native = native_layers(backend, ops, config, weights, self.layout, self._scale)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in memory, a tied head counted once."""
        weights = self._weights
        tensors = [weights.embedding, weights.norm] + ([] if weights.head is weights.embedding else [weights.head])
        return sum(tensor.nbytes for tensor in tensors) + sum(_layer_bytes(layer) for layer in weights.layers)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """Write K and V of all tokens; return logits fp32 [row, vocab] of the tokens whose indices are `logits_rows`.

        token_ids, positions: int64 [token], positions below `config.context`; logits_rows: int64 [row], may be empty.
        Logits from `vocab_limit` on are -inf; others may be NaN or infinite. Raises NonFiniteError, once K and V have
        been written, for tokens whose residual is not finite, in float16 also for those whose q, k or v is not.
        """
        hidden = self.begin(token_ids, positions)
        self.run_layers(hidden, range(len(self._layers)), batch)
        return self.end(hidden, logits_rows)

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Hidden:
        """Begin a forward pass that is run a few layers at a time; what `forward` does in one call."""
        weights, cos, sin = self._weights, self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        residual = F.embedding(token_ids, weights.embedding).to(self._residual_dtype)
        normed = self._ops.rmsnorm(residual, weights.layers[0].input_norm, self.config.rms_eps, self.dtype)
        return Hidden(residual, normed, cos, sin, torch.zeros(len(residual), device=residual.device))

    def run_layers(self, hidden: Hidden, layers: range, batch: AttentionBatch) -> None:
        """Run the next layers, which must be `layers`; only their slices of the rows in `batch` are read and written.

        The rows may lie at other addresses for the next call.
        """
        assert layers.start == hidden.layer and layers.step == 1 and layers.stop <= len(self._layers), (layers, hidden)
        native = self._native
        if native is not None and 0 < len(hidden.residual) <= native.rows_max:
            native.run(hidden.residual, hidden.normed, hidden.cos, hidden.sin, layers, batch)
            hidden.layer = layers.stop
            return
        ops, eps = self._ops, self.config.rms_eps
        residual, normed = hidden.residual, hidden.normed
        for index in layers:
            layer, window, next_norm = self._layers[index]
            q, k, v = self._project(normed, layer)
            ops.rope(q, k, hidden.cos, hidden.sin)
            if self.dtype == torch.float16:
                hidden.reach += _sum(q) + _sum(k) + _sum(v)
            self._backend.append(k, v, batch, self.layout, index)
            attended, _ = self._backend.attend(q, batch, self.layout, index, self._scale, window)
            update = ops.linear(attended.flatten(1), layer.output.weight, layer.output.bias)
            residual, normed = ops.add_rmsnorm(residual, update, layer.post_norm, eps)
            gated = ops.silu_mul(ops.linear(normed, layer.gate_up.weight, layer.gate_up.bias))
            update = ops.linear(gated, layer.down.weight, layer.down.bias)
            residual, normed = ops.add_rmsnorm(residual, update, next_norm, eps)
        hidden.residual, hidden.normed, hidden.layer = residual, normed, layers.stop

    def end(self, hidden: Hidden, logits_rows: torch.Tensor) -> torch.Tensor:
        """Logits of a pass that is through all layers, as `forward` returns them; raises what it raises.

        Waits for what a device was given.
        """
        finite, logits = self.finish(hidden, logits_rows)
        self.check(finite)
        return logits

    def finish(self, hidden: Hidden, logits_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `end` looks at and what it returns, without a look: bool [token], whether it is usable, and logits."""
        assert hidden.layer == len(self._layers), hidden.layer
        finite = torch.isfinite(hidden.residual).all(-1) & torch.isfinite(hidden.reach)
        logits = self._ops.wide_linear(hidden.normed.index_select(0, logits_rows), self._weights.head)
        logits[:, self.vocab_limit :] = -torch.inf
        return finite, logits

    def check(self, finite: torch.Tensor) -> None:
        """Raise NonFiniteError for the tokens that are not usable."""
        if not bool(finite.all()):
            raise NonFiniteError(tuple((~finite).nonzero().flatten().tolist()), self.dtype)

    def _project(self, hidden: torch.Tensor, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [token, head, dim], k and v [token, kv_head, dim]: views into one product, or normed copies."""
        config = self.config
        qkv = self._ops.linear(hidden, layer.qkv.weight, layer.qkv.bias).view(len(hidden), -1, config.head_dim)
        q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._ops.rmsnorm(q, layer.q_norm, config.rms_eps, self.dtype)
            k = self._ops.rmsnorm(k, layer.k_norm, config.rms_eps, self.dtype)
        return q, k, v


def load_decoder(
    folder: Path,
    dtype: str,
    layout_block_tokens: int,
    backend: AttentionBackend,
    ops: Ops,
    progress: Progress | None = None,
    vocab_limit: int | None = None,
    memory: DigestMemory | None = None,
    place: torch.device = CPU,
) -> Decoder:
    """Load a Hugging Face folder of a supported family, to run at `place`.

    dtype: "auto" (as the config says, else as stored), "float32", "bfloat16" or "float16". `progress(done, total)` in
    bytes. `vocab_limit`: the tokenizer's length; logits beyond it are masked. `memory`: where digests of weights are
    kept. Raises CheckpointError.
    """
    if dtype not in ("auto", *DTYPES):
        raise CheckpointError(f"dtype is {dtype!r}, supported are auto, {', '.join(DTYPES)}")
    config = ModelConfig.from_folder(folder)
    name = config.checkpoint_dtype if dtype == "auto" else dtype
    stored = None if name is None else getattr(torch, name)
    weights, digest = load_weights(folder, config, stored, progress, memory, place)
    return Decoder(config, weights, digest, layout_block_tokens, backend, ops, vocab_limit)


def _sum(x: torch.Tensor) -> torch.Tensor:
    """fp32 [token] of float16 [token, head, dim]: finite exactly if every element is.

    A residual does not tell: an infinite k whose score is -inf has no weight, until another query comes.
    """
    return x.sum((1, 2), dtype=torch.float32)


def _layer_bytes(layer: LayerWeights) -> int:
    projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
    tensors = [layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm]
    for projection in projections:
        tensors += [projection.weight, projection.bias]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
