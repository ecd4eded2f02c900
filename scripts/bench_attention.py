#!/usr/bin/env python3
"""Measures decode attention over long contexts beside the fastest read of as many bytes, both with all threads.

Reading and attending take turns, so that other programs disturb both; the ratio is the median of the rounds. Blocks
lie in memory in random order, as after hours of use, and are more than the caches hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvtier.attention import AttentionBatch, make_backend
from kvtier.block import KVLayout
from kvtier.cli.paragraphs import Paragraphs
from kvtier.machine import MemoryRead
from kvtier.tiers.hbm import HbmArena

TOTAL_BYTES = 1 << 30
"""K and V in memory at least: what is read between two reads of the same byte."""
SEED = 7


def main() -> int:
    """Print one line for each number of tokens in a block, and write the JSON file if one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Paragraphs)
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step (default: %(default)s)")
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 32, 64], help="default: 16 32 64")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=4, help="KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="elements of a head (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="layers of a step (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: one per core")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: %(default)s)")
    parser.add_argument("--backend", default="native", help="native or reference (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    read = MemoryRead(options.threads, TOTAL_BYTES)
    table = Table("block tokens", "read GB/s", "attention GB/s", "ratio: median (min to max)", title=_title(options))
    lines: list[dict[str, object]] = []
    with torch.inference_mode():
        for block_tokens in options.block_tokens:
            line = _measure(options, block_tokens, read)
            lines.append(line)
            ratios = f"{line['ratio']:.2f} ({line['ratio_min']:.2f} to {line['ratio_max']:.2f})"
            table.add_row(str(block_tokens), f"{line['read_gb_s']:.1f}", f"{line['attention_gb_s']:.1f}", ratios)
    Console(width=100).print(table)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({"settings": settings, "lines": lines}, indent=2))
    return 0


def _title(options: argparse.Namespace) -> str:
    heads = f"{options.heads}/{options.kv_heads} heads of {options.head_dim}"
    return f"Decode attention, {options.batch} x {options.context} tokens, {heads}, {options.dtype}"


def _measure(options: argparse.Namespace, block_tokens: int, read: MemoryRead) -> dict[str, object]:
    layout = KVLayout(options.layers, options.kv_heads, options.head_dim, block_tokens, options.dtype)
    blocks = -(-options.context // block_tokens)
    sets = max(1, -(-TOTAL_BYTES // (options.batch * blocks * layout.row_bytes)))
    arena = HbmArena(layout, sets * options.batch * blocks)
    for slot in range(arena.slot_count):  # touch every page, with numbers that keep the softmax busy
        torch.frombuffer(arena.view(slot), dtype=getattr(torch, options.dtype)).normal_()
    order = torch.randperm(arena.slot_count, generator=torch.Generator().manual_seed(SEED)).tolist()
    addresses = torch.tensor([arena.address(slot) for slot in order]).view(sets, options.batch, blocks)
    q = torch.randn(options.batch, options.heads, options.head_dim).to(getattr(torch, options.dtype))
    backend = make_backend(options.backend, options.threads)
    batches = [_batch(table, options.context, block_tokens) for table in addresses]

    def attend() -> None:
        for batch in batches:
            for layer in range(layout.layers):
                backend.attend(q, batch, layout, layer, options.head_dim**-0.5, None)

    attended_bytes = len(batches) * options.batch * options.context * layout.token_bytes
    reads: list[float] = []
    attends: list[float] = []
    for _ in range(options.rounds + 1):
        reads.append(read.size_bytes / _seconds(read) / 1e9)
        attends.append(attended_bytes / _seconds(attend) / 1e9)
    ratios = [own / read for own, read in zip(attends[1:], reads[1:], strict=True)]
    arena.close()
    return {
        "block_tokens": block_tokens,
        "read_gb_s": median(reads[1:]),
        "attention_gb_s": median(attends[1:]),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _batch(table: torch.Tensor, context: int, block_tokens: int) -> AttentionBatch:
    """One new token of each sequence, at the end of its context."""
    sequences = len(table)
    last = (context - 1) // block_tokens
    return AttentionBatch(
        tables=table.contiguous(),
        query_starts=torch.arange(sequences + 1, dtype=torch.int32),
        lengths=torch.full((sequences,), context, dtype=torch.int32),
        append_rows=table[:, last].contiguous(),
        append_offsets=torch.full((sequences,), (context - 1) % block_tokens, dtype=torch.int32),
    )


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
