"""Rope tables: agreement with transformers for every kind, and the same bits whatever the context and threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from kvtier.models.fields import Fields
from kvtier.models.rope import DefaultRope, YarnRope, rope_from_fields, rope_table

HEAD_DIM, CONTEXT = 64, 4096
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
KINDS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_mscale_alone": {**YARN, "mscale": 2.0},
    "yarn_betas": {**YARN, "beta_fast": 24.0, "beta_slow": 3.0},
    "yarn_not_truncated": {**YARN, "truncate": False},
    "yarn_factor_of_contexts": {**YARN, "factor": None},
    "yarn_shrinking": {**YARN, "factor": 1.0},
}


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def fields(parameters: dict[str, object], theta: float) -> Fields:
    """A config.json in the spelling of Transformers 4."""
    return Fields("config.json", {"rope_theta": theta, "rope_scaling": parameters})


@pytest.mark.parametrize("theta", [10_000.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_table_agrees_with_transformers(kind: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={**KINDS[kind], "rope_theta": theta},
    )
    positions = torch.arange(CONTEXT)
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    cos, sin = rope_table(rope_from_fields(fields(KINDS[kind], theta), ["full_attention"], CONTEXT), HEAD_DIM, CONTEXT)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (CONTEXT, HEAD_DIM // 2)
    for table, expected in ((cos, expected_cos[0]), (sin, expected_sin[0])):
        assert torch.equal(expected[:, : HEAD_DIM // 2], expected[:, HEAD_DIM // 2 :])
        torch.testing.assert_close(table, expected[:, : HEAD_DIM // 2], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("_threads")
def test_a_position_has_the_same_bits_whatever_the_context_and_the_threads() -> None:
    rope = DefaultRope(10_000.0)
    torch.set_num_threads(1)
    cos, sin = rope_table(rope, 50, 20_001)
    torch.set_num_threads(2)
    for context in (1, 7, 1003, 8193):
        short_cos, short_sin = rope_table(rope, 50, context)
        assert torch.equal(short_cos, cos[:context]) and torch.equal(short_sin, sin[:context])


def test_cosines_and_sines_of_the_fp32_angle_are_correctly_rounded() -> None:
    rope = DefaultRope(10_000.0)
    cos, sin = rope_table(rope, HEAD_DIM, CONTEXT)
    frequencies = rope.inverse_frequencies(HEAD_DIM)
    for position in range(0, CONTEXT, 37):
        angles = (torch.tensor(float(position)) * frequencies).tolist()
        assert torch.equal(cos[position], torch.tensor([math.cos(angle) for angle in angles]))
        assert torch.equal(sin[position], torch.tensor([math.sin(angle) for angle in angles]))


def test_yarn_kept_and_stretched_frequencies_are_those_of_the_formula() -> None:
    rope = rope_from_fields(fields(YARN, 10_000.0), ["full_attention"], CONTEXT)
    assert isinstance(rope, YarnRope) and rope.context == 4096
    plain = DefaultRope(10_000.0).inverse_frequencies(HEAD_DIM)
    stretched = rope.inverse_frequencies(HEAD_DIM)
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(float(plain[-1]) / 16.0, rel=1e-6)
    assert rope.attention_factor == pytest.approx(1.0 + 0.1 * 2.772588722)
