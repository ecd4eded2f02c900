"""Disks and keepers that hang under an engine whose cost model decides: first tokens come as without a shelf.

The tiny model computes a token in a millisecond here, most of it slept, so that times are those of a machine on which
prompts are worth reading, whatever else runs on this one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from engines import keepers, wait_for
from tiny import make_checkpoint

from kvtier import Engine, EngineConfig, Request, SamplingParams, TokenEvent
from kvtier.block import KVLayout, Tier
from kvtier.cost import WAIT_MIN_S, Work
from kvtier.fetch import Fetch
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.sequence import ScheduledSequence
from kvtier.shelves import open_nvme_shelf
from tests.own_time import OwnTime, own_time
from tests.stopped import stopped

BLOCK, PROMPT_BLOCKS = 16, 12
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
TOKEN_S = 0.001
NOISE_S = 2.0
"""What other threads may add; a wait for the tier's deadline would be over twice that."""
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
Prompts = list[list[int]]


def prompts(count: int, seed: int, blocks: int = PROMPT_BLOCKS) -> Prompts:
    """Prompts of `blocks` full blocks and a bit, no two with a common beginning."""
    return [
        [(seed + 31 * number + place * place) % 290 + 3 for place in range(blocks * BLOCK + 3)]
        for number in range(count)
    ]


@contextmanager
def opened(checkpoint: Path, cache: Path, **more: object) -> Iterator[Engine]:
    values: dict[str, object] = {
        "model": checkpoint,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": 200 * LAYOUT.row_bytes,
        "tiers.dram.bytes": 0,
        "tiers.nvme.bytes": "8MiB",
        "tiers.nvme.path": cache,
        "tiers.nvme.wait_s": 60,
        "tiers.linger_s": 0.5,
        "sharing": False,
    }
    config = EngineConfig.load(None, values | {name.replace("__", "."): value for name, value in more.items()})
    with Engine(config) as engine:
        inner = engine._runner.run

        def run(parts: Sequence[ScheduledSequence]) -> list[int]:
            time.sleep(TOKEN_S * sum(part.count for part in parts))
            return inner(parts)

        with mock.patch.object(engine._runner, "run", run):
            yield engine


@dataclass(frozen=True)
class Answer:
    """What came of a request: seconds to its first token that this process had, tokens read from shelves, tokens."""

    first_s: float
    read: int
    token_ids: list[int]


class Waiting:
    """The sink of a request."""

    def __init__(self, engine: Engine, prompt: list[int], clock: OwnTime) -> None:
        self._done = threading.Event()
        self._events: list[TokenEvent] = []
        self._clock = clock
        self._started = clock.seconds
        engine.submit(Request(prompt, PARAMS), self._take)

    def _take(self, event: TokenEvent) -> None:
        if not self._events:
            self._first_s = self._clock.seconds - self._started
        self._events.append(event)
        if event.finish_reason is not None:
            self._done.set()

    def answer(self) -> Answer:
        assert self._done.wait(60), "no final event"
        last = self._events[-1]
        assert last.error is None and last.usage is not None, last.error
        origin = last.usage.origin.as_dict()
        tokens = [token for event in self._events for token in event.token_ids]
        return Answer(self._first_s, origin["dram"] + origin["nvme"], tokens)


def ask(engine: Engine, asked: Prompts, at_once: bool = False) -> list[Answer]:
    """Answers to all prompts, asked at once or one by one."""
    with own_time() as clock:
        if at_once:
            waiting = [Waiting(engine, prompt, clock) for prompt in asked]
            return [one.answer() for one in waiting]
        return [Waiting(engine, prompt, clock).answer() for prompt in asked]


def worst_s(answers: list[Answer]) -> float:
    return max(answer.first_s for answer in answers)


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def push_down(engine: Engine) -> None:
    """Onto NVMe, once all that goes there is there: HBM lets go of what DRAM has, and DRAM has no room for it long."""
    wait_for(lambda: (stats := engine.stats())["waiting_writes"] + stats["writing_blocks"] == 0)
    engine.evict("hbm")
    engine.evict("dram")


