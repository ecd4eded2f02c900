#!/usr/bin/env python3
"""Replays a request trace against the directory of a shelf for every eviction policy, and says what each one hits.

Owns the replay, the clairvoyant optimum and the report. Run it with the project's interpreter (.venv/bin/python); it
needs one core and a few minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvtier.cli.paragraphs import Paragraphs  # noqa: E402
from kvtier.directory import Directory  # noqa: E402
from kvtier.eviction import POLICIES  # noqa: E402
from kvtier.record import Record  # noqa: E402

TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
OPTIMUM = "optimum"
UNLIMITED = "unlimited"
EVICTIONS_MAX = 1_000
DESCRIPTION = """\
Hit rates of eviction policies on a trace of chat requests, through the same books that a DRAM or NVMe shelf keeps.

A hit is a block of a prompt's leading run: blocks behind the first miss do not count. Each line of the trace is one
JSON object with `timestamp` (ms) and `hash_ids`, one id per block of the prompt, equal ids meaning equal prefixes. The
first half of the requests is where policies may be tuned; the second half is what they are judged by. The optimum
knows the future and evicts what is used latest; unlimited never evicts.
"""


class TraceError(Exception):
    """The trace cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the trace."""

    at_s: float
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. Shares are leading hits over all blocks asked for."""

    policy: str
    capacity: int
    share_first_half: float
    share_second_half: float
    share: float
    use_us: float | None = None
    """CPU time of all that the directory does for one block of a prompt: find, note, reserve, publish."""
    eviction_us: float | None = None
    """CPU time of one eviction in a call that evicts up to `EVICTIONS_MAX`."""


