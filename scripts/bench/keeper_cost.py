"""What a prompt of many blocks costs the engine thread and the keeper: find, reserve with eviction, publish.

`python scripts/bench/keeper_cost.py [--blocks N] [--rounds N] [--policy NAME] [--tier NAME] [--json]`. Only books are
measured, those of NVMe with their journal, with a real keeper; no rows are moved. Times are CPU times, of the keeper
that of its loop; on a busy machine the least of them is the one to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

from kvtier.block import KVLayout, Tier
from kvtier.config import IoConfig
from kvtier.eviction import POLICIES
from kvtier.keeper.mirror import Mirror
from kvtier.keeper.opening import SharedShelves
from kvtier.record import NO_TENANT, Record

LAYOUT = KVLayout(layers=32, kv_heads=1, head_dim=8, block_tokens=8, dtype="bfloat16")
SUMS = bytes(8 * LAYOUT.layers)
JOURNAL_BYTES = 64 << 20


def main(block_count: int, rounds: int, policy: str, tier: Tier) -> dict[str, dict[str, float]]:
    """Median and least milliseconds of CPU a round, by what was done."""
    bell = threading.Event()
    slab_bytes = 4 * block_count * (4096 + LAYOUT.row_bytes)
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedShelves(
            LAYOUT,
            bytes(32),
            Path(folder) / "cache",
            (slab_bytes, 0) if tier is Tier.DRAM else (0, slab_bytes + JOURNAL_BYTES),
            IoConfig(in_flight_max=block_count),
            bell.set,
            0.0,
            policy,
        )
        assert shared.try_open(60), shared.refusal
        while tier not in shared.books:
            shared.poll(time.monotonic())
        books, keeper = shared.books[tier], shared.seat.keeper_process
        spent_ms: dict[str, list[float]] = {name: [] for name in ("find", "reserve", "publish", "answers")}
        keeper_ms: list[float] = []
        for number in range(rounds + 4):
            hashes = [hashlib.sha256(f"{number} {place}".encode()).digest() for place in range(block_count)]
            books.reserve(block_count, NO_TENANT) if number == 0 else None
            while books._stock.count(NO_TENANT) < block_count:
                bell.wait(0.01)
                books.answers(time.monotonic())
            before, took = cpu_s(keeper), dict.fromkeys(spent_ms, 0.0)
            mark = time.thread_time()
            grants = books.reserve(block_count, NO_TENANT)
            mark = note(took, "reserve", mark)
            assert len(grants) == block_count
            records = [
                Record(block_hash, *grant, depth, SUMS)
                for depth, (block_hash, grant) in enumerate(zip(hashes, grants, strict=True))
            ]
            mark = time.thread_time()
            books.publish(records, time.monotonic())
            note(took, "publish", mark)
            answered = 0
            while answered < block_count:
                bell.wait(0.01)
                bell.clear()
                mark = time.thread_time()
                answered += len(books.answers(time.monotonic()))
                note(took, "answers", mark)
            mark = time.thread_time()
            found = books.find(hashes)
            note(took, "find", mark)
            assert found == records
            if number >= 4:
                for name, value in took.items():
                    spent_ms[name].append(value)
                keeper_ms.append(1000 * (cpu_s(keeper) - before))
        shared.close()
    total = [sum(values) for values in zip(*spent_ms.values(), strict=True)]
    measured = {f"engine thread, {name}": values for name, values in spent_ms.items()}
    measured |= {"engine thread, all": total, "keeper, all": keeper_ms}
    return {
        name: {"median_ms": round(statistics.median(values), 3), "least_ms": round(min(values), 3)}
        for name, values in measured.items()
    }


def note(took: dict[str, float], name: str, since: float) -> float:
    now = time.thread_time()
    took[name] += 1000 * (now - since)
    return now


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def mirror_bytes(count: int) -> float:
    """Memory that a mirror takes for each slot."""
    tracemalloc.start()
    mirror = Mirror(count)
    for slot in range(count):
        sums = os.urandom(len(SUMS))
        mirror.add([Record(os.urandom(32), slot, 1000 + slot, slot, sums, 0, 0, NO_TENANT)])
    return tracemalloc.get_traced_memory()[0] / count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--policy", choices=list(POLICIES), default="reuse", help="default: %(default)s, the product's")
    parser.add_argument(
        "--tier",
        type=Tier,
        choices=[Tier.DRAM, Tier.NVME],
        default=Tier.DRAM,
        metavar="{dram,nvme}",
        help="default: dram",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    times, slot_bytes = main(options.blocks, options.rounds, options.policy, options.tier), mirror_bytes(options.blocks)
    if options.json:
        print(
            json.dumps(
                {
                    "blocks": options.blocks,
                    "policy": options.policy,
                    "tier": options.tier.value,
                    "times": times,
                    "mirror_slot_bytes": round(slot_bytes),
                }
            )
        )
    else:
        for what, taken in times.items():
            print(f"{what}: median {taken['median_ms']:.2f} ms, least {taken['least_ms']:.2f} ms")
        print(f"mirror: {slot_bytes:.0f} bytes a slot with {LAYOUT.layers} layers")
