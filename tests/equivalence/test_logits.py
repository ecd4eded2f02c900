"""Logits of every family against transformers, and bit-equality of a token's logits whatever it is computed with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kvtier.attention import make_backend
from kvtier.models.decoder import Decoder, NonFiniteError, load_decoder
from kvtier.models.ops import TorchOps, make_ops
from tests.paged import PagedSequences
from tests.tiny import make_checkpoint, random_weights, write_weights

TOKENS = 150
TOLERANCE = 1e-4
"""Of the largest logit, in fp32."""
SMOLLM2 = Path(__file__).resolve().parents[2] / ".cache" / "models" / "smollm2"

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "default_5": {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 48,
        }
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    "yarn_options": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.8,
            "mscale_all_dim": 0.4,
            "truncate": False,
        }
    },
    "yarn_attention_factor": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 2e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
        }
    },
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "tied", {"tie_word_embeddings": True}),
    ("llama", "head_dim_explicit", {"head_dim": 24}),
    ("llama", "head_dim_null", {"head_dim": None}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "one_kv_head", {"num_key_value_heads": 1}),
    ("llama", "kv_heads_null", {"num_key_value_heads": None}),
    ("mistral", "window", {"sliding_window": 24}),
    ("mistral", "window_beyond", {"sliding_window": 4096, "head_dim": 32}),
    ("qwen2", "tied", {"tie_word_embeddings": True}),
    ("qwen2", "window_unused", {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen2", "window", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ("qwen2", "layer_types", {
        "use_sliding_window": True,
        "sliding_window": 70,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    ("qwen3", "head_dim_wide", {"head_dim": 32}),
    ("qwen3", "attention_bias", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3", "window", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
]  # fmt: skip
CASES = [(family, name, rope) for family in ("llama", "mistral", "qwen2", "qwen3") for name, rope in ROPES.items()]
CASES += VARIANTS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small lose to the hand-over between threads; the attention backend keeps its two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path, dtype: str = "float32", block_tokens: int = 16, vocab_limit: int | None = None) -> Decoder:
    """The decoder of `folder` on the machine's own backend."""
    backend = make_backend("auto", threads=2)
    return load_decoder(folder, dtype, block_tokens, backend, make_ops(backend), vocab_limit=vocab_limit)


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """fp32 logits [token, vocab] of transformers."""
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def random_tokens(count: int, seed: int, vocab: int = 300) -> list[int]:
    """Token ids, seeded."""
    return random.Random(seed).choices(range(vocab), k=count)


