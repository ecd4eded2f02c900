"""Seeded workloads for the equivalence of tiers, and a runner that records every logits row an engine samples from.

A workload is rounds of requests that arrive together: shared prefixes, lengths around block bounds, divergence inside a
block, cancellations. Between rounds HBM and DRAM are pushed down, so that later rounds must come back from each tier.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvtier import Engine, EngineConfig, Request, SamplingParams
from kvtier.device import Device
from kvtier.engine import RequestOptions
from kvtier.request import TokenEvent
from kvtier.runner import RestingPass
from kvtier.sequence import ScheduledSequence
from kvtier.session import session_of

Key = tuple[int, int]
"""(number of the request, index of the output token)."""


@dataclass(frozen=True)
class Ask:
    """One request; it is cancelled after `cancel_after` tokens if that is not None."""

    prompt: list[int]
    params: SamplingParams
    cancel_after: int | None = None
    cache: RequestOptions = field(default_factory=RequestOptions)
    """What becomes of its blocks."""


@dataclass(frozen=True)
class Round:
    """Requests that are submitted at once, and the tiers that are pushed down before."""

    evict: tuple[str, ...]
    asks: tuple[Ask, ...]


def make_workload(seed: int, block_tokens: int, vocab: int, longest: int, outputs: int = 12) -> list[Round]:
    """Rounds: fresh, a crowd whose answers outgrow a small HBM, then prefixes again from HBM, DRAM and NVMe."""
    rng, wishes = random.Random(seed), random.Random(f"wishes {seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(count)]

    prefixes = [tokens(rng.randrange(2, 5) * block_tokens) for _ in range(2)]
    known: list[list[int]] = []

    def prompt() -> list[int]:
        kind = rng.randrange(4)
        if kind == 0 and known:
            base = rng.choice(known)
            cut = rng.randrange(1, len(base) + 1)
            made = base[:cut] + tokens(rng.randrange(1, 6))
        elif kind == 1 and known:
            made = list(rng.choice(known))
        else:
            length = rng.randrange(1, max(2, longest // block_tokens)) * block_tokens + rng.choice([-1, 0, 1])
            made = (rng.choice(prefixes) + tokens(length))[:length]
        made = made[:longest] or tokens(1)
        known.append(made)
        return made

    def ask(made: list[int]) -> Ask:
        sampled = rng.random() < 0.3
        params = SamplingParams(
            max_tokens=rng.randrange(1, outputs),
            temperature=0.8 if sampled else 0.0,
            seed=rng.randrange(1000) if sampled else None,
            repetition_penalty=1.2 if rng.random() < 0.2 else None,
            ignore_eos=True,
        )
        return Ask(made, params, rng.randrange(1, 4) if rng.random() < 0.15 else None, make_wishes(wishes, 3600))

    fresh = tuple(ask(prompt()) for _ in range(rng.randrange(3, 6)))
    sure = [Ask(prefix + tokens(1), SamplingParams(max_tokens=2, temperature=0.0)) for prefix in prefixes]
    crowd = [
        Ask(tokens(rng.randrange(1, 20)), SamplingParams(max_tokens=40, ignore_eos=True), None, make_wishes(wishes, 1))
        for _ in range(4)
    ]
    rounds = [Round((), (*fresh, *sure)), Round((), tuple(crowd))]
    for evict in (("hbm",), (), ("hbm", "dram")):
        again = tuple(ask(prompt()) for _ in range(rng.randrange(1, 4)))
        rounds.append(Round(evict, (*sure, *again)))
    return rounds


def make_wishes(chance: random.Random, ttl_s: int) -> RequestOptions:
    """What a request wants to become of its blocks; half of them want nothing."""
    options = RequestOptions()
    if chance.random() < 0.5:
        return options
    options["cache_tenant"] = chance.choice(["", "one", "two"])
    options["cache_read"] = chance.random() < 0.7
    options["cache_write"] = chance.random() < 0.7
    if options["cache_write"]:
        options["cache_priority"] = chance.choice([-100, -1, 0, 1, 100])
        options["cache_ttl_s"] = chance.choice([None, ttl_s])
        options["cache_pin"] = chance.random() < 0.3
    return options


class Recorder:
    """Keeps each logits row that a runner samples from, by request and output index."""

    def __init__(self, engine: Engine) -> None:
        self.rows: dict[Key, torch.Tensor] = {}
        inner, end = engine._runner.logits, engine._runner.end_logits

        def logits(parts: list[ScheduledSequence]) -> torch.Tensor:
            return record(parts, inner(parts))

        def end_logits(resting: RestingPass) -> torch.Tensor:
            return record([resting.part], end(resting))

        def record(parts: list[ScheduledSequence], values: torch.Tensor) -> torch.Tensor:
            sampling = [part.sequence for part in parts if part.samples]
            for sequence, row in zip(sampling, values, strict=True):
                key = (sequence.number, sequence.output_count)
                assert key not in self.rows, f"{key} was sampled twice"
                self.rows[key] = row.clone()
            return values

        engine._runner.logits = logits  # type: ignore[method-assign]
        engine._runner.end_logits = end_logits  # type: ignore[method-assign]


@dataclass(frozen=True)
class Outcome:
    """What a workload gave: tokens of each request in order, its logits rows, tokens by origin over all requests."""

    tokens: list[list[int]]
    cancelled: set[int]
    rows: dict[Key, torch.Tensor]
    origin: dict[str, int]
    stats: dict[str, int]


def run_workload(config: EngineConfig, rounds: list[Round], device: Device | None = None) -> Outcome:
    """Run all rounds on a fresh engine (on `device` if there is one), checking its books after every step."""
    with Engine(config, device=device) as engine:
        recorder = Recorder(engine)
        check_each_step(engine)
        end_none_unheard(engine)
        tokens: list[list[int]] = []
        cancelled: set[int] = set()
        origin = dict.fromkeys(("hbm", "dram", "nvme", "computed"), 0)
        for turn in rounds:
            for tier in turn.evict:
                engine.evict(tier)
            collectors = [Collector(engine, ask) for ask in turn.asks]
            for collector in collectors:
                event = collector.wait()
                assert event.error is None, event.error
                assert event.usage is not None
                if event.finish_reason.value == "cancelled":  # type: ignore[union-attr]
                    cancelled.add(len(tokens))
                else:
                    assert sum(event.usage.origin.as_dict().values()) == len(collector.ask.prompt)
                    assert collector.ask.cache.get("cache_read", True) or event.usage.reused_blocks == 0
                    for name, count in event.usage.origin.as_dict().items():
                        origin[name] += count
                tokens.append(collector.token_ids)
        stats = engine.stats()
        assert engine.healthy
    return Outcome(tokens, cancelled, recorder.rows, origin, stats)


class Collector:
    """Submits one request and gathers its tokens."""

    def __init__(self, engine: Engine, ask: Ask, now: Callable[[], float] = time.monotonic) -> None:
        """`now` is the clock of `submitted_at` and `ended_at`."""
        self.ask = ask
        self.token_ids: list[int] = []
        self._ready = threading.Event()
        self._done = threading.Event()
        self._now = now
        self.submitted_at = now()
        self.ended_at = self.submitted_at
        self._handle = engine.submit(Request(ask.prompt, ask.params, **ask.cache), self._take)
        self._ready.set()

    def _take(self, event: TokenEvent) -> None:
        self._ready.wait()
        self.token_ids.extend(event.token_ids)
        if event.finish_reason is not None:
            self._last = event
            self.ended_at = self._now()
            self._done.set()
        elif self.ask.cancel_after is not None and len(self.token_ids) >= self.ask.cancel_after:
            self._handle.cancel()

    def wait(self) -> TokenEvent:
        """The final event."""
        assert self._done.wait(120), "a request did not end"
        return self._last


def check_each_step(engine: Engine) -> None:
    """From now on every step of the engine ends with a check of all books."""
    inner = engine._loop._step

    def step() -> None:
        inner()
        engine._scheduler.check()

    engine._loop._step = step  # type: ignore[method-assign]


def end_none_unheard(engine: Engine) -> None:
    """From now on no request gets its last token before it has been told of all others, which may make it cancel."""
    inner = engine._loop._step

    def step() -> None:
        end = time.monotonic() + 60
        for sequence in list(engine._loop._live.values()):
            while sequence.output_count >= sequence.output_max - 1 and session_of(sequence).mailbox._events:
                assert time.monotonic() < end, "nobody is told"
                time.sleep(0.0002)
        inner()

    engine._loop._step = step  # type: ignore[method-assign]


def assert_equal(reference: Outcome, other: Outcome) -> int:
    """Same tokens and the same bits of logits for everything both have sampled.

    Returns how many logits rows of cancelled requests were compared: how far those came is up to the clock.
    """
    assert len(reference.tokens) == len(other.tokens)
    for index, (ours, theirs) in enumerate(zip(other.tokens, reference.tokens, strict=True)):
        if index in reference.cancelled | other.cancelled:
            common = min(len(ours), len(theirs))
            assert ours[:common] == theirs[:common], f"request {index}"
        else:
            assert ours == theirs, f"request {index}"
            assert {(index, place) for place in range(len(ours))} <= reference.rows.keys() & other.rows.keys()
    common_rows = reference.rows.keys() & other.rows.keys()
    for key in common_rows:
        assert torch.equal(reference.rows[key], other.rows[key]), f"logits of request and token {key} differ"
    return sum(index in reference.cancelled | other.cancelled for index, _ in common_rows)
