#!/usr/bin/env python3
"""Measures the NVMe tier alone beside fio: loads and stores of rows, what they cost the CPU, and a busy Python thread.

fio and each engine take turns, pass by pass over the same number of bytes, and are compared by medians of pairs. Owns
the command line and the rounds; run it with the project's interpreter (.venv/bin/python).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]

from bench.fio import HOW_TO_GET, Fio, has_fio  # noqa: E402
from bench.io_report import Case, Round, plot, print_report, to_json  # noqa: E402
from bench.nvme_tier import NvmeTier, busy_thread  # noqa: E402

from kvtier.byte_text import parse_bytes  # noqa: E402
from kvtier.cli.paragraphs import Paragraphs  # noqa: E402
from kvtier.config import IoConfig  # noqa: E402
from kvtier.errors import KvtierError  # noqa: E402

DESCRIPTION = """\
Measure slab, I/O engine and verification together, with rows that are not in any cache, beside what fio gets of the
same disk at the same length and depth. The goals: 0.95 of fio, at most 35 ms of CPU per GB for I/O and 45 for
verification, 0.7 of the rate with a Python thread that never rests. Beside the CPU of I/O stands that of fio, beside
that of verification what it takes to read the memory of the rows once. Stores come out of huge pages, as HBM has them,
and out of a DRAM shelf's memory, which is registered with io_uring, and once more is not. Twice --gib of the disk are
written and given back.
"""
ENGINES = ("uring", "threads")


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=Paragraphs)
    add = parser.add_argument
    add("--gib", type=float, default=8.0, help="data of each pass (default: %(default)s)")
    add("--rows", type=_row_bytes, nargs="+", default=[2 << 20, 384 << 10], help="default: 2MiB 384KiB")
    add("--depths", type=int, nargs="+", default=[16, 32], help="default: 16 32")
    add("--engines", choices=ENGINES, nargs="+", default=list(ENGINES), help="default: both")
    add("--rounds", type=int, default=5, help="turns of each (default: %(default)s)")
    add("--folder", type=Path, default=SCRIPTS.parent / ".cache", help="on the disk to be measured")
    add("--no-fio", action="store_true", help="ours alone")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw a picture (.png, .svg)")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    with_fio = not options.no_fio and has_fio()
    if not with_fio and not options.no_fio:
        console.print(f"{HOW_TO_GET}: ours alone")
    options.folder.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    try:
        for row_bytes in options.rows:
            with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as folder:
                cases += measure(Path(folder), row_bytes, options, with_fio, console.print)
    except (KvtierError, OSError, RuntimeError) as error:
        print(f"bench_io: {error}", file=sys.stderr)
        return 1
    print_report(cases, console)
    if options.json is not None:
        options.json.write_text(to_json(cases))
    if options.plot is not None:
        plot(cases, options.plot)
    return 0


def measure(
    folder: Path, row_bytes: int, options: argparse.Namespace, with_fio: bool, say: Callable[[str], object]
) -> list[Case]:
    """All cases of one row length."""
    total_bytes = int(options.gib * 2**30)
    tier = NvmeTier(folder, row_bytes, total_bytes)
    fio = Fio(folder, tier.row_count * row_bytes, row_bytes) if with_fio else None
    if not tier.direct:
        say(f"{folder}: no direct I/O here, so this measures the page cache")
    cases = [Case(row_bytes, depth, engine, []) for depth in options.depths for engine in options.engines]
    try:
        for number in range(options.rounds):
            for case in cases:
                say(f"round {number + 1} of {options.rounds}: {row_bytes >> 10} KiB, depth {case.depth}, {case.engine}")
                case.rounds.append(one_round(tier, fio, case, number))
    finally:
        tier.close()
        if fio is not None:
            fio.close()
    return cases


def one_round(tier: NvmeTier, fio: Fio | None, case: Case, number: int) -> Round:
    """fio and ours in turn; who begins changes from round to round."""
    io = IoConfig.model_validate(
        {"engine": case.engine, "depth": case.depth, "readers": case.depth, "writers": case.depth}
    )
    if number % 2:
        load, store = tier.load(io, number), tier.store(io, number)
    fio_load, fio_store = (fio.load(case.depth), fio.store(case.depth)) if fio is not None else (None, None)
    if not number % 2:
        load, store = tier.load(io, number), tier.store(io, number)
    plain_load, plain_store = tier.load(io, number, verified=False), tier.store(io, number, summed=False)
    dram_store, unregistered = (tier.store_from_dram(io, number, registered) for registered in (True, False))
    memory = tier.read_memory(number)
    with busy_thread():
        busy_load = tier.load(io, number)
    own = (load, store, plain_load, plain_store, dram_store, unregistered, memory, busy_load)
    return Round(*own, fio_load, fio_store)


def _row_bytes(text: str) -> int:
    size = parse_bytes(text)
    if not isinstance(size, int) or size <= 0 or size % (128 << 10):
        raise argparse.ArgumentTypeError("a row is a multiple of 128KiB")
    return size


if __name__ == "__main__":
    sys.exit(main())
