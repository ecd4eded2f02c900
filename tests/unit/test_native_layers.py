"""Layers in one native call against the same layers call by call: logits, K and V have the same bits.

For every family and flag, type, ISA and number of threads, in passes of any shape, and a few layers at a time.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.attention import AttentionBatch, ReferenceAttention
from kvtier.models.decoder import Decoder, NonFiniteError, load_decoder
from kvtier.models.native_layers import NativeLayers, native_layers
from kvtier.models.ops import NativeOps, TorchOps
from tests.paged import PagedSequences
from tests.tiny import make_checkpoint, random_weights, write_weights

try:
    from kvtier import _native
    from kvtier.attention.native import NativeAttention

    ISAS = _native.supported_isas()
except ImportError:
    pytest.skip("kvtier._native was not built", allow_module_level=True)

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "plain", {}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "odd_heads", {"head_dim": 24, "num_key_value_heads": 1}),
    ("llama", "kv_heads_null", {"num_key_value_heads": None, "num_hidden_layers": 1}),
    ("mistral", "window", {"sliding_window": 24}),
    ("qwen2", "windows", {
        "use_sliding_window": True,
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    ("qwen3", "norms", {"head_dim": 32}),
    ("qwen3", "norms_and_biases", {"attention_bias": True}),
]  # fmt: skip
ODD = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 8, "num_attention_heads": 6}
"""What no product of few bf16 rows takes."""
TYPES = [("float32", isa) for isa in ISAS]
TYPES += [("bfloat16", isa) for isa in ISAS if _native.Kernels(1, isa).few_rows_max]
each_variant = pytest.mark.parametrize(
    ("family", "overrides"), [pytest.param(f, o, id=f"{f}-{n}") for f, n, o in VARIANTS]
)
each_type = pytest.mark.parametrize(("dtype", "isa"), TYPES)

Chunks = list[tuple[int, list[int]]]


def load(folder: Path, dtype: str, isa: str, threads: int) -> Decoder:
    backend = NativeAttention(threads, isa)
    return load_decoder(folder, dtype, 16, backend, NativeOps(backend.kernels))


def load_both(folder: Path, dtype: str, isa: str, threads: int) -> tuple[Decoder, Decoder]:
    """One that runs layers natively, and one that does not."""
    ours, other = load(folder, dtype, isa, threads), load(folder, dtype, isa, threads)
    other._native = None
    return ours, other


def layers_of(decoder: Decoder) -> NativeLayers:
    assert decoder._native is not None
    return decoder._native


def tokens_of(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(300), k=count)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def passes(rows_max: int) -> list[Chunks]:
    """Passes of three sequences: one too large for a native call, then of every size that counts."""
    sizes = [[rows_max + 40, 1, 9], [1], [1, 1, 1], [3, 1, 5], [1, rows_max - 2, 1], [rows_max], [2, 7, 1], [1, 1, 1]]
    order = random.Random(1)
    found: list[Chunks] = []
    for number, counts in enumerate(sizes):
        chunks = [(name, tokens_of(count, 10 * number + name)) for name, count in enumerate(counts)]
        order.shuffle(chunks)
        found.append(chunks)
    return found


@each_type
@pytest.mark.parametrize("threads", [1, 3])
@each_variant
def test_a_native_call_gives_the_bits_of_its_kernels_called_one_by_one(
    family: str, overrides: dict[str, Any], threads: int, dtype: str, isa: str, tmp_path: Path
) -> None:
    pair = load_both(make_checkpoint(tmp_path, family, seed=3, **overrides), dtype, isa, threads)
    native = layers_of(pair[0])
    called = count_calls(native)
    ours, other = (PagedSequences(decoder, blocks=40, seed=2) for decoder in pair)
    small = 0
    for chunks in passes(native.rows_max):
        for mine, expected in zip(ours.run(chunks), other.run(chunks), strict=True):
            assert same_bits(mine, expected), [len(tokens) for _, tokens in chunks]
        assert same_bits(ours.rows, other.rows)
        small += sum(len(tokens) for _, tokens in chunks) <= native.rows_max
        assert len(called) == small
    assert small == 7


def count_calls(native: NativeLayers) -> list[range]:
    """The layers of each call from now on."""
    called: list[range] = []
    run = native.run

    def counted(*arguments: Any) -> None:
        called.append(arguments[4])
        run(*arguments)

    native.run = counted  # type: ignore[method-assign]
    return called


class Moving:
    """A pass of a few layers at a time, whose rows lie elsewhere for each call; where they were is NaN then."""

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self._decoder = decoder
        self._paged = PagedSequences(decoder, blocks=20, seed=seed)

    def run(self, chunks: Chunks, cuts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all tokens, and all rows."""
        ids, positions, batch = self._paged.prepare(chunks)
        with torch.inference_mode():
            hidden = self._decoder.begin(ids, positions)
            for first, end in itertools.pairwise(cuts):
                self._decoder.run_layers(hidden, range(first, end), self._moved(batch))
            return self._decoder.end(hidden, torch.arange(len(ids))), self._paged.rows

    def _moved(self, batch: AttentionBatch) -> AttentionBatch:
        distance = self._paged.move()
        tables = torch.where(batch.tables > 0, batch.tables + distance, 0)
        batch.tables[:] = tables
        batch.append_rows[:] += distance
        return batch


