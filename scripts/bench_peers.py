#!/usr/bin/env python3
"""Measures prefill and decode beside the engines one could pick instead: transformers and llama.cpp.

Owns the command line and the order of turns; the parts are in scripts/bench. All run the same seeded random Llama in
bf16 with the same threads, batches and contexts. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import engine_run, llama_cpp_run, random_llama  # noqa: E402
from bench.results import TRANSFORMERS, UNTIERED, decode_limit  # noqa: E402
from bench.transformers_run import StaticDecode, load_model  # noqa: E402
from bench.workload import Settings, Workload, prefill_limit  # noqa: E402

from kvtier import Engine, machine  # noqa: E402
from kvtier.cli.paragraphs import Paragraphs  # noqa: E402

LLAMA_CPP = "llama.cpp"
BATCHES, CONTEXTS = (1, 8), (1024, 8192)
REST_S = 0.1
EXAMPLES = """\
examples:
  scripts/bench_peers.py --quick                      batch 1 and 8 at 1,024 tokens: two minutes
  scripts/bench_peers.py --json peers.json --plot peers.png
  scripts/bench_peers.py --batches 1 --contexts 8192 --rounds 1   one case
  scripts/bench_peers.py --no-llama-cpp               where there is no compiler; else it is built once, 11 CPU minutes

