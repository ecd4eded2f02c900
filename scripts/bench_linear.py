#!/usr/bin/env python3
"""Measures the linear layers of decoding: the product of a few bf16 rows with a weight matrix, native against torch.

Takes the CPU time of one thread, in turns with the fastest read of as many bytes, so that other programs on the machine
disturb it little; with `--threads` above 1 it takes the time on the clock. The matrices of a shape together are larger
than the caches. Rates are medians; ratios to the read are of the best turns and the median of each turn's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvtier.attention import make_backend
from kvtier.cli.paragraphs import Paragraphs
from kvtier.machine import MemoryRead
from kvtier.models.huge_tensors import HugeTensors
from kvtier.models.ops import make_ops

SHAPES = {
    "SmolLM2-135M": ((576, 960), (576, 3072), (1536, 576), (576, 49152)),
    "Llama-246M": ((1024, 1536), (1024, 5632), (2816, 1024), (1024, 32000)),
}
"""(in, out): qkv, gate and up, down, head; of SmolLM2 and of the random model of bench_peers.py."""
TOTAL_BYTES = 512 << 20
"""More than the last cache holds, which a guest may not know the size of."""


def main() -> int:
    """Print one line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Paragraphs)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="default: 1 8 16 32 64")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--model", choices=SHAPES, default="SmolLM2-135M", help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    ops = make_ops(make_backend("auto", options.threads))
    title = f"One bf16 product of {options.model}, {options.threads} threads"
    table = Table("rows", "in x out", "read", "torch", f"{ops.name} GB/s", "best", "to read", "to torch", title=title)
    read_all = MemoryRead(options.threads, TOTAL_BYTES)
    with torch.inference_mode():
        for rows in options.rows:
            for inner, outer in SHAPES[options.model]:
                count = max(1, TOTAL_BYTES // (2 * inner * outer))
                maker = HugeTensors()
                one = torch.randn(outer, inner).bfloat16()
                weights = [maker.empty(outer, inner, dtype=torch.bfloat16).copy_(one) for _ in range(count)]
                x = torch.randn(rows, inner).bfloat16()
                turns: tuple[list[float], ...] = ([], [], [])
                for _ in range(options.rounds + 1):
                    turns[0].append(TOTAL_BYTES / _seconds(clock, read_all) / 1e9)
                    turns[1].append(_rate(clock, partial(F.linear, x), weights))
                    turns[2].append(_rate(clock, partial(ops.linear, x, bias=None), weights))
                read, torchs, ours = (median(turn[1:]) for turn in turns)
                to_read, to_torch = (median(map(truediv, turns[2][1:], turn[1:])) for turn in turns[:2])
                best = max(turns[2][1:]) / max(turns[0][1:])
                table.add_row(
                    *(str(rows), f"{inner} x {outer}", f"{read:.1f}", f"{torchs:.1f}", f"{ours:.1f}"),
                    *(f"{best:.2f}", f"{to_read:.2f}", f"{to_torch:.2f}"),
                )
    Console(width=100).print(table)
    return 0


def _rate(clock: Callable[[], float], product: Callable[[torch.Tensor], object], matrices: list[torch.Tensor]) -> float:
    """GB of matrices in a second."""

    def multiply_all() -> None:
        for matrix in matrices:
            product(matrix)

    return sum(matrix.nbytes for matrix in matrices) / _seconds(clock, multiply_all) / 1e9


def _seconds(clock: Callable[[], float], action: Callable[[], object]) -> float:
    started = clock()
    action()
    return clock() - started


if __name__ == "__main__":
    sys.exit(main())