def main(arguments: list[str] | None = None) -> int:
    """Replay, print, write; the exit status is 1 with one line if the trace cannot be read."""
    options = parse(arguments)
    console = Console()
    try:
        prompts = load(options.trace)
        with Progress(
            TextColumn("{task.description:28}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(), console=console,
        ) as progress:  # fmt: skip
            runs = replay_all(prompts, options.policies, options.capacities, progress)
    except (TraceError, OSError) as error:
        print(f"bench_eviction: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(table(runs, prompts))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    if options.plot is not None:
        plot(runs, options.plot)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line; exits with a message if they are wrong."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=Paragraphs)
    add = parser.add_argument
    add("trace", type=Path, nargs="?", default=TRACE, help="default: %(default)s")
    add("--policies", type=_policies, default=list(POLICIES), metavar="NAME,NAME", help=f"of {', '.join(POLICIES)}")
    add("--capacities", type=_capacities, default=CAPACITIES, metavar="N,N", help="blocks (default: 1000 to 50000)")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    return parser.parse_args(arguments)


def _policies(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    return names


def _capacities(text: str) -> list[int]:
    try:
        counts = [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers of blocks, not {text!r}") from None
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"at least one block, not {min(counts)}")
    return counts


def load(file: Path) -> list[Prompt]:
    """Read a trace. Raises TraceError with file and line, OSError if the file cannot be read."""
    if not file.exists():
        raise TraceError(f"no trace at {file}: give its path (Mooncake's conversation_trace.jsonl, or one like it)")
    prompts: list[Prompt] = []
    hashes: dict[int, bytes] = {}
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                content = json.loads(line)
                ids = [int(value) for value in content["hash_ids"]]
                at_s = float(content["timestamp"]) / 1e3
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{file}, line {number}: no request with timestamp and hash_ids ({error!r})") from None
            if prompts and at_s < prompts[-1].at_s:
                raise TraceError(f"{file}, line {number}: timestamp {at_s} s is before the last one")
            for value in ids:
                hashes.setdefault(value, hashlib.sha256(str(value).encode()).digest())
            prompts.append(Prompt(at_s, [hashes[value] for value in ids]))
    if len(prompts) < 2:
        raise TraceError(f"{file}: {len(prompts)} requests, at least 2 are needed")
    return prompts


def replay_all(
    prompts: Sequence[Prompt], policies: Sequence[str], capacities: Sequence[int], progress: Progress
) -> list[Run]:
    """Every policy and the optimum at every capacity, and what can be hit at all."""
    upcoming = next_uses(prompts)
    most = sum(len(set(prompt.hashes)) for prompt in prompts)
    runs = []
    for capacity in capacities:
        for policy in policies:
            task = progress.add_task(f"{policy}, {capacity} blocks", total=len(prompts))
            runs.append(replay(prompts, policy, capacity, lambda task=task: progress.advance(task)))  # type: ignore[misc]
            progress.remove_task(task)
        runs.append(_run(OPTIMUM, capacity, prompts, optimum_hits(prompts, upcoming, capacity)))
    runs.append(_run(UNLIMITED, most, prompts, optimum_hits(prompts, upcoming, most)))
    return runs


def replay(prompts: Sequence[Prompt], policy: str, capacity: int, advance: Callable[[], object]) -> Run:
    """One policy at one capacity, in the calls that a shelf makes: find, touch, reserve, publish, stamp."""
    directory = Directory(capacity, POLICIES[policy])
    hits = []
    spent_ns = 0
    for prompt in prompts:
        hashes, now = prompt.hashes, prompt.at_s
        start_ns = time.process_time_ns()
        hits.append(len(directory.find(hashes)))
        directory.touch(hashes, now)
        missing = [(depth, value) for depth, value in enumerate(hashes) if not directory.holds(value)]
        grants = directory.reserve(len(missing))
        pairs = zip(missing, grants, strict=False)
        directory.publish([Record(value, *grant, depth, b"") for (depth, value), grant in pairs], now)
        directory.stamp(hashes, now)
        spent_ns += time.process_time_ns() - start_ns
        advance()
    directory.coldest(1)  # what is noted so far is applied here, not below
    count = min(EVICTIONS_MAX, len(directory)) + capacity - directory.used_slots
    evicted = directory.evictions
    start_ns = time.process_time_ns()
    directory.reserve(count)
    eviction_us = (time.process_time_ns() - start_ns) / 1e3 / max(directory.evictions - evicted, 1)
    use_us = spent_ns / 1e3 / sum(len(prompt.hashes) for prompt in prompts)
    return _run(policy, capacity, prompts, hits, use_us, eviction_us)


def _run(
    policy: str,
    capacity: int,
    prompts: Sequence[Prompt],
    hits: Sequence[int],
    use_us: float | None = None,
    eviction_us: float | None = None,
) -> Run:
    half = len(prompts) // 2
    asked = [len(prompt.hashes) for prompt in prompts]
    first, second, whole = (
        sum(hits[part]) / max(sum(asked[part]), 1) for part in (slice(None, half), slice(half, None), slice(None))
    )
    return Run(policy, capacity, first, second, whole, use_us, eviction_us)


def next_uses(prompts: Sequence[Prompt]) -> list[list[int]]:
    """For each block of each prompt the number of the next prompt that asks for it; len(prompts) if none does."""
    seen: dict[bytes, int] = {}
    upcoming: list[list[int]] = []
    for number in reversed(range(len(prompts))):
        hashes = prompts[number].hashes
        upcoming.append([seen.get(value, len(prompts)) for value in hashes])
        seen.update(dict.fromkeys(hashes, number))
    return upcoming[::-1]


def optimum_hits(prompts: Sequence[Prompt], upcoming: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Leading hits of each prompt if the blocks whose next use is latest go first (Belady), the deepest of equals."""
    next_use: dict[bytes, int] = {}
    candidates: list[tuple[int, int, bytes]] = []
    hits = []
    for prompt, following in zip(prompts, upcoming, strict=True):
        hits.append(sum(1 for _ in takewhile(next_use.__contains__, prompt.hashes)))
        for depth, (value, number) in enumerate(zip(prompt.hashes, following, strict=True)):
            next_use[value] = number
            heapq.heappush(candidates, (-number, -depth, value))
        while len(next_use) > capacity:
            number, _, value = heapq.heappop(candidates)
            if next_use.get(value) == -number:
                del next_use[value]
    return hits


def table(runs: Sequence[Run], prompts: Sequence[Prompt]) -> Table:
    """All runs; ratios are those of the second half."""
    asked = sum(len(prompt.hashes) for prompt in prompts)
    minutes = (prompts[-1].at_s - prompts[0].at_s) / 60
    title = f"Leading hits in % of {asked:,} blocks of {len(prompts):,} prompts in {minutes:.0f} minutes"
    result = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    names = ("blocks", "policy", "1st half", "2nd half", "whole", "2nd/LRU", "us/use", "us/evict")
    for name in names:
        result.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    yardsticks = {run.capacity: run.share_second_half for run in runs if run.policy == "lru"}
    for index, run in enumerate(runs):
        yardstick = yardsticks.get(run.capacity)
        shares = (run.share_first_half, run.share_second_half, run.share)
        result.add_row(
            f"{run.capacity:,}",
            run.policy,
            *(f"{100 * share:.1f}" for share in shares),
            f"{run.share_second_half / yardstick:.3f}" if yardstick else "",
            *("" if cost is None else f"{cost:.1f}" for cost in (run.use_us, run.eviction_us)),
            end_section=index + 1 < len(runs) and runs[index + 1].capacity != run.capacity,
        )
    return result


def plot(runs: Sequence[Run], file: Path) -> None:
    """Hits by capacity (logarithmic), one panel for each half, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    halves = (("first half (tuned on)", "share_first_half"), ("second half", "share_second_half"))
    policies = dict.fromkeys(run.policy for run in runs if run.policy != UNLIMITED)
    for axes, (title, field) in zip(panels, halves, strict=True):
        for policy in policies:
            points = sorted((run.capacity, 100 * getattr(run, field)) for run in runs if run.policy == policy)
            style = "k--" if policy == OPTIMUM else "o-"
            axes.plot(*zip(*points, strict=True), style, label=policy)
        bound = next(100 * getattr(run, field) for run in runs if run.policy == UNLIMITED)
        axes.axhline(bound, color="grey", linewidth=0.8, label=UNLIMITED)
        axes.set(xscale="log", xlabel="capacity in blocks", title=title)
        axes.set_xticks(ticks := sorted({run.capacity for run in runs if run.policy in policies}))
        axes.set_xticklabels([f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set(ylabel="leading hits in % of blocks asked for", ylim=(0, None))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