def read_sooner_than_computed(engine: Engine, asked: Prompts, without: list[Answer], at_once: bool) -> None:
    """Ask until all is read and sooner there than `without`: in a slow moment of this machine computing may pay."""
    end = time.monotonic() + 60
    while True:
        push_down(engine)
        healthy = ask(engine, asked, at_once)
        assert tokens_of(healthy) == tokens_of(without)
        read = min(answer.read for answer in healthy)
        if read >= PROMPT_BLOCKS * BLOCK and worst_s(healthy) < worst_s(without):
            return
        assert time.monotonic() < end, (healthy, without)


def watch_waits(engine: Engine) -> list[float]:
    """From now on, for each fetch that is given up, how long it was allowed to take as a share of what may be waited.

    That is a tenth of what computing seemed to take when it began, or three times what a row seemed to.
    """
    promoter, waits, starts = engine._store._promoter, list[float](), dict[int, tuple[float, float]]()
    fetch_inner, settle_inner, costs = promoter.fetch, promoter.settle, promoter._costs

    def fetch(hashes: list[bytes], block_total: int, now: float, backlog: Work, first: int = 0) -> Fetch | None:
        made = fetch_inner(hashes, block_total, now, backlog, first)
        if made is not None:
            computing_s = costs.compute_s(backlog) + costs.compute_s(Work.of([(0, len(hashes) * BLOCK)]))
            row_s = max(costs.read_s(tier, 1) for tier in (Tier.DRAM, Tier.NVME))
            starts[id(made)] = now, max(0.1 * computing_s, 3 * row_s, WAIT_MIN_S)
        return made

    def settle(made: Fetch) -> tuple[list[int], list[Tier]]:
        started, allowed_s = starts.pop(id(made))
        if made.pending:
            waits.append((made.deadline - started) / allowed_s)
        return settle_inner(made)

    promoter.fetch, promoter.settle = fetch, settle  # type: ignore[method-assign]
    return waits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def assert_as_without(found: list[Answer], without: list[Answer]) -> None:
    """The same answers, and first tokens at most a fifth later, but for what a crowded machine does."""
    assert tokens_of(found) == tokens_of(without)
    assert worst_s(found) <= 1.2 * worst_s(without) + NOISE_S, (found, without)


