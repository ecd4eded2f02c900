"""Requests that nothing could be worse than: extreme parameters and broken numbers end their own request at most.

Beside each of them innocent requests run, which must get the very tokens and logits they get alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import GREEDY, PROMPTS, VOCAB, Gate, Sink, all_free, opened, wait_for
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from kvtier import Engine, FinishReason, InvalidRequest, Request, SamplingParams
from kvtier.models.decoder import NonFiniteError
from kvtier.sequence import ScheduledSequence

EDGES: dict[str, list[object]] = {
    "max_tokens": [1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 2**31 - 1],
    "temperature": [0.0, 1e-300, 5e-324, 1e-6, 1.1e-5, 1.0, 100.0, 100],
    "top_k": [-1, 0, 1, 2, VOCAB, 2**31 - 1],
    "top_p": [5e-324, 1e-300, 1e-9, 0.5, 1 - 2**-53, 1.0],
    "min_p": [0.0, 5e-324, 1e-300, 1.0, 1],
    "repetition_penalty": [0.01, 0.02, 1.0, 99.9, 100],
    "presence_penalty": [-2.0, 0.0, 2.0, 5e-324],
    "frequency_penalty": [-2.0, 0.0, 2, 1e-300],
    "seed": [0, 1, 2**63, 2**64 - 1],
    "stop": [(), ("e",), ("\ud800",), ("\x00",), tuple(chr(97 + i) * 256 for i in range(16))],
    "stop_token_ids": [(), (0,), (VOCAB - 1,), tuple(range(16)), tuple(range(150, 166))],
    "ignore_eos": [False, True],
}
"""The most and the least that is allowed."""
BEYOND: list[dict[str, object]] = [
    {"max_tokens": 2**31},
    {"temperature": 100.1},
    {"temperature": math.inf},
    {"top_p": 0.0},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": 5e-324},
    {"frequency_penalty": math.nan},
    {"seed": 2**64},
    {"stop_token_ids": (VOCAB,)},
    {"stop_token_ids": (2**31 - 1,)},
]
HOSTILE_PROMPTS: list[list[int]] = [[0], [VOCAB - 1] * 40, [5] * 300, list(range(VOCAB)), [2] * 3, [256, 299, 0, 1]]
COUNT, GROUP = 200, 25


def hostile_params(rng: random.Random) -> dict[str, object]:
    """Values from the edge of what is allowed, now and then one from beyond; what is left out has its default."""
    params = {name: rng.choice(values) for name, values in EDGES.items() if name == "max_tokens" or rng.random() < 0.6}
    return params | (rng.choice(BEYOND) if rng.random() < 0.2 else {})


def innocents() -> list[Request]:
    seeded = SamplingParams(max_tokens=60, temperature=0.9, top_p=0.95, seed=7, repetition_penalty=1.1, ignore_eos=True)
    greedy = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    return [Request(PROMPTS[0], greedy), Request(PROMPTS[1], seeded)]


def test_a_model_with_heads_of_an_odd_number_of_vectors_is_served(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", head_dim=20)
    with opened(checkpoint) as engine, opened(checkpoint, attention="reference") as other:
        assert engine.generate(PROMPTS[:2], GREEDY)[0].token_ids == other.generate(PROMPTS[:2], GREEDY)[0].token_ids


@pytest.mark.parametrize("logits_scale", [1.0, pytest.param(1e37, marks=pytest.mark.long)])
def test_extreme_parameters_harm_nobody(logits_scale: float, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=True)
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] *= logits_scale
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    outcomes: Counter[str] = Counter()
    with opened(checkpoint) as engine:
        expected = [gather(engine, [request])[0].token_ids for request in innocents()]
        for seed in range(0, COUNT, GROUP):
            sinks = [submit(engine, request) for request in innocents()]
            for number in range(seed, seed + GROUP):
                rng = random.Random(number)
                try:
                    params = SamplingParams(**hostile_params(rng))  # type: ignore[arg-type]
                    sinks.append(submit(engine, Request(rng.choice(HOSTILE_PROMPTS), params)))
                except InvalidRequest:
                    outcomes["refused"] += 1
            for sink in sinks:
                final = sink.final()
                assert final.error is None, (seed, final.error)
                outcomes[str(final.finish_reason)] += 1
            assert [sink.token_ids for sink in sinks[:2]] == expected, seed
        assert engine.healthy
        wait_for(lambda: all_free(engine))
    assert sum(outcomes.values()) == COUNT + 2 * COUNT // GROUP
    assert 20 < outcomes["refused"] < COUNT / 3, outcomes
    assert outcomes[str(FinishReason.LENGTH)] > 100 and outcomes[str(FinishReason.STOP)] >= 5, outcomes


def submit(engine: Engine, request: Request) -> Sink:
    sink = Sink()
    engine.submit(request, sink)
    return sink


def gather(engine: Engine, requests: list[Request]) -> list[Sink]:
    """Submit all at once, so that they share passes, and wait for each."""
    gate = Gate(engine)
    sinks = [submit(engine, request) for request in requests]
    gate.open()
    for sink in sinks:
        sink.final()
    return sinks


class LastRows:
    """The logits row each output token was sampled from in the end, by first prompt token and output index."""

    def __init__(self, engine: Engine) -> None:
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        inner = engine._runner.logits

        def logits(parts: Sequence[ScheduledSequence]) -> torch.Tensor:
            values = inner(parts)
            sampling = [part.sequence for part in parts if part.samples]
            for sequence, row in zip(sampling, values, strict=True):
                self.rows[sequence.tokens[0], sequence.output_count] = row.clone()
            return values

        engine._runner.logits = logits  # type: ignore[method-assign]


def break_logits(checkpoint: Path, token: int, value: float) -> None:
    """Make a logit infinite after `token` alone: it alone has a part along the first axis, which one logit reads."""
    weights = load_file(checkpoint / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, 0] = 0
    embedding[token, 0] = 5
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
    weights["model.norm.weight"][0] = 50
    head[:, 0] = 0
    head[9, 0] = value
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def break_embedding(checkpoint: Path, token: int, value: float) -> None:
    """Make the first hidden state of `token` not finite."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][token, 3] = value
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "breaks", "value"),
    [
        ("float32", break_logits, 3e38),
        ("bfloat16", break_logits, 3e38),
        ("float16", break_logits, 6e4),
        ("float32", break_embedding, math.nan),
        ("bfloat16", break_embedding, -math.inf),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, seed=3, repetition_penalty=1.3)])
