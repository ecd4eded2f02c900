#!/usr/bin/env python3
"""Measures the linear layers of decoding: the product of a few bf16 rows with a weight matrix, native against torch.

Takes the CPU time of one thread, in turns, so that other programs on the machine disturb it little. The matrices of a
shape together are larger than the caches near a core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvtier.attention import make_backend
from kvtier.models.ops import make_ops

SHAPES = ((576, 960), (576, 3072), (1536, 576), (576, 49152))
"""(in, out) of SmolLM2-135M: qkv, gate and up, down, head."""
TOTAL_BYTES = 60 << 20


def main() -> int:
    """Print one line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="default: 1 8 16 32 64")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ops = make_ops(make_backend("auto", 1))
    table = Table("rows", "in x out", "torch us", "GB/s", f"{ops.name} us", "GB/s", "ratio", title="One bf16 product")
    with torch.inference_mode():
        for rows in options.rows:
            for inner, outer in SHAPES:
                count = max(1, TOTAL_BYTES // (2 * inner * outer))
                weights = [torch.randn(outer, inner).bfloat16() for _ in range(count)]
                x = torch.randn(rows, inner).bfloat16()
                turns: tuple[list[float], list[float]] = ([], [])
                for _ in range(options.rounds + 1):
                    turns[0].append(_seconds(partial(F.linear, x), weights))
                    turns[1].append(_seconds(partial(ops.linear, x, bias=None), weights))
                ours, torchs = median(turns[1][1:]), median(turns[0][1:])
                rates = [2e-9 * inner * outer / seconds for seconds in (torchs, ours)]
                table.add_row(
                    *(str(rows), f"{inner} x {outer}", f"{torchs * 1e6:.0f}", f"{rates[0]:.1f}"),
                    *(f"{ours * 1e6:.0f}", f"{rates[1]:.1f}", f"{torchs / ours:.2f}"),
                )
    Console(width=100).print(table)
    return 0


def _seconds(product: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """CPU seconds of one product."""
    started = time.thread_time()
    for weight in weights:
        product(weight)
    return (time.thread_time() - started) / len(weights)


if __name__ == "__main__":
    sys.exit(main())
