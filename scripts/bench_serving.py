#!/usr/bin/env python3
"""Measures serving: TTFT by origin, decode beside `transformers`, the cost of tiering; through Python and gRPC.

Owns the command line and the order of the runs; the parts are in scripts/bench. Run it with the project's interpreter
(.venv/bin/python) on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import engine_run, server_run  # noqa: E402
from bench.report import plot, print_report, to_json  # noqa: E402
from bench.results import TIERED, TRANSFORMERS, UNTIERED, Decode, Machine, Results, Ttft, decode_limit  # noqa: E402
from bench.transformers_run import StaticDecode, load_model  # noqa: E402
from bench.workload import Settings, Workload  # noqa: E402

from kvtier import Engine, KvtierError, machine  # noqa: E402
from kvtier.cli.paragraphs import Paragraphs  # noqa: E402

READERS = 4
"""As io.readers of engine.yaml."""
REST_S = 0.05
"""Between two systems' turns, so that idle threads of the one before are asleep."""
WIDTH = 120
"""Of the tables where there is no terminal."""
DESCRIPTION = """\
Measure kvtier on this machine.

  TTFT     the time to the first token of a prompt that was never seen (computed), and of the same prompt with its
           prefix in HBM, in DRAM, and on NVMe (direct reads: never from the page cache)
  decode   tokens a second at every batch and context, greedy: kvtier with DRAM and NVMe on, kvtier with both off, and
           transformers with a static cache on the same weights, dtype, threads and prompts. The systems take turns,
           round after round; ratios are those of the rounds, so a noisy machine disturbs them least.
  limits   beside every number what this machine's memory, disk or arithmetic alone would allow, measured as well
"""
EXAMPLES = """\
examples:
  scripts/bench_serving.py --quick                              about a minute
  scripts/bench_serving.py --json bench.json --plot bench.png   everything through the Python API
  scripts/bench_serving.py --server                             and through gRPC against a Triton server it starts
  scripts/bench_serving.py --batches 1 --contexts 8000 --prefix 6000

It shares cores with whatever else runs: look at the load in its first line before believing a number.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; the exit status is 1 with one line if something needed is missing."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    options.cache_directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.cache_directory))
    try:
        with Progress(
            TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        ) as progress:
            results = run(options, folder, progress)
    except (KvtierError, ImportError, OSError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_report(results, console)
    if options.json is not None:
        options.json.write_text(to_json(results))
    if options.plot is not None:
        plot(results, options.plot)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line; exits with a message if they are wrong."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, epilog=EXAMPLES, formatter_class=Paragraphs)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2", help="Hugging Face folder")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="default: %(default)s")
    add("--threads", type=int, default=os.cpu_count(), help="of every system (default: one per core)")
    add("--block-tokens", type=int, choices=[8, 16, 32, 64, 128], default=32, help="default: %(default)s")
    add("--prefix", type=int, default=3000, metavar="TOKENS", help="prompt of the TTFT runs (default: %(default)s)")
    add("--samples", type=int, metavar="N", help="TTFT samples of each origin (default: 5)")
    add("--batches", type=_numbers, metavar="N,N", help="decode batches (default: 1,8)")
    add("--contexts", type=_numbers, metavar="N,N", help="prompt tokens of decode (default: 1024,4096)")
    add("--tokens", type=int, metavar="N", help="tokens of each answer (default: 96)")
    add("--rounds", type=int, metavar="N", help="turns of each system (default: 7)")
    add("--only", choices=["ttft", "decode"], help="leave the other out")
    add("--no-transformers", action="store_true", help="leave the yardstick out")
    add("--server", action="store_true", help="measure through gRPC, too (needs scripts/install_server.py once)")
    add("--quick", action="store_true", help="2 samples, 1,024 tokens of context, 40 tokens, 3 rounds")
    add("--cache-directory", type=Path, default=ROOT / ".cache", metavar="DIR", help="on the disk to be measured")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    options = parser.parse_args(arguments)
    defaults = (2, (1, 8), (1024,), 40, 3) if options.quick else (5, (1, 8), (1024, 4096), 96, 7)
    for name, default in zip(("samples", "batches", "contexts", "tokens", "rounds"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def run(options: argparse.Namespace, folder: Path, progress: Progress) -> Results:
    """All measurements, in order. `folder` is on the disk to be measured."""
    load_before = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    settings = Settings(
        options.model, options.dtype, options.threads, options.block_tokens, folder / "cache", options.prefix,
        options.samples, options.batches, options.contexts, options.tokens, options.rounds,
    )  # fmt: skip
    workload = Workload(settings)
    found = measure_machine(settings, workload, folder, load_before, progress)
    ttft: list[Ttft] = []
    decode: list[Decode] = []
    hbm = workload.hbm_bytes()
    with engine_run.open_engine(workload, hbm, 2 * hbm, settings.cache_directory) as engine:
        limits_s = ttft_limits_s(workload, found)
        if options.only != "decode":
            with stage(progress, "TTFT through the Python API", 4 * settings.ttft_samples) as advance:
                ttft.extend(engine_run.measure_ttft(engine, workload, limits_s, advance))
        if options.only != "ttft":
            decode.extend(measure_decode(engine, workload, found, not options.no_transformers, progress))
    shutil.rmtree(settings.cache_directory, ignore_errors=True)
    if options.server and options.only != "decode":
        sent = 6 * (settings.ttft_samples + 4)
        with stage(progress, "TTFT through gRPC", sent) as advance:
            ttft.extend(server_run.measure_ttft(workload, ROOT, folder / "grpc-ttft", limits_s, advance))
    if options.server and options.only != "ttft":
        with stage(progress, "decode through gRPC", settings.rounds * len(settings.cases)) as advance:
            measured = server_run.measure_decode(workload, ROOT, folder / "grpc-decode", found.read_bytes_s, advance)
            decode.extend(measured)
    return Results(found, settings.plain(), tuple(ttft), tuple(decode))


def measure_machine(
    settings: Settings, workload: Workload, folder: Path, load_before: float, progress: Progress
) -> Machine:
    """The rates that bound everything else."""
    rows = max(8, settings.prefix_tokens // settings.block_tokens)
    with stage(progress, "what memory, disk and cores can do", 4) as advance:
        read = machine.memory_read_bytes_s()
        advance(1)
        copy = machine.memory_copy_bytes_s()
        advance(1)
        disk = machine.disk_read_bytes_s(folder, workload.layout.row_bytes, rows, READERS)
        advance(1)
        flops = machine.matmul_flops_s(getattr(torch, settings.dtype))
        advance(1)
    cores = os.cpu_count() or 1
    return Machine(machine.cpu_name(), cores, settings.threads, load_before, read, copy, disk, flops)


def ttft_limits_s(workload: Workload, found: Machine) -> dict[str, float]:
    """What arithmetic alone, or moving the rows and then reading weights and KV once, would take."""
    config, layout, tokens = workload.config, workload.layout, workload.settings.prefix_tokens
    operations = 2 * workload.weights_bytes / layout.item_bytes * tokens
    operations += 2 * config.layers * config.heads * config.head_dim * tokens**2
    moved = (tokens - 1) // layout.block_tokens * layout.row_bytes
    near = (workload.weights_bytes + tokens * layout.token_bytes) / found.read_bytes_s
    return {
        "computed": operations / found.flops_s,
        "hbm": near,
        "dram": near + moved / found.copy_bytes_s,
        "nvme": near + moved / found.disk_bytes_s if found.disk_bytes_s else 0.0,
    }


def measure_decode(
    engine: Engine, workload: Workload, found: Machine, with_transformers: bool, progress: Progress
) -> Iterator[Decode]:
    """All cases: every system is prefilled, then they take turns; each round has new last tokens, the same for all."""
    settings = workload.settings
    with ExitStack() as stack:
        untiered = stack.enter_context(
            engine_run.open_engine(workload, workload.hbm_bytes(), 0, settings.cache_directory)
        )
        model = load_model(settings.model, settings.dtype) if with_transformers else None
        for batch, context in settings.cases:
            name = f"batch {batch}, context {context}"
            prompts = workload.prompts(batch, context)
            with stage(
                progress, f"prefill, {name}", batch * (context - 1) * (3 if with_transformers else 2)
            ) as advance:
                systems: dict[str, engine_run.EngineDecode | StaticDecode] = {
                    TIERED: engine_run.EngineDecode(engine, prompts, advance),
                    UNTIERED: engine_run.EngineDecode(untiered, prompts, advance),
                }
                if model is not None:
                    systems[TRANSFORMERS] = StaticDecode(model, prompts, settings.output_tokens, advance)
            rates: dict[str, list[float]] = {system: [] for system in systems}
            with stage(progress, f"decode, {name}", settings.rounds * len(systems)) as advance:
                for turn in range(settings.rounds):
                    last_tokens = workload.last_tokens(batch)
                    order = list(systems) if turn % 2 == 0 else list(reversed(systems))
                    for system in order:
                        time.sleep(REST_S)
                        rates[system].append(systems[system].run(last_tokens, settings.output_tokens)[0])
                        advance(1)
            kv_bytes = (context + settings.output_tokens // 2) * workload.layout.token_bytes
            limit = decode_limit(workload.weights_bytes, kv_bytes, batch, found.read_bytes_s)
            yield from (Decode(system, batch, context, tuple(rates[system]), limit) for system in systems)


@contextmanager
def stage(progress: Progress, name: str, total: int) -> Iterator[engine_run.Advance]:
    """One bar; yields the function that advances it."""
    task = progress.add_task(name, total=total)
    yield lambda count: progress.advance(task, count)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be whole numbers above 0, separated by commas")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