def test_a_row_without_finite_values_ends_its_own_request_only(
    dtype: str, breaks: object, value: float, params: SamplingParams, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    breaks(checkpoint, 77, value)  # type: ignore[operator]
    sound = [[token for token in prompt if token != 77] for prompt in PROMPTS[:3]]
    with opened(checkpoint, dtype=dtype) as engine:
        kept = LastRows(engine)
        expected = [sink.token_ids for sink in gather(engine, [Request(prompt, GREEDY) for prompt in sound])]
        alone, kept.rows = kept.rows, {}
        bad = [9, *sound[0][:17], 77]
        requests = [Request(prompt, params if prompt is bad else GREEDY) for prompt in (sound[0], bad, *sound[1:])]
        sinks = gather(engine, requests)
        error = sinks.pop(1).final().error
        assert isinstance(error, NonFiniteError) and error.tokens == (len(bad) - 1,)
        assert f"NaN or infinity in {dtype} for 1 tokens" in str(error)
        assert [sink.token_ids for sink in sinks] == expected
        assert len(alone) == 36 and kept.rows.keys() >= alone.keys()
        if dtype == "float32":
            assert all(torch.equal(kept.rows[key], row) for key, row in alone.items())
        assert engine.healthy and engine.metrics.request_failures.value("internal") == 1
        wait_for(lambda: all_free(engine))
