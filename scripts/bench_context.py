#!/usr/bin/env python3
"""Measures contexts larger than HBM: decode and prefill streamed from DRAM and NVMe beside all in HBM, and the disk.

Owns the command line, the engines and the order of turns. Everything that is compared takes turns, round after round;
ratios are those of the rounds. Run it with the project's interpreter (.venv/bin/python) on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.fio import HOW_TO_GET, Fio, has_fio  # noqa: E402
from bench.streamer import DEPTH, SHARE, STAGING_BYTES, TENANT, Sizes, Streamer  # noqa: E402
from bench.tiering_cost import BATCHES, GOAL, measure_tiering  # noqa: E402
from bench.workload import Settings, Workload  # noqa: E402

from kvtier import KvtierError, machine  # noqa: E402
from kvtier.cli.paragraphs import Paragraphs  # noqa: E402

FIO_BYTES = 512 << 20
ENGINES = {"decode": ("hbm", "dram", "nvme"), "prefill": ("hbm", "dram"), "others": ("nvme",), "tiering": ()}
"""Which engines each of the lines needs; the last has its own."""
EXAMPLES = """\
examples:
  scripts/bench_context.py --quick                         2,000 tokens, two rounds
  scripts/bench_context.py --only others                   one of the lines below
  scripts/bench_context.py --json context.json --plot context.png

decode   tokens a second of one sequence: all in HBM; a quarter in HBM and the rest in DRAM; an eighth in HBM and
         the rest on NVMe, whose bytes a second stand beside those of fio at the same length and depth