Distinct: each sequence has a prompt of its own. Shared: all have the same prompt, which kvtier and llama.cpp keep once.
A rate of prefill is that of prompts that were never seen. It shares cores with whatever else runs.
"""


class Case(NamedTuple):
    """What is decoded at once."""

    batch: int
    context: int
    shared: bool

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}, {'shared' if self.shared else 'distinct'} prompts"


class Limit(NamedTuple):
    """Tokens a second at most: weights and KV read once a step; products at torch's rate, attention at half of it."""

    decode: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Line:
    """Tokens a second of one system in one case, by round; prefill only where it was measured."""

    system: str
    case: Case
    decode: list[float]
    prefill: list[float]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; the exit status is 1 with one line if something needed is missing."""
    options = parse(arguments)
    console = Console() if Console().is_terminal else Console(width=120)
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=cache))
    torch.set_num_threads(options.threads)
    try:
        with Progress(console=console) as progress:
            lines, limits = measure(options, cache, folder, progress)
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(console, lines, limits)
    if options.json is not None:
        options.json.write_text(json.dumps([plain(line, limits) for line in lines], indent=1))
    if options.plot is not None:
        plot(lines, limits, options.plot)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=Paragraphs)
    add = parser.add_argument
    add("--threads", type=int, default=os.cpu_count(), help="of every system (default: one per core)")
    add("--block-tokens", type=int, choices=[8, 16, 32, 64, 128], default=32, help="default: %(default)s")
    add("--tokens", type=int, default=64, metavar="N", help="of each answer (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each system (default: %(default)s)")
    add("--batches", type=int, nargs="+", choices=BATCHES, default=BATCHES, metavar="N", help="default: 1 8")
    add("--contexts", type=int, nargs="+", choices=CONTEXTS, default=CONTEXTS, metavar="N", help="default: 1024 8192")
    add("--quick", dest="contexts", action="store_const", const=(1024,), help="the same as --contexts 1024")
    add("--no-llama-cpp", action="store_true")
    add("--no-transformers", action="store_true")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    return parser.parse_args(arguments)


def measure(
    options: argparse.Namespace, cache: Path, folder: Path, progress: Progress
) -> tuple[list[Line], dict[Case, Limit]]:
    """Every case; the systems take turns, round after round."""
    sizes = [(batch, context) for context in options.contexts for batch in options.batches]
    cases = [Case(batch, context, shared) for batch, context in sizes for shared in ([False, True][: 1 + (batch > 1)])]
    task = progress.add_task("model", total=None)
    checkpoint = random_llama.make_checkpoint(cache / "models" / "random-llama")
    binary = gguf = None
    if not options.no_llama_cpp:
        progress.update(task, description="llama.cpp (built the first time: 11 CPU minutes)")
        binary = llama_cpp_run.program(cache)
        gguf = random_llama.make_gguf(checkpoint, cache / "models" / "random-llama.gguf")
    settings = Settings(
        checkpoint, "bfloat16", options.threads, options.block_tokens, folder / "cache", 1024, 1,
        tuple({case.batch for case in cases}), tuple({case.context for case in cases}), options.tokens, options.rounds,
    )  # fmt: skip
    workload = Workload(settings)
    read_bytes_s, flops_s = machine.memory_read_bytes_s(), machine.matmul_flops_s(torch.bfloat16)
    model = None if options.no_transformers else load_model(checkpoint, "bfloat16")
    lines: list[Line] = []
    limits: dict[Case, Limit] = {}
    progress.update(task, total=len(cases) * options.rounds, completed=0)
    with engine_run.open_engine(workload, workload.hbm_bytes(), 0, settings.cache_directory) as engine:
        for case in cases:
            progress.update(task, description=str(case))
            kv_bytes = (case.context + options.tokens // 2) * workload.layout.token_bytes
            decode = decode_limit(workload.weights_bytes, kv_bytes, case.batch, read_bytes_s)
            limits[case] = Limit(decode, prefill_limit(workload.config, case.context, flops_s))
            runs = _systems(case, engine, model, workload, options)
            if binary is not None and gguf is not None:
                runs[LLAMA_CPP] = _llama_cpp(case, binary, gguf, options)
            rates: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
            for turn in range(options.rounds):
                for system in list(runs) if turn % 2 == 0 else list(reversed(runs)):
                    time.sleep(REST_S)
                    rates[system].append(runs[system]())
                progress.advance(task)
            for system, pairs in rates.items():
                prefill = [rate for _, rate in pairs if rate is not None]
                lines.append(Line(system, case, [rate for rate, _ in pairs], prefill))
            runs.clear()
    return lines, limits


Run = Callable[[], tuple[float, float | None]]
"""One turn: tokens a second of decode, and of prefill if this turn did one."""


def _systems(
    case: Case, engine: Engine, model: object, workload: Workload, options: argparse.Namespace
) -> dict[str, Run]:
    """kvtier and transformers: each prefills with its first turn and decodes from there in each."""
    prompts = workload.prompts(1 if case.shared else case.batch, case.context) * (case.batch if case.shared else 1)

    def nothing(_: int) -> None:
        pass

    def ours() -> engine_run.EngineDecode:
        return engine_run.EngineDecode(engine, prompts, nothing)

    def theirs() -> StaticDecode:
        return StaticDecode(model, prompts, options.tokens, nothing)

    runs: dict[str, Run] = {UNTIERED: _Turns(case, ours, workload, options.tokens, 1 if case.shared else case.batch)}
    if model is not None:
        runs[TRANSFORMERS] = _Turns(case, theirs, workload, options.tokens, case.batch)
    return runs


class _Turns:
    """A system that keeps its prefilled cache from turn to turn."""

    def __init__(
        self,
        case: Case,
        make: Callable[[], engine_run.EngineDecode | StaticDecode],
        workload: Workload,
        tokens: int,
        prefilled: int,
    ) -> None:
        """`prefilled`: how many prompts `make` computes."""
        self._case, self._make, self._workload, self._tokens, self._prefilled = case, make, workload, tokens, prefilled
        self._decode: engine_run.EngineDecode | StaticDecode | None = None

    def __call__(self) -> tuple[float, float | None]:
        prefill = None
        if self._decode is None:
            started = time.perf_counter()
            self._decode = self._make()
            prefill = self._prefilled * (self._case.context - 1) / (time.perf_counter() - started)
        return self._decode.run(self._workload.last_tokens(self._case.batch), self._tokens)[0], prefill


def _llama_cpp(case: Case, binary: Path, gguf: Path, options: argparse.Namespace) -> Run:
    def turn() -> tuple[float, float | None]:
        rates = llama_cpp_run.run(binary, gguf, options.threads, case.batch, case.context, options.tokens, case.shared)
        return rates.decode, rates.prefill

    return turn


def best_other(lines: list[Line], case: Case, ours: list[float], what: Callable[[Line], list[float]]) -> str:
    """How many times as fast as the best of the others: median of rounds where they can be paired, with its range."""
    others = [line for line in lines if line.case == case and line.system != UNTIERED and what(line)]
    if not others or not ours:
        return ""
    best = max(others, key=lambda line: median(what(line)))
    ratios = [a / b for a, b in zip(ours, what(best), strict=False)]
    return f"{median(ratios):.2f} x {best.system} ({min(ratios):.2f} to {max(ratios):.2f})"


def show(console: Console, lines: list[Line], limits: dict[Case, Limit]) -> None:
    """The table."""
    names = (
        "case",
        "system",
        "decode tokens/s",
        "limit",
        "beside the best other",
        "prefill tokens/s",
        "limit",
        "beside",
    )
    table = Table(*names)
    for line in lines:
        mine = line.system == UNTIERED
        table.add_row(
            str(line.case) if mine else "",
            line.system,
            f"{median(line.decode):.1f}",
            f"{limits[line.case].decode:.0f}" if mine else "",
            best_other(lines, line.case, line.decode, lambda other: other.decode) if mine else "",
            f"{median(line.prefill):.0f}" if line.prefill else "",
            f"{limits[line.case].prefill:.0f}" if mine else "",
            best_other(lines, line.case, line.prefill, lambda other: other.prefill) if mine else "",
        )
    console.print(f"{machine.cpu_name()}, load {os.getloadavg()[0]:.1f}")
    console.print(table)


def plain(line: Line, limits: dict[Case, Limit]) -> dict[str, object]:
    """For JSON."""
    return {
        "system": line.system,
        **line.case._asdict(),
        "decode_tokens_s": line.decode,
        "prefill_tokens_s": line.prefill,
        "limit_tokens_s": limits[line.case].decode,
        "prefill_limit_tokens_s": limits[line.case].prefill,
    }


def plot(lines: list[Line], limits: dict[Case, Limit], path: Path) -> None:
    """A bar for each system and case, with the limit of memory as a mark."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    systems = list(dict.fromkeys(line.system for line in lines))
    cases = list(dict.fromkeys(line.case for line in lines))
    figure, axes = pyplot.subplots(figsize=(11, 5), constrained_layout=True)
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        heights = [median(line.decode) for line in lines if line.system == system]
        axes.bar([x + index * width for x in range(len(heights))], heights, width, label=system)
    for x, case in enumerate(cases):
        label = "limit of this machine" if x == 0 else "_"
        axes.hlines(limits[case].decode, x - width / 2, x + 0.8 - width / 2, colors="black", label=label)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], [str(case) for case in cases], rotation=15)
    axes.set_ylabel("decode, tokens a second")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
