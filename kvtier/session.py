"""A session: the caller's side of one request inside the engine.

Owns what turns tokens into events: text stream, sampler state, times and mailbox. Lives on `Sequence.context` and is
used by the engine thread alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.outbox import Mailbox
from kvtier.request import FinishReason, Usage
from kvtier.sampler import SampleRow, SamplerState
from kvtier.sequence import Sequence
from kvtier.tokens import TextStream


@dataclass(eq=False, slots=True)
class Session:
    """State of one request between submission and its final event. Times are monotonic seconds."""

    mailbox: Mailbox
    sampler_state: SamplerState
    text: TextStream
    submitted_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    gap_s: float | None = None
    """Time between the last two tokens; None before there are two."""

    def take(self, token: int, reason: FinishReason | None, now: float) -> tuple[str, FinishReason | None]:
        """Take a sampled token in; returns the text it frees and why the request ends, stop strings considered.

        `reason` is what tokens and lengths alone say. A token that ends the answer with STOP adds no text.
        """
        if self.last_token_at is None:
            self.first_token_at = now
        else:
            self.gap_s = now - self.last_token_at
        self.last_token_at = now
        self.sampler_state.observe(token)
        text = ""
        if reason is not FinishReason.STOP:
            text, stopped = self.text.push([token])
            if stopped:
                return text, FinishReason.STOP
        if reason is not None:
            text += self.text.finish()
        return text, reason

    def usage(self, sequence: Sequence) -> Usage:
        """What the request has used; TTFT is 0 if there was no token."""
        first = self.first_token_at if self.first_token_at is not None else self.submitted_at
        return Usage(
            prompt_token_count=sequence.prompt_count,
            output_token_count=sequence.output_count,
            origin=sequence.origin,
            reused_blocks=sequence.reused_blocks,
            allocated_blocks=sequence.allocated_blocks,
            ttft_s=first - self.submitted_at,
        )


@dataclass(eq=False, slots=True)
class RequestHandle:
    """What `Engine.submit` returns: a way to cancel. The sink still gets its final event."""

    number: int
    _cancel: Callable[[int], None] = field(repr=False)

    def cancel(self) -> None:
        """End the request after the pass in flight. Any thread, any number of times."""
        self._cancel(self.number)


def session_of(sequence: Sequence) -> Session:
    """The session behind a sequence."""
    assert isinstance(sequence.context, Session)
    return sequence.context


def sample_row(sequence: Sequence) -> SampleRow:
    """What the sampler needs to know of a sequence."""
    return SampleRow(session_of(sequence).sampler_state, sequence.output_count)