@each_type
@pytest.mark.parametrize("cuts", [(0, 1, 2, 3), (0, 2, 3), (0, 0, 3), (0, 3)])
def test_layers_run_a_few_at_a_time_over_rows_that_move_between_calls(
    cuts: tuple[int, ...], dtype: str, isa: str, tmp_path: Path
) -> None:
    pair = load_both(make_checkpoint(tmp_path, "qwen3", seed=4, attention_bias=True), dtype, isa, 2)
    called = count_calls(layers_of(pair[0]))
    ours, other = (Moving(decoder, seed=5) for decoder in pair)
    for number in range(4):
        chunks = [(0, tokens_of(7, number)), (1, tokens_of(1, 50 + number))]
        mine, rows = ours.run(chunks, cuts)
        expected, other_rows = other.run(chunks, (0, 3))
        assert same_bits(mine, expected) and same_bits(rows, other_rows)
    assert called == [range(first, end) for first, end in itertools.pairwise(cuts)] * 4


@each_type
def test_tokens_without_a_usable_result_are_named_as_before(dtype: str, isa: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, seed=6)
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    weights = random_weights(
        {**config, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}, 6, torch.float32
    )
    weights["model.embed_tokens.weight"][7, 11] = torch.nan
    write_weights(folder, weights)
    found = []
    for decoder in load_both(folder, dtype, isa, 2):
        with pytest.raises(NonFiniteError) as caught:
            PagedSequences(decoder, blocks=4).run([(0, [5, 7, 6]), (1, [9, 8]), (2, [7])])
        found.append(caught.value.tokens)
    assert found == [(1, 2, 5)] * 2


def test_what_torch_has_to_compute_stays_call_by_call(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "even")
    for isa in ISAS:
        limit = _native.Kernels(1, isa).few_rows_max
        assert layers_of(load(folder, "bfloat16", isa, 1)).rows_max == limit
        assert layers_of(load(folder, "float16", isa, 1)).rows_max == 0
        assert layers_of(load(folder, "float32", isa, 1)).rows_max == 64
    odd = make_checkpoint(tmp_path / "odd", **ODD)
    assert layers_of(load(odd, "bfloat16", "auto", 1)).rows_max == 0
    for dtype in ("bfloat16", "float16"):
        (logits,) = PagedSequences(load(odd, dtype, "auto", 2), blocks=2).run([(0, [1, 2, 3])])
        assert bool(logits.isfinite().all())


@pytest.mark.parametrize("isa", ISAS)
def test_shapes_that_fit_no_vector_in_fp32(isa: str, tmp_path: Path) -> None:
    pair = load_both(make_checkpoint(tmp_path, "qwen3", **ODD), "float32", isa, 2)
    called = count_calls(layers_of(pair[0]))
    ours, other = (PagedSequences(decoder, blocks=8) for decoder in pair)
    for count in (5, 1, 17):
        chunks = [(0, tokens_of(count, count)), (1, tokens_of(2, count))]
        for mine, expected in zip(ours.run(chunks), other.run(chunks), strict=True):
            assert same_bits(mine, expected)
    assert same_bits(ours.rows, other.rows) and len(called) == 3


