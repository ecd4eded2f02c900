"""Session: what a token becomes for the caller, stop strings and endings included, and the times that are told."""

from __future__ import annotations

import json

import pytest
from fakes import make_sequence
from tiny import make_tokenizer

from kvtier.models.config import GenerationDefaults
from kvtier.outbox import Mailbox
from kvtier.request import FinishReason, SamplingParams
from kvtier.sampler import SamplerState, resolve
from kvtier.session import RequestHandle, Session, sample_row, session_of
from kvtier.tokens import TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({}))
    loaded = Tokenizer.load(folder)
    assert loaded is not None
    return loaded


def make_session(tokenizer: Tokenizer, *stops: str) -> Session:
    resolved = resolve(SamplingParams(temperature=0.0, repetition_penalty=1.5), GenerationDefaults())
    state = SamplerState([3, 4], resolved, 300)
    return Session(Mailbox(lambda _: None, lambda: None), state, TextStream(tokenizer, stops), submitted_at=10.0)


def test_text_before_a_stop_string_is_shown_and_what_follows_is_not(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer, "and")
    shown, reason = "", None
    for token in tokenizer.encode("sea and land"):
        text, reason = session.take(token, None, 11.0)
        shown += text
        if reason is not None:
            break
    assert (shown, reason) == ("sea ", FinishReason.STOP)


def test_an_answer_that_ends_by_length_shows_the_text_that_was_held_back(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer, "land ahoy")
    tokens = tokenizer.encode("sea land")
    shown = "".join(session.take(token, None, 11.0)[0] for token in tokens[:-1])
    text, reason = session.take(tokens[-1], FinishReason.LENGTH, 11.0)
    assert shown + text == "sea land" and reason is FinishReason.LENGTH and text


def test_the_token_that_stops_adds_no_text_but_what_was_held_back_is_shown(tokenizer: Tokenizer) -> None:
    session = make_session(tokenizer, "land ahoy")
    shown = "".join(session.take(token, None, 11.0)[0] for token in tokenizer.encode("sea land"))
    text, reason = session.take(tokenizer.encode("x")[0], FinishReason.STOP, 11.0)
    assert shown + text == "sea land" and reason is FinishReason.STOP


def test_times_are_those_of_the_first_and_the_last_two_tokens(tokenizer: Tokenizer) -> None:
    session, sequence = make_session(tokenizer), make_sequence(0, [3, 4], 10)
    assert session.usage(sequence).ttft_s == 0.0
    session.take(5, None, 12.5)
    assert session.gap_s is None and session.usage(sequence).ttft_s == 2.5
    session.take(6, None, 12.75)
    session.take(7, None, 13.75)
    assert session.gap_s == 1.0 and session.usage(sequence).ttft_s == 2.5


def test_a_sequence_leads_back_to_its_session_and_its_next_output(tokenizer: Tokenizer) -> None:
    session, sequence = make_session(tokenizer), make_sequence(0, [3, 4], 10)
    with pytest.raises(AssertionError):
        session_of(sequence)
    sequence.context = session
    sequence.tokens += [7, 8]
    row = sample_row(sequence)
    assert session_of(sequence) is session and row.state is session.sampler_state and row.output_index == 2


def test_a_handle_cancels_its_own_number_and_hides_how() -> None:
    cancelled: list[int] = []
    handle = RequestHandle(7, cancelled.append)
    handle.cancel()
    assert cancelled == [7] and repr(handle) == "RequestHandle(number=7)"
