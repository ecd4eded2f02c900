"""Intake: what a request becomes, and every limit with its sums, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import EOS_TOKEN_ID, make_checkpoint

from kvtier.assembly import Parts, assemble
from kvtier.config import EngineConfig
from kvtier.device import make_device
from kvtier.errors import InvalidRequest
from kvtier.intake import Intake
from kvtier.metrics import Metrics
from kvtier.request import Request, SamplingParams, TokenEvent
from kvtier.session import session_of

BLOCK, HBM_BLOCKS = 16, 10


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return assemble(config(tmp_path_factory.mktemp("tiny")), Metrics(), lambda: None, None, make_device("cpu"))


def config(folder: Path) -> EngineConfig:
    make_checkpoint(folder, "llama", tokenizer=True)
    values = {"model": folder, "block_tokens": BLOCK, "tiers.hbm.bytes": HBM_BLOCKS * 3 * 4096, "tiers.dram.bytes": 0}
    return EngineConfig.load(None, values | {"max_tokens_default": 30, "threads": 1, "context": 140})


@pytest.fixture
def intake(parts: Parts, tmp_path: Path) -> Intake:
    return Intake(parts, config(tmp_path))


def nothing(_: object) -> None:
    """A sink or a cancel that is never called."""


def admit(intake: Intake, length: int, sink: Callable[[TokenEvent], None] = nothing, **params: object) -> object:
    return intake.admit(Request([5] * length, SamplingParams(**params)), sink, nothing)  # type: ignore[arg-type]


def test_a_request_becomes_a_sequence_with_all_it_needs(intake: Intake, parts: Parts) -> None:
    request = Request("hello the end", SamplingParams(max_tokens=7, stop_token_ids=(9,)), priority=3, cache_salt="a")
    sequence = intake.admit(request, nothing, nothing)
    assert parts.tokenizer is not None and sequence.tokens == parts.tokenizer.encode("hello the end")
    assert sequence.prompt_count == len(sequence.tokens) and sequence.output_max == 7
    assert sequence.priority == 3 and sequence.stop_ids == {9, EOS_TOKEN_ID}
    assert session_of(sequence).first_token_at is None
    assert intake.admit(request, nothing, nothing).number > sequence.number


def test_the_salt_decides_the_hashes(intake: Intake) -> None:
    hashes: list[bytes] = []
    for salt in ("a", "b", "a"):
        own: list[bytes] = []
        sequence = intake.admit(Request([5] * BLOCK, cache_salt=salt), nothing, nothing)
        sequence.chain.extend(own, sequence.tokens)
        hashes += own
    assert hashes[0] == hashes[2] != hashes[1]


def test_ignore_eos_leaves_the_request_s_own_stop_tokens(intake: Intake) -> None:
    sequence = intake.admit(Request([5], SamplingParams(ignore_eos=True, stop_token_ids=(8,))), nothing, nothing)
    assert sequence.stop_ids == {8}


@pytest.mark.parametrize(
    ("length", "asked", "output_max"),
    [(10, None, 30), (10, 50, 50), (10, 500, 130), (130, None, 10), (130, 10, 10), (139, 5, 1), (120, None, 20)],
)
def test_answers_are_capped_by_the_default_the_context_and_hbm(
    length: int, asked: int | None, output_max: int, intake: Intake
) -> None:
    sequence = admit(intake, length, max_tokens=asked)
    assert sequence.output_max == output_max  # type: ignore[attr-defined]


@pytest.mark.parametrize(("length", "text"), [(140, "context of 140 holds 139"), (400, "has 400 tokens")])
def test_prompts_beyond_the_context_are_refused(length: int, text: str, intake: Intake) -> None:
    with pytest.raises(InvalidRequest, match=text):
        admit(intake, length)


def test_a_sink_that_breaks_cancels_by_its_own_number(intake: Intake) -> None:
    cancelled: list[int] = []

    def bad(_: TokenEvent) -> None:
        raise ValueError("gone")

    sequence = intake.admit(Request([5]), bad, cancelled.append)
    mailbox = session_of(sequence).mailbox
    mailbox.put(TokenEvent("", (1,)))
    mailbox.deliver()
    assert cancelled == [sequence.number]