@pytest.mark.parametrize(
    ("more", "at_once"),
    [
        ({}, False),
        ({"tiers__hbm__bytes": 26 * LAYOUT.row_bytes}, True),
        ({"tiers__dram__bytes": 20 * SLOT_BYTES}, True),
    ],
    ids=["roomy", "tight", "with DRAM"],
)
def test_first_tokens_over_a_hung_disk_come_as_without_it_and_it_is_used_again(
    more: dict[str, object], at_once: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = FaultyCalls()
    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", functools.partial(open_nvme_shelf, calls=calls))
    asked = prompts(5, 1)
    with opened(checkpoint, tmp_path / "cache", **more) as engine:
        ask(engine, prompts(1, 50))
        without = ask(engine, asked, at_once)
        read_sooner_than_computed(engine, asked, without, at_once)
        push_down(engine)
        waits = watch_waits(engine)
        calls.inject([Fault(Call.READ, calls.count(Call.READ) + 1, Effect.HANG, sticky=True)])
        try:
            hung = ask(engine, asked, at_once)
            assert_as_without(hung, without)
            assert max(answer.read for answer in hung) == 0
            assert waits and max(waits) < 1.5, waits
            assert at_once or len(waits) == 1, "after the first nobody asks it any more"
        finally:
            calls.inject([])
            calls.release()
        end = time.monotonic() + 60
        while max(answer.read for answer in ask(engine, asked)) == 0:
            assert time.monotonic() < end, "the disk is never used again"
            push_down(engine)


def test_hung_writes_block_no_read(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FaultyCalls()
    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", functools.partial(open_nvme_shelf, calls=calls))
    asked = prompts(3, 1)
    with opened(checkpoint, tmp_path / "cache", tiers__load="always") as engine:
        without = ask(engine, asked)
        push_down(engine)
        hung = [Fault(call, calls.count(call) + 1, Effect.HANG, sticky=True) for call in (Call.WRITE, Call.SYNC)]
        calls.inject(hung)
        try:
            ask(engine, prompts(2, 99))
            assert calls.count(Call.WRITE) >= hung[0].nth, "no write has met the hung disk"
            found = ask(engine, asked)
            assert_as_without(found, without)
            assert min(answer.read for answer in found) >= PROMPT_BLOCKS * BLOCK
            with own_time() as clock:
                engine.close(2.0)
                assert clock.seconds < 5
        finally:
            calls.release()


def test_first_tokens_beside_a_stopped_keeper_come_as_with_it(checkpoint: Path, tmp_path: Path) -> None:
    asked, cache = prompts(4, 1), tmp_path / "cache"
    more: dict[str, object] = {"sharing": True, "tiers__load": "always"}  # a slow moment is no reason to compute
    with opened(checkpoint, cache, tiers__dram__bytes=40 * SLOT_BYTES, **more) as engine:
        ask(engine, prompts(1, 50))
        without = ask(engine, asked)
        push_down(engine)
        [keeper] = keepers(cache)
        with stopped(keeper):
            hung = ask(engine, asked)
            assert_as_without(hung, without)
            assert min(answer.read for answer in hung) >= PROMPT_BLOCKS * BLOCK, "rows are read without it"
            fresh = ask(engine, prompts(3, 99))
            assert worst_s(fresh) <= 1.2 * worst_s(without) + NOISE_S
            with own_time() as clock:
                engine.close(2.0)
                assert clock.seconds < 5


def test_an_engine_starts_over_a_disk_that_hangs_while_its_slab_is_rebuilt_and_uses_it_later(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.rebuild.SILENT_S", 0.2)
    monkeypatch.setattr("kvtier.reopening.RETRY_S", 0.05)
    asked = prompts(1, 1)
    with opened(checkpoint, tmp_path / "cache") as engine:
        expected = ask(engine, asked)
        push_down(engine)
    [journal] = (tmp_path / "cache").glob("*/journal")
    journal.unlink()
    calls = FaultyCalls([Fault(Call.READ, 2, Effect.HANG, sticky=True)])  # the first one reads what slab this is
    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", functools.partial(open_nvme_shelf, calls=calls))
    with opened(checkpoint, tmp_path / "cache", tiers__load="always") as engine:
        assert "has given nothing for" in caplog.text
        assert [(one.read, one.token_ids) for one in ask(engine, asked)] == [(0, expected[0].token_ids)]
        calls.inject([])
        calls.release()
        end = time.monotonic() + 60
        while ask(engine, asked)[0].read == 0:
            assert time.monotonic() < end, "the slab never comes"
            engine.evict("hbm")


def test_an_engine_starts_while_its_slab_hangs_in_being_opened_and_uses_it_later(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.assembly.OPEN_S", 0.1)
    calls = FaultyCalls([Fault(Call.ALLOCATE, 1, Effect.HANG, sticky=True)])
    monkeypatch.setattr("kvtier.assembly.open_nvme_shelf", functools.partial(open_nvme_shelf, calls=calls))
    with opened(checkpoint, tmp_path / "cache", tiers__load="always", tiers__nvme__wait_s=0) as engine:
        assert "serving without the NVMe shelf: it has not been opened yet" in caplog.text
        wait_for(lambda: calls.count(Call.ALLOCATE) == 1)
        asked = prompts(1, 1)
        without = ask(engine, asked)
        assert "nvme_slots_total" not in engine.stats()
        calls.release()
        end = time.monotonic() + 60
        while (again := ask(engine, asked))[0].read == 0:
            assert_as_without(again, without)
            assert time.monotonic() < end, "the slab never comes"
            engine.evict("hbm")
