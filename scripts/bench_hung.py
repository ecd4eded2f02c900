#!/usr/bin/env python3
"""Measures first tokens while the disk's reads hang, and while the keeper is stopped, beside an engine without shelves.

Two engines in one process take turns, prompt by prompt, so that a busy machine disturbs both alike. Owns the command
line, the runs and the table; run it with the project's interpreter (.venv/bin/python).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvtier import Engine, EngineConfig, KvtierError, SamplingParams  # noqa: E402
from kvtier.cli.paragraphs import Paragraphs  # noqa: E402
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls  # noqa: E402
from kvtier.shelves import open_nvme_shelf  # noqa: E402

GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
SETTLE_S = 60.0
DESCRIPTION = """\
Measure the time to the first token of prompts whose blocks are on a disk that does not answer.

  hung      the disk hangs once, then every prompt is asked for: who comes first pays, the others know
  victims   the disk works, hangs just before each prompt, and works again: everybody is the first
  keeper    the keeper is stopped (SIGSTOP): prompts that are on the shelves, and new ones

Each prompt is also given to an engine without DRAM and NVMe, which computes it. The goal is a ratio of the 99th
percentiles of at most 1.2.
"""


class StallingDisk:
    """A disk whose reads wait while it hangs, whatever engine makes them."""

    def __init__(self) -> None:
        self.calls = FaultyCalls()

    @property
    def read_count(self) -> int:
        """Reads that have begun, hanging or not."""
        return self.calls.count(Call.READ)

    def hang(self) -> None:
        """From now on no read ends."""
        self.calls.inject([Fault(Call.READ, 1, Effect.HANG, sticky=True)])

    def work(self) -> None:
        """All go on."""
        self.calls.inject([])
        self.calls.release()


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds to first tokens of one kind of prompt with the trouble, and without shelves."""

    run: str
    prompt_tokens: int
    with_s: tuple[float, ...]
    without_s: tuple[float, ...]
    read_tokens: int

    def ratio(self, share: float) -> float:
        """Of the quantiles."""
        return quantile(self.with_s, share) / quantile(self.without_s, share)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Bench:
    """Two engines, the disk of one of them, and prompts."""

    def __init__(self, options: argparse.Namespace, folder: Path, sharing: bool, stack: ExitStack) -> None:
        self.disk = StallingDisk()
        self.cache = folder / ("shared" if sharing else "own")
        self.chance = random.Random(options.seed)
        common: dict[str, object] = {"model": options.model, "dtype": options.dtype, "threads": options.threads}
        common |= {"tiers.hbm.bytes": options.hbm}
        shelves: dict[str, object] = {"tiers.dram.bytes": "256MiB" if sharing else 0, "tiers.nvme.bytes": options.nvme}
        tiered = {**common, **shelves, "tiers.nvme.path": self.cache, "sharing": sharing, "tiers.linger_s": 1}
        with patch("kvtier.assembly.open_nvme_shelf", partial(open_nvme_shelf, calls=self.disk.calls)):
            self.engine = stack.enter_context(Engine(EngineConfig.load(None, tiered)))
        bare = {**common, "tiers.dram.bytes": 0}
        self.bare = stack.enter_context(Engine(EngineConfig.load(None, bare)))
        stack.callback(self.disk.work)
        for _ in range(3):
            self.compare([self.prompt(300)])

    def prompt(self, tokens: int) -> list[int]:
        """Random tokens."""
        return [self.chance.randrange(3, self.engine.model_config.vocab) for _ in range(tokens)]

    def prepare(self, prompts: list[list[int]]) -> None:
        """Compute prompts and push them down to NVMe, and read the first of them back."""
        for prompt in track(prompts, f"preparing prompts of {len(prompts[0]):,} tokens", transient=True):
            first_token(self.engine, prompt)
            self.settle()
        self.push_down()
        _, read = first_token(self.engine, prompts[0])
        if read == 0:
            raise KvtierError("the prompt does not come back from the shelves: nothing to be measured")
        self.push_down()

    def push_down(self) -> None:
        """Nothing in HBM or DRAM any more."""
        self.settle()
        self.engine.evict("hbm")
        self.engine.evict("dram")

    def settle(self) -> None:
        """Let what is written end."""
        end = time.monotonic() + SETTLE_S
        while (stats := self.engine.stats())["writing_blocks"] + stats["waiting_writes"] and time.monotonic() < end:
            time.sleep(0.01)

    def compare(
        self,
        prompts: list[list[int]],
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> tuple[list[float], list[float], int]:
        """Seconds with and without shelves, taking turns in who goes first, and the tokens that were read."""
        ours, bare, read = [], [], 0
        for number, prompt in enumerate(prompts):
            for turn in (number % 2, 1 - number % 2):
                if turn:
                    bare.append(first_token(self.bare, prompt)[0])
                    continue
                if before is not None:
                    before()
                seconds, tokens = first_token(self.engine, prompt)
                ours.append(seconds)
                read += tokens
                if after is not None:
                    after()
        return ours, bare, read


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and prompt tokens that came from DRAM or NVMe."""
    started = time.perf_counter()
    with engine.stream(prompt, GREEDY) as stream:
        first = next(stream)
        seconds = time.perf_counter() - started
        last = [first, *stream][-1]
    assert last.usage is not None
    return seconds, last.usage.origin.dram + last.usage.origin.nvme


def run_disk(options: argparse.Namespace, folder: Path) -> list[Result]:
    """The runs over a hung disk."""
    results: list[Result] = []
    for tokens in options.tokens:
        for run in ("hung", "victims"):
            with ExitStack() as stack:
                bench = Bench(options, folder / f"{run}-{tokens}", False, stack)
                prompts = [bench.prompt(tokens) for _ in range(options.rounds)]
                others = [bench.prompt(tokens) for _ in range(options.rounds if run == "victims" else 0)]
                bench.prepare(prompts + others)
                begun = bench.disk.read_count
                if run == "hung":
                    bench.disk.hang()
                    found = bench.compare(prompts)
                else:
                    found = bench.compare(prompts, bench.disk.hang, partial(recover, bench, iter(others)))
                if found[2] or bench.disk.read_count == begun:
                    raise KvtierError(f"{found[2]} tokens came from a disk that hangs: nothing was measured")
                results.append(Result(run, tokens, tuple(found[0]), tuple(found[1]), found[2]))
    return results


def recover(bench: Bench, others: Iterator[list[int]]) -> None:
    """The disk works again, and the engine has noticed."""
    bench.disk.work()
    end = time.monotonic() + SETTLE_S
    prompt = next(others)
    while time.monotonic() < end:
        bench.push_down()
        if first_token(bench.engine, prompt)[1] > 0:
            break
    bench.push_down()


def run_keeper(options: argparse.Namespace, folder: Path) -> list[Result]:
    """The runs beside a stopped keeper."""
    results: list[Result] = []
    for tokens in options.tokens:
        with ExitStack() as stack:
            bench = Bench(options, folder / f"keeper-{tokens}", True, stack)
            known = [bench.prompt(tokens) for _ in range(options.rounds)]
            bench.prepare(known)
            keeper = keeper_of(bench.cache)
            stack.callback(os.kill, keeper, signal.SIGCONT)
            os.kill(keeper, signal.SIGSTOP)
            fresh = [bench.prompt(tokens) for _ in range(options.rounds)]
            for run, prompts in (("keeper, on the shelves", known), ("keeper, new", fresh)):
                found = bench.compare(prompts)
                if (found[2] > 0) != (prompts is known):
                    raise KvtierError(f"{run}: {found[2]} tokens came from the shelves: not what was to be measured")
                results.append(Result(run, tokens, tuple(found[0]), tuple(found[1]), found[2]))
    return results


def keeper_of(cache: Path) -> int:
    """The process that keeps a cache directory."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"kvtier.keeper" in command and str(cache).encode() in command:
                return int(process.name)
    raise KvtierError("there is no keeper")


def report(results: list[Result], console: Console) -> None:
    """The table, the load beside it."""
    table = Table(title=f"First token in ms, load {os.getloadavg()[0]:.1f}")
    for name in (
        "run",
        "tokens",
        "prompts",
        "with: median",
        "99 %",
        "without: median",
        "99 %",
        "ratio of 99 %",
        "of rounds",
        "read",
    ):
        table.add_column(name, justify="left" if name == "run" else "right")
    for result in results:
        rounds = [ours / bare for ours, bare in zip(result.with_s, result.without_s, strict=True)]
        numbers = [quantile(values, share) for values in (result.with_s, result.without_s) for share in (0.5, 0.99)]
        table.add_row(
            *(
                result.run,
                f"{result.prompt_tokens:,}",
                str(len(rounds)),
                *(f"{1e3 * number:.0f}" for number in numbers),
            ),
            *(f"{result.ratio(0.99):.2f}", f"{statistics.median(rounds):.2f}", f"{result.read_tokens:,}"),
        )
    console.print(table)


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=Paragraphs)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2", help="Hugging Face folder")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: %(default)s")
    add("--threads", type=int, default=os.cpu_count(), help="of each engine (default: one per core)")
    add("--tokens", type=int, nargs="+", default=[200, 1500], help="lengths of prompts (default: 200 1500)")
    add("--rounds", type=int, default=20, help="prompts of each kind (default: %(default)s)")
    add("--only", choices=["disk", "keeper"], help="leave the other out")
    add("--hbm", default="256MiB", help="of each engine (default: %(default)s)")
    add("--nvme", default="4GiB", help="default: %(default)s")
    add("--seed", type=int, default=1)
    add("--cache-directory", type=Path, default=ROOT / ".cache", metavar="DIR", help="on the disk to be measured")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    options = parser.parse_args()
    options.cache_directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.cache_directory))
    try:
        results = [] if options.only == "keeper" else run_disk(options, folder)
        results += [] if options.only == "disk" else run_keeper(options, folder)
    except (KvtierError, OSError) as error:
        print(f"bench_hung: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(results, Console(width=None if sys.stdout.isatty() else 120))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
