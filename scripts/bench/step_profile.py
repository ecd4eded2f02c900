"""What a decode step is made of: kernels and matmuls, and everything else, which is Python.

`python scripts/bench/step_profile.py [--by-kernel] [--model DIR] [--batches 1 8] [--context N] [--tokens N]
[--rounds N]`. All sequences are decoded at once from HBM, with nothing to load and tiers beside it. Each native call
and each matmul of torch is timed by the clock on the engine's thread; a step lasts from one batch of logits to the
next. Layers that are run in one native call are kernels altogether. With `--by-kernel` they are run call by call, which
takes longer, to see what each kernel takes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from bench.engine_run import EngineDecode, open_engine  # noqa: E402
from bench.workload import Settings, Workload  # noqa: E402
from kvtier import Engine  # noqa: E402

KERNELS = ("append", "attend", "rmsnorm", "add_rmsnorm", "rope", "silu_mul", "linear", "linear_few", "widen")


class Watch:
    """Seconds and calls by kernel since the last step began, and steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, dict[str, float]]] = []
        """Duration of each step, and seconds by kernel in it."""
        self._took: defaultdict[str, float] = defaultdict(float)
        self._began = 0.0

    def timed(self, name: str, call: Any) -> Any:
        """The same call, with its time noted."""

        def timed_call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            value = call(*arguments, **named)
            self._took[name] += time.perf_counter() - began
            return value

        return timed_call

    def end_step(self) -> None:
        """The logits of a step are there."""
        now = time.perf_counter()
        self.steps.append((now - self._began, dict(self._took)))
        self._took.clear()
        self._began = now


class TimedKernels:
    """`_native.Kernels` whose calls are timed."""

    def __init__(self, kernels: Any, watch: Watch) -> None:
        self._kernels = kernels
        for name in KERNELS:
            setattr(self, name, watch.timed(name, getattr(kernels, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def watch_engine(engine: Engine, by_kernel: bool) -> Watch:
    """Time the kernels of an engine from now on."""
    watch = Watch()
    runner: Any = engine._runner
    decoder = runner._decoder
    timed = TimedKernels(decoder._backend.kernels, watch)
    decoder._backend.kernels = timed
    decoder._ops.kernels = timed
    if by_kernel:
        decoder._native = None
    if decoder._native is not None:
        decoder._native.run = watch.timed("layers", decoder._native.run)
    F.linear = watch.timed("torch linear", F.linear)
    inner = runner.logits

    def logits(parts: Any) -> Any:
        values = inner(parts)
        watch.end_step()
        return values

    runner.logits = logits
    return watch


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--by-kernel", action="store_true", help="run layers call by call")
    add("--model", type=Path, default=ROOT / ".cache" / "models" / "smollm2", help="Hugging Face folder")
    add("--batches", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    add("--context", type=int, default=1024, help="tokens of each prompt (default: %(default)s)")
    add("--tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    add("--rounds", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args()
    for batch in options.batches:
        report(batch, options)


def report(batch: int, options: argparse.Namespace) -> None:
    """One table."""
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        settings = Settings(
            *(options.model, "bfloat16", os.cpu_count() or 1, 32, Path(folder), options.context, 1),
            *((batch,), (options.context,), options.tokens, options.rounds),
        )
        workload = Workload(settings)
        with open_engine(workload, workload.hbm_bytes(), 1 << 30, Path(folder)) as engine:
            decode = EngineDecode(engine, workload.prompts(batch, options.context), lambda _: None)
            watch = watch_engine(engine, options.by_kernel)
            steps: list[tuple[float, dict[str, float]]] = []
            for _ in range(options.rounds):
                watch.steps.clear()
                decode.run(workload.last_tokens(batch), options.tokens)
                steps += watch.steps[3:]  # those in which the batch gathers
    names = sorted(set(itertools.chain.from_iterable(took for _, took in steps)))
    step_s = median(duration_s for duration_s, _ in steps)
    kernel_s = median(sum(took.values()) for _, took in steps)
    table = Table(title=f"{options.model.name}, bf16, batch {batch}, context {options.context}, {len(steps)} steps")
    for heading in ("of a step", "us, median", "share"):
        table.add_column(heading, justify="left" if heading == "of a step" else "right")
    for name in names:
        took_s = median(took.get(name, 0.0) for _, took in steps)
        table.add_row(name, f"{took_s * 1e6:,.0f}", f"{took_s / step_s:.1%}")
    other = median((duration_s - sum(took.values())) / duration_s for duration_s, took in steps)
    table.add_row("kernels and matmuls", f"{kernel_s * 1e6:,.0f}", f"{kernel_s / step_s:.1%}", end_section=True)
    table.add_row("everything else", f"{(step_s - kernel_s) * 1e6:,.0f}", f"{other:.1%}")
    table.add_row("step", f"{step_s * 1e6:,.0f}", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
