"""What two engines on one cache directory read from DRAM together, beside what one of them reads alone.

`python scripts/bench/shared_reads.py [ROUNDS] [READERS]`. Rows of 1 MiB, copied and verified, those that are due asked
for in one call, as a prompt's are. Alone and together take turns, so that a busy machine disturbs the ratio least.
READERS a process; one engine must not fill the machine alone.
"""

from __future__ import annotations

import hashlib
import mmap
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from kvtier.block import KVLayout, Tier
from kvtier.config import IoConfig
from kvtier.keeper.opening import SharedShelves
from kvtier.shelf import ReadItem, Shelf, WriteItem
from kvtier.ticket import ShelfOutcome

LAYOUT = KVLayout(layers=16, kv_heads=8, head_dim=64, block_tokens=32, dtype="bfloat16")
ROWS = 256
IN_FLIGHT = 8
TURN_S = 0.5
HASHES = [hashlib.sha256(str(number).encode()).digest() for number in range(ROWS)]


class Rate(NamedTuple):
    """Bytes a second, by the clock and by the CPU time of the process: a busy machine disturbs the second less."""

    wall: float
    cpu: float


def main(rounds: int, readers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--engine", str(Path(folder) / "cache"), str(readers)]
        engines = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for engine in engines:
            tell(engine, "open")
            hear(engine)
        alone: list[Rate] = []
        together: list[tuple[Rate, Rate]] = []
        for turn in range(rounds):
            one = engines[turn % 2]
            tell(one, "read")
            alone.append(hear(one))
            for engine in engines:
                tell(engine, "read")
            first, second = (hear(engine) for engine in engines)
            together.append((first, second))
        for engine in engines:
            tell(engine, "close")
            engine.wait()
    both_wall = [first.wall + second.wall for first, second in together]
    ratios = [both / one.wall for both, one in zip(both_wall, alone, strict=True)]
    shares = [min(first.wall, second.wall) / max(first.wall, second.wall) for first, second in together]
    cpu_alone = statistics.median(one.cpu for one in alone)
    cpu_together = statistics.median(one.cpu for both in together for one in both)
    print(f"one engine: median {statistics.median(one.wall for one in alone) / 1e9:.2f} GB/s, {rounds} turns")
    print(f"two engines: median {statistics.median(both_wall) / 1e9:.2f} GB/s")
    print(f"a second of CPU: {cpu_alone / 1e9:.2f} GB alone, {cpu_together / 1e9:.2f} GB in each of two")
    print(f"ratio: median {statistics.median(ratios):.2f}, least {min(ratios):.2f} (goal: 1.5)")
    print(f"slower beside faster: median {statistics.median(shares):.2f}, least {min(shares):.2f} (goal: 0.33)")


def tell(engine: subprocess.Popen[str], word: str) -> None:
    assert engine.stdin is not None
    engine.stdin.write(word + "\n")
    engine.stdin.flush()


def hear(engine: subprocess.Popen[str]) -> Rate:
    assert engine.stdout is not None
    return Rate(*map(float, engine.stdout.readline().split()))


def serve(path: Path, readers: int) -> None:
    """An engine: opens, and reads for a turn when told; answers with its rate."""
    bell = threading.Event()
    budget_bytes = ROWS * 5 // 4 * (4096 + LAYOUT.row_bytes)
    io = IoConfig(readers=readers, writers=1, in_flight_max=IN_FLIGHT)
    shared = SharedShelves(LAYOUT, bytes(32), path, (budget_bytes, 0), io, bell.set, 0.0, "lru")
    assert shared.try_open(60), shared.refusal
    shelf = shared.shelves[Tier.DRAM]
    for line in sys.stdin:
        if line == "close\n":
            break
        print(*(fill(shelf, bell) if line == "open\n" else read(shelf, bell)), flush=True)
    shelf.close(5.0)
    shared.close()


def fill(shelf: Shelf, bell: threading.Event) -> Rate:
    """Write what is not there; all is known here then."""
    source = memoryview(mmap.mmap(-1, LAYOUT.row_bytes))
    while (missing := [one for one in HASHES if not shelf.holds(one)]) or shelf.in_flight:
        shelf.write([WriteItem(block_hash, 0, source) for block_hash in missing[:IN_FLIGHT]], time.monotonic())
        bell.wait(0.01)
        bell.clear()
        shelf.poll(time.monotonic())
    return Rate(0.0, 0.0)


def read(shelf: Shelf, bell: threading.Event) -> Rate:
    """Read rows for a turn."""
    targets = [memoryview(mmap.mmap(-1, LAYOUT.row_bytes)) for _ in range(IN_FLIGHT)]
    records = [record for block_hash in HASHES for record in shelf.find([block_hash])]
    assert len(records) == ROWS
    begun, cpu_begun, place, read_bytes = time.monotonic(), time.process_time(), 0, 0
    busy: dict[int, memoryview] = {}
    while time.monotonic() < begun + TURN_S or busy:
        if targets and time.monotonic() < begun + TURN_S:
            items = [ReadItem(records[(place + more) % ROWS], target) for more, target in enumerate(targets)]
            for target, ticket in zip(targets, shelf.read(items), strict=True):
                assert ticket is not None
                busy[ticket] = target
            place += len(items)
            targets.clear()
        bell.wait(0.01)
        bell.clear()
        for done in shelf.poll(time.monotonic()):
            assert done.outcome is ShelfOutcome.DONE, done
            targets.append(busy.pop(done.ticket))
            read_bytes += LAYOUT.row_bytes
    return Rate(read_bytes / (time.monotonic() - begun), read_bytes / (time.process_time() - cpu_begun))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        numbers = [int(argument) for argument in sys.argv[1:]]
        main(*(numbers + [15, 1][len(numbers) :]))