prefill  time to the first token of a prompt that was never seen: a quarter of HBM beside all
others   time between tokens of a resident sequence while another streams from NVMe, beside none
tiering  tokens a second all in HBM, 1,024 tokens of prompt or the context if that is less: with shared DRAM and NVMe
         and nothing to move, and with the answers' blocks written down, beside HBM alone
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison, by round."""

    name: str
    unit: str
    ours: list[float]
    limit: list[float]
    """What it stands beside, of the same round."""
    limit_name: str
    goal: str

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return median(a / b for a, b in zip(self.ours, self.limit, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write."""
    options = parse(arguments)
    console = Console() if Console().is_terminal else Console(width=120)
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=cache))
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    try:
        with Progress(console=console) as progress:
            lines = measure(options, folder, progress)
    except (KvtierError, OSError, RuntimeError) as error:
        print(f"bench_context: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not has_fio():
        console.print(f"{HOW_TO_GET}: without it nothing stands beside the disk's rate")
    show(console, lines, load)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(line) | {"ratio": line.ratio} for line in lines], indent=1))
    if options.plot is not None:
        plot(lines, options.plot)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=Paragraphs)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2", help="Hugging Face folder")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: %(default)s")
    add("--context", type=int, metavar="TOKENS", help="of a prompt (default: 8000)")
    add("--tokens", type=int, metavar="N", help="of each answer (default: 32)")
    add("--rounds", type=int, metavar="N", help="turns (default: 5)")
    add("--threads", type=int, default=os.cpu_count(), help="default: one per core")
    add("--block-tokens", type=int, choices=[8, 16, 32, 64, 128], default=32, help="default: %(default)s")
    add("--only", choices=list(ENGINES), nargs="+", default=list(ENGINES), help="which lines (default: all)")
    add("--quick", action="store_true", help="2,000 tokens, 16 of each answer, two rounds")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    options = parser.parse_args(arguments)
    defaults = (2000, 16, 2) if options.quick else (8000, 32, 5)
    for name, default in zip(("context", "tokens", "rounds"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def measure(options: argparse.Namespace, folder: Path, progress: Progress) -> list[Line]:
    """All lines."""
    settings = Settings(
        options.model, options.dtype, options.threads, options.block_tokens, folder, options.context, 1, (1,),
        (options.context,), options.tokens, options.rounds,
    )  # fmt: skip
    workload = Workload(settings)
    layout = workload.layout
    sizes = Sizes(layout.block_count(options.context + options.tokens), layout.row_bytes)
    kinds = {"hbm": (sizes.resident(), ""), "dram": (sizes.from_dram(), ""), "nvme": (sizes.from_nvme(), TENANT)}
    needed = [kind for kind in kinds if any(kind in ENGINES[line] for line in options.only)]
    own_rounds = sum(line == "tiering" for line in options.only) * options.rounds * (len(BATCHES) - 1)
    task = progress.add_task("engines", total=len(options.only) * options.rounds + own_rounds + len(needed))
    lines: list[Line] = []
    if "tiering" in options.only:
        progress.update(task, description="tiers with nothing to load")
        lines += [
            Line(cost.name, "tokens/s", cost.tiered, cost.bare, "HBM alone", GOAL)
            for cost in measure_tiering(settings, folder / "tiering", lambda: progress.advance(task))
        ]
    with ExitStack() as stack:
        engines: dict[str, Streamer] = {}
        prompt = workload.prompts(1, options.context)[0]
        for kind in needed:
            progress.update(task, description="prefill")
            tiers, tenant = kinds[kind]
            engines[kind] = Streamer(options, tiers, folder / kind, tenant)
            stack.callback(engines[kind].engine.close)
            engines[kind].first_token_s(prompt)
            progress.advance(task)
        if "decode" in options.only:
            progress.update(task, description="decode")
            lines += measure_decode(options, folder, workload, prompt, engines, lambda: progress.advance(task))
        if "others" in options.only:
            progress.update(task, description="resident beside streamed")
            lines += measure_others(options, workload, prompt, engines["nvme"], lambda: progress.advance(task))
        if "prefill" in options.only:
            progress.update(task, description="prefill of new prompts")
            lines.append(measure_prefill(options, workload, engines, lambda: progress.advance(task)))
    return lines


def measure_decode(
    options: argparse.Namespace,
    folder: Path,
    workload: Workload,
    prompt: list[int],
    engines: dict[str, Streamer],
    advance: Callable[[], None],
) -> list[Line]:
    """Decode of each kind in turn, with a new last token each time, and fio after it."""
    all_hbm, dram, nvme = engines["hbm"], engines["dram"], engines["nvme"]
    read_bytes = _read_bytes(workload, options)
    fio = Fio(folder, FIO_BYTES, read_bytes) if has_fio() else None
    rates: dict[str, list[float]] = {name: [] for name in ("hbm", "dram", "nvme", "nvme bytes", "fio")}
    for _ in range(options.rounds):
        asked = [*prompt[:-1], workload.last_tokens(1)[0]]
        rates["hbm"].append(all_hbm.decode(asked, options.tokens)[0])
        rate, moved = dram.decode(asked, options.tokens)
        assert moved["dram"] > 0, "nothing was attended to in DRAM"
        rates["dram"].append(rate)
        rate, moved = nvme.decode(asked, options.tokens)
        assert moved["nvme"] > 0, "nothing was staged from NVMe"
        rates["nvme"].append(rate)
        rates["nvme bytes"].append(moved["nvme"] / 1e6)
        if fio is not None:
            rates["fio"].append(fio.load(DEPTH).bytes_s / 1e6)
        advance()
    lines = [
        Line("decode, 3/4 in DRAM", "tokens/s", rates["dram"], rates["hbm"], "all in HBM", ">= 0.9"),
        Line("decode, 7/8 on NVMe", "tokens/s", rates["nvme"], rates["hbm"], "all in HBM", ""),
    ]
    if fio is not None:
        fio.close()
        name = f"fio, {read_bytes >> 10} KiB, depth {DEPTH}"
        lines.append(Line("streamed from NVMe", "MB/s", rates["nvme bytes"], rates["fio"], name, ">= 0.9"))
    return lines


def _read_bytes(workload: Workload, options: argparse.Namespace) -> int:
    """Length of a staged read: as many layers as let two groups of all rows fit the staging memory."""
    layout = workload.layout
    rows = layout.block_count(options.context + options.tokens) * 7 // 8
    return max(1, min(STAGING_BYTES // layout.slice_bytes // (2 * rows), layout.layers)) * layout.slice_bytes


def measure_others(
    options: argparse.Namespace, workload: Workload, prompt: list[int], nvme: Streamer, advance: Callable[[], None]
) -> list[Line]:
    """Time between tokens of a short resident sequence, alone and beside one that streams from NVMe.

    Alone is measured before and after, so that what drifts falls on both alike. And what the latter streams meanwhile,
    beside what it streams once it is alone.
    """
    gaps: tuple[list[float], list[float]] = [], []
    streamed: tuple[list[float], list[float]] = [], []
    for _ in range(options.rounds):
        short = workload.prompts(1, 64)[0]
        before = nvme.decode(short, 4 * options.tokens, keeps=False)[0]
        other, handle = nvme.start([*prompt[:-1], workload.last_tokens(1)[0]], 100 * options.tokens)
        while not other.arrivals:
            time.sleep(0.01)
        rate, moved = nvme.decode(short, 4 * options.tokens, keeps=False)
        assert moved["nvme"] > 0, "nothing was streamed beside it"
        gaps[0].append(1e3 / rate)
        streamed[0].append(moved["nvme"] / 1e6)
        streamed[1].append(nvme.rate(other, options.tokens // 2)["nvme"] / 1e6)
        assert not other.done, "the streamed sequence ended too early"
        handle.cancel()
        other.wait()
        after = nvme.decode(short, 4 * options.tokens, keeps=False)[0]
        gaps[1].append(500 / before + 500 / after)
        advance()
    return [
        Line("resident beside streamed", "ms a token", *gaps, "alone", f"<= {1 + SHARE:g}"),
        Line("streamed beside resident", "MB/s", *streamed, "alone", ""),
    ]


def measure_prefill(
    options: argparse.Namespace,
    workload: Workload,
    engines: dict[str, Streamer],
    advance: Callable[[], None],
) -> Line:
    """First tokens of new prompts."""
    took: tuple[list[float], list[float]] = [], []
    for prompt in workload.prompts(options.rounds, options.context):
        before = engines["dram"].engine.stats()["streamed_dram_bytes"]
        for streamer, samples in zip((engines["hbm"], engines["dram"]), took, strict=True):
            samples.append(streamer.first_token_s(prompt))
        assert engines["dram"].engine.stats()["streamed_dram_bytes"] > before, "nothing was attended to in DRAM"
        advance()
    return Line("prefill, 1/4 in HBM", "s", took[1], took[0], "all in HBM", "<= 1.1")


def show(console: Console, lines: list[Line], load: float) -> None:
    """The table."""
    table = Table("what", "unit", "median", "beside", "median", "ratio", "of rounds", "goal")
    for line in lines:
        ratios = [a / b for a, b in zip(line.ours, line.limit, strict=True)]
        numbers = (f"{median(line.ours):.1f}", line.limit_name, f"{median(line.limit):.1f}", f"{line.ratio:.3f}")
        table.add_row(line.name, line.unit, *numbers, f"{min(ratios):.3f} to {max(ratios):.3f}", line.goal)
    console.print(f"{machine.cpu_name()}, load {load:.1f}")
    console.print(table)


def plot(lines: list[Line], path: Path) -> None:
    """A bar for each ratio."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), constrained_layout=True)
    axes.barh([f"{line.name}\nbeside {line.limit_name} ({line.goal})" for line in lines], [one.ratio for one in lines])
    axes.axvline(1.0, color="black", linestyle="dashed")
    axes.set_xlabel("ratio, median of rounds")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