@pytest.mark.parametrize(("family", "name", "overrides"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_logits_agree_with_transformers(tmp_path: Path, family: str, name: str, overrides: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, family, seed=hash_of(family + name), **overrides)
    tokens = random_tokens(TOKENS, seed=1)
    expected = reference_logits(folder, tokens)
    (logits,) = PagedSequences(load(folder), blocks=10).run([(0, tokens)])
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def hash_of(text: str) -> int:
    """A seed that is the same in every process."""
    return int.from_bytes(text.encode()[-7:], "little")


@pytest.mark.smollm2
def test_logits_of_smollm2_agree_with_transformers() -> None:
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip("no SmolLM2 checkpoint: run scripts/fetch_model.py")
    tokens = random_tokens(200, seed=2, vocab=49152)
    expected = reference_logits(SMOLLM2, tokens)
    (logits,) = PagedSequences(load(SMOLLM2, block_tokens=32), blocks=8).run([(0, tokens)])
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("ops_name", ["auto", "torch"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {}),
    ],
)
def test_fp32_logits_are_bit_equal_whatever_the_chunks_and_the_batch(
    tmp_path: Path, family: str, overrides: dict[str, Any], ops_name: str
) -> None:
    folder = make_checkpoint(tmp_path, family, seed=3, **overrides)
    backend = make_backend("auto" if ops_name == "auto" else "reference", threads=2)
    ops = make_ops(backend) if ops_name == "auto" else TorchOps()
    decoder = load_decoder(folder, "float32", 16, backend, ops)
    generator = random.Random(4)
    tokens = random_tokens(101, seed=5)
    (whole,) = PagedSequences(decoder, blocks=7).run([(0, tokens)])
    for attempt in range(3):
        assert torch.equal(run_in_chunks(decoder, tokens, generator, longest=1 if attempt == 0 else 40), whole)
    assert torch.equal(run_among_strangers(decoder, tokens, generator), whole)


def run_in_chunks(decoder: Decoder, tokens: list[int], generator: random.Random, longest: int) -> torch.Tensor:
    """Logits of `tokens`, computed alone in random chunks of at most `longest` tokens."""
    paged = PagedSequences(decoder, blocks=8, seed=generator.randint(0, 999))
    parts: list[torch.Tensor] = []
    start = 0
    while start < len(tokens):
        chunk = tokens[start : start + generator.randint(1, longest)]
        parts += paged.run([(0, chunk)])
        start += len(chunk)
    return torch.cat(parts)


def run_among_strangers(decoder: Decoder, tokens: list[int], generator: random.Random) -> torch.Tensor:
    """Logits of `tokens`, computed in random chunks in passes that other sequences take part in, in any order."""
    paged = PagedSequences(decoder, blocks=80, seed=6)
    parts: list[torch.Tensor] = []
    start = 0
    while start < len(tokens):
        chunk = tokens[start : start + generator.randint(1, 20)]
        chunks: list[tuple[int, list[int]]] = [(0, chunk)]
        for stranger in generator.sample(range(1, 6), k=generator.randint(1, 4)):
            chunks.append((stranger, random_tokens(generator.randint(1, 9), seed=generator.randint(0, 999))))
        generator.shuffle(chunks)
        results = paged.run(chunks)
        parts += [result for (name, _), result in zip(chunks, results, strict=True) if name == 0]
        start += len(chunk)
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_16_bit_logits_stay_near_fp32(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path, family, seed=7, attention_bias=True)
    tokens = random_tokens(TOKENS, seed=8)
    expected = reference_logits(folder, tokens)
    (logits,) = PagedSequences(load(folder, dtype), blocks=10).run([(0, tokens)])
    assert logits.dtype == torch.float32
    limit = 0.1 if dtype == "bfloat16" else 0.01
    assert (logits - expected).abs().max() <= limit * expected.abs().max()


def test_only_the_wanted_rows_get_logits_and_they_are_the_same_bits(tmp_path: Path) -> None:
    decoder = load(make_checkpoint(tmp_path))
    tokens = random_tokens(40, seed=9)
    (whole,) = PagedSequences(decoder, blocks=3).run([(0, tokens)])
    rows = PagedSequences(decoder, blocks=3).forward([(0, tokens)], torch.tensor([39, 3]))
    assert torch.equal(rows, whole[[39, 3]])
    none = PagedSequences(decoder, blocks=3).forward([(0, tokens)], torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 300)


def test_logits_beyond_the_vocabulary_limit_are_masked(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    tokens = random_tokens(20, seed=10)
    (plain,) = PagedSequences(load(folder), blocks=2).run([(0, tokens)])
    (masked,) = PagedSequences(load(folder, vocab_limit=274), blocks=2).run([(0, tokens)])
    assert torch.equal(masked[:, :274], plain[:, :274])
    assert bool((masked[:, 274:] == -torch.inf).all())


def test_fp16_carries_a_residual_beyond_its_own_range(tmp_path: Path) -> None:
    folder = checkpoint_with_down_bias(tmp_path, 40_000.0)
    tokens = random_tokens(20, seed=11)
    expected = reference_logits(folder, tokens)
    (logits,) = PagedSequences(load(folder, "float16"), blocks=2).run([(0, tokens)])
    assert (logits - expected).abs().max() <= 0.01 * expected.abs().max()


def test_fp16_overflow_is_an_error_that_names_the_tokens(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, seed=12)
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    weights = random_weights(
        {**config, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}, 12, torch.float32
    )
    weights["model.layers.1.mlp.down_proj.weight"] *= 60_000
    weights["model.embed_tokens.weight"][7] = 0  # a token without an activation in the first layers stays finite
    write_weights(folder, weights)
    decoder = load(folder, "float16")
    with pytest.raises(NonFiniteError, match="use dtype bfloat16 or float32") as caught:
        PagedSequences(decoder, blocks=2).run([(0, [7, 5, 6]), (1, [7])])
    assert caught.value.tokens == (1, 2)


def test_an_infinite_k_in_fp16_is_an_error_though_no_query_gives_it_weight(tmp_path: Path) -> None:
    folder = checkpoint_with_infinite_k(tmp_path, 77)
    with pytest.raises(NonFiniteError, match="in float16 for 1 tokens") as caught:
        PagedSequences(load(folder, "float16"), blocks=2).run([(0, [5, 6, 77, 8, 9]), (1, [5, 6])])
    assert caught.value.tokens == (2,)
    (logits,) = PagedSequences(load(folder, "bfloat16"), blocks=2).run([(0, [5, 6, 77, 8, 9])])
    assert bool(logits.isfinite().all())


def checkpoint_with_infinite_k(folder: Path, token: int) -> Path:
    """A checkpoint in which `token` has a k beyond float16 in the first layer, whose score with every q is -infinity.

    One slowly turning pair of channels: the k of this token alone is large and positive there, every q negative.
    """
    make_checkpoint(folder, seed=14, attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    attention = "model.layers.0.self_attn."
    embedding, k_weight = weights["model.embed_tokens.weight"], weights[f"{attention}k_proj.weight"]
    embedding[:, 0] = 0
    embedding[token] = 0
    embedding[token, 0] = 1
    for channel in (7, 15):
        k_weight[channel] = 0
        weights[f"{attention}k_proj.bias"][channel] = 0
        weights[f"{attention}q_proj.weight"][channel::16] = 0
        weights[f"{attention}q_proj.bias"][channel::16] = -0.01
    k_weight[7, 0] = 60_000
    write_weights(folder, weights)
    return folder


def checkpoint_with_down_bias(folder: Path, value: float) -> Path:
    """A checkpoint whose every layer adds `value` to one dimension of the residual."""
    make_checkpoint(folder, seed=13, mlp_bias=True)
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    weights = random_weights(
        {**config, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "mlp_bias": True},
        13,
        torch.float32,
    )
    for layer in range(3):
        weights[f"model.layers.{layer}.mlp.down_proj.bias"][5] = value
    write_weights(folder, weights)
    return folder
