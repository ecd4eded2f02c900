"""What the length of a pass costs whom: a short request that decodes beside a long cold prompt, and that prompt.

`python scripts/bench/step_tokens.py [--model DIR] [--prompt N] [--rounds N] [--threads N] [LENGTH ...]`, by default
with the random Llama of random_llama.py. In each round each length of a pass (`scheduler.step_tokens` and
`scheduler.beside_tokens`) has its turn: the long prompt alone, then another beside a short request. Everything is in
HBM. Times are those at which tokens come through Python; CPU seconds of a prompt alone say more where others use the
cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from bench.engine_run import Collector  # noqa: E402
from bench.random_llama import make_checkpoint  # noqa: E402
from kvtier import Engine, EngineConfig, Request, SamplingParams  # noqa: E402

LENGTHS = (128, 256, 512, 1024)
SHORT_TOKENS = 64
"""Prompt of the short request."""
LEAD_TOKENS = 8
"""Of its answer, before the long prompt comes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured of one length in one round."""

    alone_s: float
    alone_cpu_s: float
    beside_s: float
    gaps_s: list[float]
    """Between tokens of the short request, while the long prompt was computed."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("lengths", nargs="*", type=int, default=LENGTHS, metavar="LENGTH", help="default: 128 256 512 1024")
    add("--model", type=Path, help="Hugging Face folder (default: the random Llama)")
    add("--prompt", type=int, default=8192, help="tokens of the long one (default: %(default)s)")
    add("--rounds", type=int, default=1, help="default: %(default)s")
    add("--threads", type=int, default=os.cpu_count(), help="default: %(default)s")
    options = parser.parse_args()
    model = options.model or make_checkpoint(ROOT / ".cache" / "models" / "random-llama")
    drawn = np.random.default_rng(0)
    turns: defaultdict[int, list[Turn]] = defaultdict(list)
    load = os.getloadavg()[0]
    for _ in range(options.rounds):
        for length in options.lengths:
            first, second = drawn.integers(256, 32000, (2, options.prompt)).tolist()
            with open_engine(model, options.prompt, length, options.threads) as engine:
                turns[length].append(turn := measure(engine, first, second))
            rates = (options.prompt / taken_s for taken_s in (turn.alone_s, turn.beside_s))
            print(length, *(f"{rate:.0f}" for rate in rates), f"{turn.alone_cpu_s:.2f} s of CPU", flush=True)
    table = Table(
        title=f"{model.name}, {options.prompt:,} tokens, {options.threads} threads, load {load:.1f} at the start"
    )
    for heading in (
        "step_tokens",
        "short: ms between tokens",
        "longest",
        "prefill alone, tokens/s",
        "beside",
        "CPU alone",
    ):
        table.add_column(heading, justify="right")
    for length, of_length in turns.items():
        gaps_s = list(itertools.chain.from_iterable(turn.gaps_s for turn in of_length))
        alone_s, beside_s = (median(getattr(turn, name) for turn in of_length) for name in ("alone_s", "beside_s"))
        cpu_s = median(turn.alone_cpu_s for turn in of_length)
        rates = (options.prompt / taken_s for taken_s in (alone_s, beside_s))
        times = (f"{1e3 * median(gaps_s):,.0f}", f"{1e3 * max(gaps_s):,.0f}")
        table.add_row(str(length), *times, *(f"{rate:,.0f}" for rate in rates), f"{cpu_s:.2f} s")
    Console(width=120).print(table)


def measure(engine: Engine, first: list[int], second: list[int]) -> Turn:
    """One prompt alone, another beside a short request."""
    engine.generate([first[:300]], greedy(8))
    cpu_s = time.process_time()
    alone_s, _ = first_token_s(engine, first[::-1])
    cpu_s = time.process_time() - cpu_s
    short = Collector()
    handle = engine.submit(Request(second[:SHORT_TOKENS], greedy(len(second) // 2)), short.take)
    while len(short.arrivals) < LEAD_TOKENS:
        time.sleep(0.01)
    beside_s, began = first_token_s(engine, second[::-1])
    handle.cancel()
    inside = [at for at, _ in short.arrivals if began <= at <= began + beside_s]
    return Turn(alone_s, cpu_s, beside_s, [after - before for before, after in itertools.pairwise(inside)])


def open_engine(model: Path, prompt: int, step_tokens: int, threads: int) -> Engine:
    """HBM for two of the prompts, and nothing else."""
    overrides = {"model": model, "tiers.hbm.bytes": "1GiB", "tiers.dram.bytes": 0, "context": prompt + 8}
    lengths = {"scheduler.step_tokens": step_tokens, "scheduler.beside_tokens": step_tokens}
    return Engine(EngineConfig.load(None, overrides | lengths | {"threads": threads}))


def greedy(tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, float]:
    """Seconds until the first token of a prompt, and when it was sent."""
    long, began = Collector(), time.perf_counter()
    engine.submit(Request(prompt, greedy(1)), long.take)
    long.wait()
    return long.arrivals[0][0] - began, began


if __name__ == "__main__":
    main()