def test_only_kernels_of_one_set_are_run_in_one_call(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path), "float32", "auto", 1)
    backend, weights = NativeAttention(1), decoder._weights
    others = [(backend, NativeOps(_native.Kernels(1))), (backend, TorchOps()), (ReferenceAttention(), TorchOps())]
    others.append((ReferenceAttention(), NativeOps(backend.kernels)))
    for attention, ops in others:
        assert native_layers(attention, ops, decoder.config, weights, decoder.layout, 0.25) is None


def test_kernels_and_weights_live_as_long_as_the_layers_that_use_them(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path), "float32", "auto", 2)
    paged = PagedSequences(decoder, blocks=2)
    ids, positions, batch = paged.prepare([(0, [1, 2, 3])])
    expected, found = decoder.begin(ids, positions), decoder.begin(ids, positions)
    decoder.run_layers(expected, range(3), batch)
    native = layers_of(decoder)
    del decoder
    gc.collect()
    native.run(found.residual, found.normed, found.cos, found.sin, range(3), batch)
    assert same_bits(found.residual, expected.residual) and same_bits(found.normed, expected.normed)


def test_a_call_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path), "float32", "auto", 2)
    native = layers_of(decoder)
    paged = PagedSequences(decoder, blocks=8)
    before = paged.rows.clone()
    ids, positions, batch = paged.prepare([(0, [1, 2, 3]), (1, [4])])
    hidden = decoder.begin(ids, positions)
    residual = hidden.residual.clone()

    def run(layers: range = range(3), tokens: int = 4, starts: tuple[int, ...] = (0, 3, 4)) -> None:
        batch.query_starts[:] = torch.tensor(starts, dtype=torch.int32)
        native._layers.run(
            *(layers.start, layers.stop, tokens, len(starts) - 1),
            *(hidden.residual.data_ptr(), hidden.normed.data_ptr(), hidden.cos.data_ptr(), hidden.sin.data_ptr()),
            *(batch.tables.data_ptr(), batch.tables.stride(0), batch.query_starts.data_ptr()),
            *(batch.lengths.data_ptr(), batch.append_rows.data_ptr(), batch.append_offsets.data_ptr()),
        )

    for layers in (range(4), range(-1, 2), range(2, 1), range(3, 4)):
        with pytest.raises(ValueError, match="no such layers"):
            run(layers=layers)
    for tokens in (0, -1, 65):
        with pytest.raises(ValueError, match="1 to rows_max tokens"):
            run(tokens=tokens)
    for starts in ((0, 3, 5), (0, 3, 3), (1, 3, 4)):
        with pytest.raises(ValueError, match="not those of the pass"):
            run(starts=starts)
    run(layers=range(3, 3))
    assert torch.equal(paged.rows, before) and torch.equal(hidden.residual, residual)
    run()
    assert not torch.equal(paged.rows, before) and not torch.equal(hidden.residual, residual)


def test_layers_that_no_decoder_has_are_refused() -> None:
    kernels = _native.Kernels(1)
    rows = _native.Rows(_native.Type.float32, 2, 16, 16, 0, 2048, 1024)

    def make(
        heads: int = 4, hidden: int = 64, intermediate: int = 128, window: int = 0, q_norm: int = 0
    ) -> _native.Layers:
        layer = _native.LayerWeights((0, 0), (0, 0), (0, 0), (0, 0), q_norm, 0, 0, 0, window)
        return _native.Layers(kernels, rows, 4096, heads, hidden, intermediate, 1e-5, 0.25, [layer])

    assert make().rows_max == 64
    for wrong in ({"heads": 3}, {"heads": 0}, {"hidden": 0}, {"intermediate": 0}, {"window": -1}, {"q_norm": 64}):
        with pytest.raises(ValueError, match=r"must|both"):
            make(**wrong)
