"""Greedy answers of SmolLM2 through a whole engine against transformers: tokens, and logits along the way.

Text, chat through the template, a prompt longer than a step and a warm prefix. transformers gets prompt and answer in
one forward pass without a cache: if each token is its likeliest after all before it, the answer is its greedy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from workloads import Recorder

from kvtier import Completion, Engine, EngineConfig, SamplingParams

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "smollm2"
TOLERANCE = 1e-4
"""Of the largest logit, in fp32: how far logits may differ, and the margin from which on tokens must be equal."""
ANSWER_TOKENS = 64
STEP_TOKENS = 256
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)

STORY = (
    "The lighthouse keeper counted the ships each evening and wrote their names into a long blue book. In the year of "
    "the great storm, number {} of the winter, the book says: the sea was grey, the wind came from the north, and the "
    "fishing boats stayed in the harbour while the keeper trimmed the lamp and waited for the mail.\n"
)
LONG = "".join(STORY.format(number) for number in range(1, 10))
PROMPTS: dict[str, Any] = {
    "facts": "The capital of France is Paris. The capital of Italy is",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "counting": "one, two, three, four, five, six,",
    "unicode": "Grüße aus Zürich – 東京の天気は ☀️ and",
    "chat": [{"role": "user", "content": "Give three reasons why the sky looks blue."}],
    "chat of turns": [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "What is a hash table?"},
        {"role": "assistant", "content": "Arr, a chest with numbered drawers it be."},
        {"role": "user", "content": "And when two keys share a drawer?"},
    ],
    "long": LONG + "The last ship in the book was called",
    "long, warm": LONG + "On the first day of spring the keeper",
}

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        not (MODEL / "model.safetensors").is_file(), reason="SmolLM2 is not there: run scripts/fetch_model.py"
    ),
]


@dataclass(frozen=True)
class Answered:
    """A prompt's tokens as transformers' tokenizer makes them, kvtier's answer and the logits it was sampled from."""

    prompt: list[int]
    completion: Completion
    logits: torch.Tensor
    """[answer token, vocab]."""


def reference_ids(tokenizer: transformers.PreTrainedTokenizerBase, prompt: Any) -> list[int]:
    """Token ids of a prompt, by transformers alone."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def answers() -> dict[str, Answered]:
    """All prompts but the last in one batch; the last once its prefix is in HBM."""
    config = EngineConfig.load(
        None,
        {
            "model": MODEL,
            "dtype": "float32",
            "threads": 2,
            "tiers.hbm.bytes": "512MiB",
            "tiers.dram.bytes": 0,
            "tiers.nvme.bytes": 0,
            "scheduler.step_tokens": STEP_TOKENS,
        },
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    *cold, warm = PROMPTS.values()
    with Engine(config) as engine:
        recorder = Recorder(engine)
        completions = engine.generate(cold, GREEDY) + engine.generate([warm], GREEDY)
    found: dict[str, Answered] = {}
    for number, (name, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        rows = torch.stack([recorder.rows[number, place] for place in range(ANSWER_TOKENS)])
        found[name] = Answered(reference_ids(tokenizer, PROMPTS[name]), completion, rows)
    return found


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")


def reference_logits(model: transformers.PreTrainedModel, answered: Answered) -> torch.Tensor:
    """What transformers would sample each token of the answer from: [answer token, vocab]."""
    tokens = answered.prompt + answered.completion.token_ids
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens[:-1]]), logits_to_keep=ANSWER_TOKENS).logits[0]
    return logits


def test_greedy_answers_equal_transformers(answers: dict[str, Answered], model: transformers.PreTrainedModel) -> None:
    compared: dict[str, int] = {}
    for name, answered in answers.items():
        tokens = torch.tensor(answered.completion.token_ids)
        assert len(tokens) == ANSWER_TOKENS and answered.completion.finish_reason == "length"
        expected = reference_logits(model, answered)
        largest = expected.abs().amax(-1)
        worst = ((answered.logits - expected).abs().amax(-1) / largest).max()
        assert worst <= TOLERANCE, f"{name}: logits differ by {worst:.1e} of the largest"
        top = expected.topk(2).values
        clear = top[:, 0] - top[:, 1] > TOLERANCE * largest
        wrong = (clear & (tokens != expected.argmax(-1))).nonzero().flatten().tolist()
        assert not wrong, f"{name}: tokens {wrong} are not the likeliest"
        compared[name] = int(clear.sum())
    print("tokens compared:", compared)
    assert len(compared) == len(PROMPTS) >= 6
    assert min(compared.values()) >= ANSWER_TOKENS - 4, compared


def test_prompts_were_chunked_and_one_prefix_was_warm(answers: dict[str, Answered]) -> None:
    for answered in answers.values():
        assert answered.completion.prompt_token_count == len(answered.prompt)
    assert len(answers["long"].prompt) > 2 * STEP_TOKENS
    assert all(answered.completion.origin["hbm"] == 0 for name, answered in answers.items() if name != "long, warm")
    warm = answers["long, warm"].completion
    assert warm.origin["hbm"] > 512 and 0 < warm.origin["computed"] < 64
