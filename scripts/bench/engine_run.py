"""TTFT by origin and decode rates through kvtier's Python API.

Each measurement is of the caller's own clock, from the call to the event in hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.results import API, ORIGINS, Arrival, Ttft, decode_rate
from bench.workload import Workload
from kvtier import Engine, EngineConfig, Request, SamplingParams, TokenEvent

SETTLE_S = 60.0
WARM_UP_TOKENS = 300
Advance = Callable[[int], None]


def open_engine(workload: Workload, hbm: int, shelves: int, folder: Path) -> Engine:
    """An engine with `shelves` bytes of DRAM and as many of NVMe; 0: neither."""
    return Engine(EngineConfig.load(None, workload.tier_overrides(hbm, shelves, shelves, folder)))


def settle(engine: Engine) -> None:
    """Wait until nothing is being written to the shelves any more."""
    deadline = time.monotonic() + SETTLE_S
    while (stats := engine.stats())["writing_blocks"] + stats["waiting_writes"] > 0:
        if time.monotonic() > deadline:
            raise RuntimeError(f"writes to the shelves did not end within {SETTLE_S:g} s: {stats}")
        time.sleep(0.01)


def measure_ttft(engine: Engine, workload: Workload, limits_s: dict[str, float], advance: Advance) -> Iterator[Ttft]:
    """The prompt computed, then from each tier, with new prompts for every sample; `advance(1)` after each prompt."""
    settings = workload.settings
    samples: dict[str, list[float]] = {origin: [] for origin in ORIGINS}
    proof: dict[str, dict[str, int]] = {}
    _first_token(engine, workload.prompts(1, min(settings.prefix_tokens, WARM_UP_TOKENS))[0])
    for prompt in workload.prompts(settings.ttft_samples, settings.prefix_tokens):
        for origin in ORIGINS:
            settle(engine)
            if origin in ("dram", "nvme"):
                engine.evict("hbm")
            if origin == "nvme":
                engine.evict("dram")
            duration_s, tokens = _first_token(engine, prompt)
            samples[origin].append(duration_s)
            proof[origin] = tokens
            advance(1)
    for origin in ORIGINS:
        yield Ttft(API, origin, settings.prefix_tokens, tuple(samples[origin]), proof[origin], limits_s[origin])


class EngineDecode:
    """A batch of prompts whose prefix an engine holds in HBM."""

    def __init__(self, engine: Engine, prompts: list[list[int]], advance: Advance) -> None:
        """Compute each prefix once, one after the other; `advance(tokens)` follows it. Prompts are of one length."""
        self._engine = engine
        self._prefixes = [prompt[:-1] for prompt in prompts]
        for prefix in {tuple(prefix): prefix for prefix in self._prefixes}.values():
            engine.generate([prefix], _greedy(1))
            advance(len(prefix))

    def run(self, last_tokens: list[int], token_count: int, *, keeps: bool = True) -> tuple[float, list[list[int]]]:
        """Decode after the given last prompt tokens: tokens a second, and the tokens. Waits for the writes after it.

        Without `keeps` there are none.
        """
        params = _greedy(token_count)
        collectors = [Collector() for _ in last_tokens]
        for prefix, token, collector in zip(self._prefixes, last_tokens, collectors, strict=True):
            self._engine.submit(Request([*prefix, token], params, cache_write=keeps), collector.take)
        tokens = [collector.wait() for collector in collectors]
        settle(self._engine)
        return decode_rate([collector.arrivals for collector in collectors]), tokens


class Collector:
    """The sink of one request: when its tokens came, and which."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        """`first` is called with the first token."""
        self.arrivals: list[Arrival] = []
        self._first = first
        self._tokens: list[int] = []
        self._error: Exception | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """The last event has come."""
        return self._done.is_set()

    def take(self, event: TokenEvent) -> None:
        """An event, on a sender's thread."""
        self.arrivals.append((time.perf_counter(), len(event.token_ids)))
        if len(self.arrivals) == 1:
            self._first()
        self._tokens.extend(event.token_ids)
        if event.finish_reason is not None:
            self._error = event.error
            self._done.set()

    def wait(self) -> list[int]:
        """All tokens, once the last one has come. Raises the request's error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._tokens


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, dict[str, int]]:
    started = time.perf_counter()
    with engine.stream(prompt, _greedy(2)) as stream:
        first = next(stream)
        duration_s = time.perf_counter() - started
        last = [first, *stream][-1]
    assert last.usage is not None
    return duration_s, last.usage.origin.as_dict()


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
