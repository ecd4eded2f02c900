"""Rows that prove themselves, and small shelves to put them in.

A block's payload is a keystream of its hash, so any read can be judged: a miss, or exactly `payload(hash)`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import re
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.block import KVLayout
from kvtier.books import LocalBooks
from kvtier.cache_directory import layout_name
from kvtier.config import IoConfig
from kvtier.directory import Directory
from kvtier.io.base import KernelCalls, SystemCalls
from kvtier.record import Record
from kvtier.replay import JOURNAL_NAME
from kvtier.retention import PLAIN, Retention
from kvtier.shelf import ReadItem, Shelf, ShelfDone, ShelfLimits, ShelfOutcome, WriteItem
from kvtier.shelves import open_dram_shelf, open_nvme_shelf
from kvtier.terms import STANDARD, Terms
from kvtier.ticket import Reply

CAP_IPC_LOCK = 14
LOCKED_BYTES = 64 << 20
"""Room for what tests that run at once register, and for their rings."""
LAYOUT = KVLayout(layers=3, kv_heads=1, head_dim=16, block_tokens=16, dtype="float32")
NAMESPACE = hashlib.sha256(b"a model").digest()
IO = IoConfig(depth=2, readers=2, writers=2, in_flight_max=8)
SLOT_BYTES = 4096 + LAYOUT.row_bytes
NVME_BYTES = 1 << 20


def directory_of(shelf: Shelf) -> Directory:
    """The books of a shelf that nobody shares."""
    assert isinstance(shelf._books, LocalBooks)
    return shelf._books._directory


def block_hashes(end: int, seed: int = 0, first: int = 0) -> list[bytes]:
    """Distinct hashes from number `first` up to `end`, the same for the same seed."""
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(first, end)]


def payload(block_hash: bytes, row_bytes: int = LAYOUT.row_bytes) -> bytes:
    """The one row that may ever be read under this hash."""
    return random.Random(block_hash).randbytes(row_bytes)


class Taken:
    """Sums that an engine takes."""

    def __init__(self) -> None:
        self.taken = b""


def aligned(byte_count: int) -> memoryview:
    """Zeroed memory on a page boundary."""
    return memoryview(mmap.mmap(-1, byte_count))


def filled(block_hash: bytes, row_bytes: int = LAYOUT.row_bytes) -> memoryview:
    """An aligned row with the payload of a hash."""
    row = aligned(row_bytes)
    row[:] = payload(block_hash, row_bytes)
    return row


def journal_bytes(cache: Path) -> bytes:
    """A cache directory's journal, if it is there: a published row stands in it with its hash, a moment later."""
    try:
        return (cache / layout_name(LAYOUT) / JOURNAL_NAME).read_bytes()
    except FileNotFoundError:
        return b""


def wait_for_journal(cache: Path, hashes: Sequence[bytes], timeout_s: float = 60.0) -> None:
    """Until the journal has all these rows, so that they outlive whoever writes it."""
    end = time.monotonic() + timeout_s
    while not all(map(journal_bytes(cache).__contains__, hashes)):
        assert time.monotonic() < end, "the journal is not written"
        time.sleep(0.01)


def need_uring() -> None:
    """Skip where there is no io_uring: threads do its work there."""
    try:
        KernelCalls().ring(1, 0).close()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error.strerror}")


def need_registered_memory() -> None:
    """Skip where the kernel or the machine's limit, which other processes of the user share, has no room for it."""
    need_uring()
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 19):
        pytest.skip("a kernel before Linux 5.19 registers no memory one piece after the other")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    [rights] = re.findall(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    if not int(rights, 16) >> CAP_IPC_LOCK & 1 and resource.RLIM_INFINITY != limit < LOCKED_BYTES:
        pytest.skip(f"a process may lock {limit >> 20} MiB here, fewer than {LOCKED_BYTES >> 20}")


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

    def finish(self, tickets: Sequence[int | None], timeout_s: float = 60.0) -> list[ShelfDone | None]:
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

    def reply(self, number: int, timeout_s: float = 60.0) -> Reply:
        """The answer to a question for rows or leases, which must be the only one."""
        end = time.monotonic() + timeout_s
        while True:
            self._ended |= {done.ticket: done for done in self.shelf.poll(time.monotonic())}
            if replies := self.shelf.holdings.replies():
                assert [reply.number for reply in replies] == [number]
                return replies[0]
            assert time.monotonic() < end, "nobody answers"
            self._bell.wait(0.05)

    def write(
        self, hashes: Sequence[bytes], sums: bytes | None = None, retention: Retention = PLAIN
    ) -> list[ShelfDone | None]:
        """Write the payloads of `hashes` as one chain, in pieces that the shelf has room for."""
        done: list[ShelfDone | None] = []
        for start in range(0, len(hashes), IO.in_flight_max):
            piece = hashes[start : start + IO.in_flight_max]
            items = [WriteItem(h, start + place, filled(h), sums, retention) for place, h in enumerate(piece)]
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

    def read_slices(self, record: Record, layers: range) -> ShelfOutcome | None:
        """Read slices of a row, in layers of `LAYOUT`, and judge them likewise."""
        target = aligned(len(layers) * LAYOUT.slice_bytes)
        [done] = self.finish(self.shelf.read([ReadItem(record, target, layers)]))
        if done is not None and done.outcome is ShelfOutcome.DONE:
            row = payload(record.block_hash)
            assert target == row[layers.start * LAYOUT.slice_bytes : layers.stop * LAYOUT.slice_bytes], "wrong slices"
        return None if done is None else done.outcome

    def hits(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes` are found and read right, each looked up on its own."""
        records = [record for block_hash in hashes for record in self.shelf.find([block_hash])]
        return sum(end is not None and end.outcome.value == "done" for end in self.read(records))


def dram_user(
    slots: int, calls: SystemCalls | None = None, limits: ShelfLimits | None = None, terms: Terms = STANDARD
) -> ShelfUser:
    """A DRAM shelf of `slots` slots."""
    bell = Bell()
    dram_bytes = slots * SLOT_BYTES
    shelf = open_dram_shelf(LAYOUT, NAMESPACE, dram_bytes, IO, bell, calls=calls, limits=limits, terms=terms)
    return ShelfUser(shelf, bell)


def nvme_user(
    path: Path,
    budget_bytes: int = NVME_BYTES,
    calls: SystemCalls | None = None,
    limits: ShelfLimits | None = None,
    layout: KVLayout = LAYOUT,
    namespace: bytes = NAMESPACE,
    wait_s: float = 0.0,
    journal_calls: SystemCalls | None = None,
    terms: Terms = STANDARD,
    io: IoConfig = IO,
) -> ShelfUser:
    """The NVMe shelf of a cache directory."""
    bell = Bell()
    shelf = open_nvme_shelf(
        layout,
        namespace,
        path,
        budget_bytes,
        io,
        bell,
        wait_s,
        calls=calls,
        limits=limits,
        journal_calls=journal_calls,
        terms=terms,
    )
    return ShelfUser(shelf, bell)
