"""Whole engines on a tiny checkpoint, and what tests of the Python API share: sinks, a gate for passes, waiting."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier import Engine, EngineConfig, SamplingParams, TokenEvent
from kvtier.sequence import ScheduledSequence

VOCAB, CONTEXT, BLOCK = 300, 512, 16
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS: list[list[int]] = [[(7 * number + 3 * place) % 250 + 3 for place in range(20 + number)] for number in range(6)]


@contextmanager
def opened(checkpoint: Path, **overrides: object) -> Iterator[Engine]:
    values = {
        "model": checkpoint,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": "4MiB",
        "tiers.dram.bytes": "4MiB",
        "tiers.load": "always",
        "tiers.fetch_deadline_s": 60,
        "tiers.nvme.wait_s": 60,
    }
    config = EngineConfig.load(None, values | {name.replace("__", "."): value for name, value in overrides.items()})
    with Engine(config) as engine:
        yield engine


class Sink:
    """Gathers the events of one request."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.done = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self.done.set()

    def final(self) -> TokenEvent:
        """The last event; exactly one is final."""
        assert self.done.wait(60), "no final event"
        assert [event.finish_reason is not None for event in self.events] == [False] * (len(self.events) - 1) + [True]
        return self.events[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]


class Gate:
    """Lets an engine's passes through one by one, and keeps what they were made of."""

    def __init__(self, engine: Engine) -> None:
        self._inner = engine._runner.run
        self._permits = threading.Semaphore(0)
        self._open = False
        self.passes: list[list[tuple[int, int]]] = []
        engine._runner.run = self._run  # type: ignore[method-assign]

    def _run(self, parts: Sequence[ScheduledSequence]) -> list[int]:
        self.passes.append([(part.sequence.number, part.count) for part in parts])
        if not self._open:
            assert self._permits.acquire(timeout=120)
        return self._inner(parts)

    def let(self, count: int) -> None:
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        self._open = True
        self._permits.release()


LEAVE_S = 60.0
"""For keepers to leave: more than the linger of tests in which something is to be found after it."""
PATIENCE_S = 30.0
"""What engines may wait for a read at least (`cost.WAIT_MIN_S`) where a test asks what is found, not how soon."""


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never comes to that"
        time.sleep(0.002)


def all_free(engine: Engine) -> bool:
    stats = engine.stats()
    idle = stats["hbm_blocks_used"] == stats["hbm_blocks_sealed"] == engine._store._resident._prefix.idle_count
    return idle and stats["running"] == stats["waiting"] == 0 and not engine._loop._live


def knows_shelves(engine: Engine, *tiers: str) -> bool:
    """Whether these shelves are there, and the engine knows what others have left on them."""
    books = [one for source in engine._store._sources for one in list(source.books.values())]  # type: ignore[attr-defined]
    return all(f"{tier}_slots_total" in engine.stats() for tier in tiers) and all(one.current for one in books)


def keepers(cache: Path) -> list[int]:
    """Processes of the keeper of a cache directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"kvtier.keeper" in command and str(cache).encode() in command:
                found.append(int(process.name))
    return found


def end_keepers(cache: Path, leave_s: float = 0.0) -> None:
    """Kill them; given the time to leave by themselves, longer than they linger, all is in their journals."""
    end = time.monotonic() + leave_s
    while keepers(cache) and time.monotonic() < end:
        time.sleep(0.02)
    for keeper in keepers(cache):
        os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not keepers(cache))
