"""Intake: from a caller's `Request` to a `Sequence` the scheduler can take, or a refusal that says what does not fit.

Runs on the caller's thread (tokenizing is the expensive part). Owns the limits a request must meet: context,
vocabulary, what the tiers hold. Knows no queue; the loop keeps those.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from kvtier.assembly import Parts
from kvtier.config import EngineConfig
from kvtier.errors import InvalidRequest
from kvtier.namespace import HashChain
from kvtier.outbox import Mailbox, Sink
from kvtier.request import Request
from kvtier.sampler import SamplerState, resolve
from kvtier.sequence import Sequence
from kvtier.session import Session
from kvtier.tokens import TextStream, encode_prompt


class Intake:
    """Checks and converts requests. Any number of threads."""

    def __init__(self, parts: Parts, config: EngineConfig) -> None:
        self._parts = parts
        self._model = parts.decoder.config
        self._block_tokens = parts.store.layout.block_tokens
        self._capacity = parts.capacity
        self._max_tokens_default = config.max_tokens_default
        self._numbers = itertools.count()

    def admit(self, request: Request, sink: Sink, cancel: Callable[[int], None]) -> Sequence:
        """A new sequence for `request`. Raises InvalidRequest with field, limit and value."""
        submitted_at = time.monotonic()
        tokens = encode_prompt(self._parts.tokenizer, request.prompt)
        retention = request.retention(time.time())
        self._check_tokens(tokens, retention.tenant)
        params = request.params
        output_max = self._output_max(len(tokens), params.max_tokens, retention.tenant)
        for token in params.stop_token_ids:
            if token >= self._model.vocab:
                raise InvalidRequest(f"stop_token_ids: must be below the vocabulary {self._model.vocab}, got {token}")
        number = next(self._numbers)
        eos = frozenset() if params.ignore_eos else self._model.eos_token_ids
        resolved = resolve(params, self._model.generation)
        session = Session(
            mailbox=Mailbox(sink, lambda: cancel(number)),
            sampler_state=SamplerState(tokens, resolved, self._model.vocab),
            text=TextStream(self._parts.tokenizer, params.stop),
            submitted_at=submitted_at,
        )
        return Sequence(
            number=number,
            priority=request.priority,
            tokens=tokens,
            prompt_count=len(tokens),
            output_max=output_max,
            stop_ids=eos | frozenset(params.stop_token_ids),
            chain=HashChain(self._parts.namespace, self._block_tokens, request.cache_salt),
            context=session,
            retention=retention,
            cache_read=request.cache_read,
            cache_write=request.cache_write,
        )

    def _check_tokens(self, tokens: list[int], tenant: bytes) -> None:
        vocab, context = self._model.vocab, self._parts.context
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocab:
            raise InvalidRequest(f"input_ids: must be from 0 to {vocab - 1}, got {low if low < 0 else high}")
        if len(tokens) >= context:
            raise InvalidRequest(
                f"prompt: has {len(tokens)} tokens, the context of {context} holds {context - 1} and an answer"
            )
        if len(tokens) > self._capacity.tokens(tenant):
            raise InvalidRequest(f"prompt: has {len(tokens)} tokens, {self._capacity.shortage(len(tokens), tenant)}")

    def _output_max(self, prompt_count: int, asked: int | None, tenant: bytes) -> int:
        """Tokens to generate at most. The last one needs no place on any tier, since nothing attends to it."""
        room = self._capacity.tokens(tenant) + 1 - prompt_count
        if asked is None:
            return min(self._max_tokens_default, self._parts.context - prompt_count, room)
        wanted = min(asked, self._parts.context - prompt_count)
        if wanted > room:
            total = prompt_count + wanted - 1
            raise InvalidRequest(
                f"max_tokens: {prompt_count} prompt tokens + {wanted} need room for {total}, "
                f"{self._capacity.shortage(total, tenant)}; or ask for {room} or fewer"
            )
        return wanted
