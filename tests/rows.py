"""Rows that prove themselves, and small shelves to put them in.

A block's payload is a keystream of its hash, so any read can be judged: a miss, or exactly `payload(hash)`.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.block import KVLayout
from kvtier.config import IoConfig
from kvtier.io.base import SystemCalls
from kvtier.shelf import ReadItem, Record, Shelf, ShelfDone, ShelfLimits, WriteItem
from kvtier.shelves import open_dram_shelf, open_nvme_shelf

LAYOUT = KVLayout(layers=3, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32")
NAMESPACE = hashlib.sha256(b"a model").digest()
IO = IoConfig(readers=2, writers=2, in_flight_max=8)
SLOT_BYTES = 4096 + LAYOUT.row_bytes
NVME_BYTES = 1 << 20


def block_hashes(count: int, seed: int = 0) -> list[bytes]:
    """`count` distinct hashes, the same for the same seed."""
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(count)]


def payload(block_hash: bytes, row_bytes: int = LAYOUT.row_bytes) -> bytes:
    """The one row that may ever be read under this hash."""
    return random.Random(block_hash).randbytes(row_bytes)


def aligned(byte_count: int) -> memoryview:
    """Zeroed memory on a page boundary."""
    return memoryview(mmap.mmap(-1, byte_count))


def filled(block_hash: bytes, row_bytes: int = LAYOUT.row_bytes) -> memoryview:
    """An aligned row with the payload of a hash."""
    row = aligned(row_bytes)
    row[:] = payload(block_hash, row_bytes)
    return row


class Bell:
    """A `wake` that a test can wait on."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> None:
        """Until it rang since the last wait, or the time is up."""
        self._event.wait(timeout_s)
        self._event.clear()


class ShelfUser:
    """Writes and reads whole batches on a shelf and waits for their ends, judging every row."""

    def __init__(self, shelf: Shelf, bell: Bell) -> None:
        self.shelf = shelf
        self.now = time.monotonic()
        self._bell = bell
        self._ended: dict[int, ShelfDone] = {}

    def finish(self, tickets: Sequence[int | None], timeout_s: float = 20.0) -> list[ShelfDone | None]:
        """How each ticket ended; None for what was not taken. The ends of others are kept for their own call."""
        wanted = {ticket for ticket in tickets if ticket is not None}
        ended = self._ended
        end = time.monotonic() + timeout_s
        while wanted - set(ended):
            assert time.monotonic() < end, f"{len(wanted - set(ended))} transfers did not end"
            ended |= {done.ticket: done for done in self.shelf.poll(self.now)}
            if wanted - set(ended):
                self._bell.wait(0.05)
        return [None if ticket is None else ended.pop(ticket) for ticket in tickets]

    def write(self, hashes: Sequence[bytes], sums: bytes | None = None) -> list[ShelfDone | None]:
        """Write the payloads of `hashes` as one chain, in pieces that the shelf has room for."""
        done: list[ShelfDone | None] = []
        for start in range(0, len(hashes), IO.in_flight_max):
            piece = hashes[start : start + IO.in_flight_max]
            items = [WriteItem(h, start + place, filled(h), sums) for place, h in enumerate(piece)]
            done += self.finish(self.shelf.write(items, self.now))
        return done

    def read(self, records: Sequence[Record]) -> list[ShelfDone | None]:
        """Read rows and assert that each that is DONE holds exactly its payload."""
        targets = [aligned(LAYOUT.row_bytes) for _ in records]
        tickets = self.shelf.read([ReadItem(*pair) for pair in zip(records, targets, strict=True)])
        done = self.finish(tickets)
        for record, target, end in zip(records, targets, done, strict=True):
            if end is not None and end.outcome.value == "done":
                assert bytes(target) == payload(record.block_hash), "a wrong row was handed out"
        return done

    def hits(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes` are found and read right, each looked up on its own."""
        records = [record for block_hash in hashes for record in self.shelf.find([block_hash])]
        return sum(end is not None and end.outcome.value == "done" for end in self.read(records))


def dram_user(slots: int, calls: SystemCalls | None = None, limits: ShelfLimits | None = None) -> ShelfUser:
    """A DRAM shelf of `slots` slots."""
    bell = Bell()
    return ShelfUser(open_dram_shelf(LAYOUT, NAMESPACE, slots * SLOT_BYTES, IO, bell, calls=calls, limits=limits), bell)


def nvme_user(
    path: Path,
    budget_bytes: int = NVME_BYTES,
    calls: SystemCalls | None = None,
    limits: ShelfLimits | None = None,
    layout: KVLayout = LAYOUT,
    namespace: bytes = NAMESPACE,
    wait_s: float = 0.0,
    journal_calls: SystemCalls | None = None,
) -> ShelfUser:
    """The NVMe shelf of a cache directory."""
    bell = Bell()
    shelf = open_nvme_shelf(
        layout, namespace, path, budget_bytes, IO, bell, wait_s, calls=calls, limits=limits, journal_calls=journal_calls
    )
    return ShelfUser(shelf, bell)
