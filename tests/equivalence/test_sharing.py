"""Engines in processes of their own share what they compute, bit for bit, whoever dies.

Run as a script it is one engine: `python -m tests.equivalence.test_sharing MODEL CACHE`, a prompt a line as JSON in, a
completion a line out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier import Engine, EngineConfig, SamplingParams, cost
from kvtier.block import KVLayout, Tier
from kvtier.record import Record
from tests.engines import PATIENCE_S, keepers, knows_shelves, wait_for
from tests.tiny import make_checkpoint

ROOT = Path(__file__).parent.parent.parent
BLOCK = 16
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
PROMPTS = [[(7 * number + token * token) % 290 + 3 for token in range(6 * BLOCK + 5)] for number in range(6)]
GREEDY = SamplingParams(max_tokens=6)
SHELVES = (Tier.DRAM, Tier.NVME)


def config(model: Path, cache: Path | None) -> EngineConfig:
    """HBM of two prompts, DRAM of three, NVMe for all."""
    values: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": 16 * LAYOUT.row_bytes,
        "tiers.dram.bytes": 24 * SLOT_BYTES if cache else 0,
        "tiers.dram.staging_bytes": 0,
        "tiers.nvme.bytes": "4MiB" if cache else 0,
        "tiers.nvme.path": cache,
        "tiers.load": "always",
        "tiers.linger_s": 0.5,
        "tiers.fetch_deadline_s": 60,
        "tiers.nvme.wait_s": 60,
    }
    return EngineConfig.load(None, values)


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, model: Path, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.equivalence.test_sharing", str(model), str(cache)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *what: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the engine has died"
        return json.loads(line)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Close it, or with SIGKILL do not."""
        if number == signal.SIGKILL:
            self._process.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()


def shelf_rows(engine: Engine, tier: Tier) -> list[Record]:
    """What the engine knows to be on a shelf, between two changes."""
    while True:
        try:
            return engine._store._shelves[tier].coldest(1000)
        except RuntimeError:  # the engine's thread has just heard of another
            continue


def meet(*engines: EngineProcess) -> None:
    """Wait until the engines know the same rows of the keeper that is there."""
    end = time.monotonic() + 60
    while (known := [engine.ask("known") for engine in engines]).count(known[0]) < len(known):
        assert time.monotonic() < end, known
        time.sleep(0.02)


def main() -> None:
    cost.WAIT_MIN_S = PATIENCE_S
    with Engine(config(Path(sys.argv[1]), Path(sys.argv[2]))) as engine:
        for line in sys.stdin:
            name, *rest = json.loads(line)
            answer: object
            if name == "generate":
                done = engine.generate([rest[0]], GREEDY)[0]
                answer = [done.token_ids, done.origin]
            elif name == "settle":
                engine.evict("hbm")
                wait_for(lambda: (now := engine.stats())["waiting_writes"] == now["writing_blocks"] == 0)
                answer = engine.stats()
            elif name == "known":
                wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
                answer = [sorted(record.block_hash.hex() for record in shelf_rows(engine, tier)) for tier in SHELVES]
            else:
                answer = engine.stats()
            print(json.dumps(answer), flush=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What an engine that shares nothing answers."""
    with Engine(config(model, None)) as engine:
        return [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[[], EngineProcess]]:
    processes: list[EngineProcess] = []

    def start_one() -> EngineProcess:
        processes.append(EngineProcess(model, tmp_path / "cache"))
        return processes[-1]

    yield start_one
    for process in processes:
        process.end()


def test_what_one_engine_computes_another_finds_in_dram_and_nvme(
    start: Callable[[], EngineProcess], expected: list[list[int]]
) -> None:
    a, b = start(), start()
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        answer, origin = a.ask("generate", prompt)
        assert answer == tokens and origin["computed"] > 0
        a.ask("settle")
    meet(a, b)
    found = {"dram": 0, "nvme": 0}
    for prompt, tokens in reversed(list(zip(PROMPTS, expected, strict=True))):  # the latest are still in DRAM
        answer, origin = b.ask("generate", prompt)
        assert answer == tokens
        for tier in found:
            found[tier] += origin[tier]
    assert min(found.values()) > 0, found
    assert sum(found.values()) >= 0.9 * 6 * BLOCK * len(PROMPTS), found


def test_an_engine_that_is_killed_leaves_its_work_to_the_others(
    start: Callable[[], EngineProcess], expected: list[list[int]], tmp_path: Path
) -> None:
    a, b = start(), start()
    assert a.ask("generate", PROMPTS[0])[0] == expected[0] and b.ask("stats")
    a.ask("settle")
    meet(a, b)
    a.end(signal.SIGKILL)
    answer, origin = b.ask("generate", PROMPTS[0])
    assert answer == expected[0] and origin["dram"] == 6 * BLOCK
    for keeper in keepers(tmp_path / "cache"):
        os.kill(keeper, signal.SIGKILL)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert b.ask("generate", prompt)[0] == tokens, "a keeper's death is nobody's error"
    c = start()
    assert c.ask("generate", PROMPTS[5])[0] == expected[5]
    c.ask("settle")
    meet(b, c)
    answer, origin = b.ask("generate", [*PROMPTS[5][:-1], 7])
    assert origin["hbm"] + origin["dram"] + origin["nvme"] == 6 * BLOCK
    fresh = [token % 280 + 9 for token in range(6 * BLOCK + 5)]
    (first, _), _ = c.ask("generate", fresh), c.ask("settle")
    meet(b, c)
    answer, origin = b.ask("generate", fresh)
    assert answer == first and origin["dram"] == 6 * BLOCK, "both are with the new keeper"


if __name__ == "__main__":
    main()
