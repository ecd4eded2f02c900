"""What a prompt of many blocks costs the engine thread and the keeper: find, reserve with eviction, publish.

`python scripts/bench/keeper_cost.py [BLOCKS] [ROUNDS]`. Rows are not moved: only books are measured. A real keeper.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

from kvtier.block import KVLayout, Tier
from kvtier.config import IoConfig
from kvtier.keeper.mirror import Mirror
from kvtier.keeper.opening import SharedShelves
from kvtier.record import NO_TENANT, Record

LAYOUT = KVLayout(layers=32, kv_heads=1, head_dim=8, block_tokens=8, dtype="bfloat16")
SUMS = bytes(8 * LAYOUT.layers)


def main(block_count: int, rounds: int) -> None:
    bell = threading.Event()
    slot_bytes = 4096 + LAYOUT.row_bytes
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedShelves(
            LAYOUT,
            bytes(32),
            Path(folder) / "cache",
            (4 * block_count * slot_bytes, 0),
            IoConfig(in_flight_max=block_count),
            bell.set,
            0.0,
            "lru",
        )
        assert shared.try_open(60), shared.refusal
        books, keeper = shared.books[Tier.DRAM], shared.seat.keeper_process
        spent_ms: dict[str, list[float]] = {name: [] for name in ("find", "reserve", "publish", "answers")}
        keeper_s = 0.0
        for number in range(rounds + 4):
            hashes = [hashlib.sha256(f"{number} {place}".encode()).digest() for place in range(block_count)]
            books.reserve(block_count, NO_TENANT) if number == 0 else None
            while len(books._stock[NO_TENANT]) < block_count:
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
                keeper_s += cpu_s(keeper) - before
        for name, values in spent_ms.items():
            print(f"engine thread, {name}: median {statistics.median(values):.2f} ms, worst {max(values):.2f} ms")
        total = [sum(values) for values in zip(*spent_ms.values(), strict=True)]
        print(f"engine thread, all of {block_count} blocks: median {statistics.median(total):.2f} ms")
        print(f"keeper: {1000 * keeper_s / rounds:.1f} ms of CPU a round")
        for shelf in shared.shelves.values():
            shelf.close(5.0)
    measure_mirror(block_count)


def note(took: dict[str, float], name: str, since: float) -> float:
    now = time.thread_time()
    took[name] += 1000 * (now - since)
    return now


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def measure_mirror(count: int) -> None:
    tracemalloc.start()
    mirror = Mirror(count)
    for slot in range(count):
        sums = os.urandom(len(SUMS))
        mirror.add([Record(os.urandom(32), slot, 1000 + slot, slot, sums, 0, 0, NO_TENANT)])
    print(f"mirror: {tracemalloc.get_traced_memory()[0] / count:.0f} bytes a slot with {LAYOUT.layers} layers")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2048, int(sys.argv[2]) if len(sys.argv) > 2 else 20)
