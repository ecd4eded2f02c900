"""What is run twice to check the seam for faults from outside: once over `FaultyCalls`, once under strace's injection.

Run as `python -m tests.faults.seam_child engine FILE` or `... shelf CACHE_DIRECTORY`; prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvtier.io.base import IoRequest, Operation, SystemCalls
from kvtier.io.threads import ThreadsEngine
from tests.rows import IO, Bell, aligned, block_hashes, nvme_user

PAGE = 4096
Ends = list[tuple[str, int, int, bool]]


def move(path: Path, calls: SystemCalls | None = None) -> Ends:
    """Writes, a sync, reads, one after the other: (operation, bytes moved, error number, whether a read is right)."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    bell = Bell()
    engine = ThreadsEngine(1, 1, 8, bell, calls)
    ends: Ends = []
    for operation, pages in ((Operation.WRITE, range(5)), (Operation.SYNC, range(2)), (Operation.READ, range(5))):
        for page in pages:
            row = aligned(2 * PAGE)
            if operation is Operation.WRITE:
                row[:] = bytes([page + 1]) * (2 * PAGE)
            buffers = () if operation is Operation.SYNC else (row[:PAGE], row[PAGE:])
            engine.submit([IoRequest(operation, descriptor, page * 2 * PAGE, buffers, page)])
            while not (results := engine.poll()):
                bell.wait(1.0)
            (result,) = results
            right = operation is Operation.READ and bytes(row) == bytes([page + 1]) * (2 * PAGE)
            ends.append((operation.value, result.moved_bytes, result.error_number or 0, right))
    assert engine.close(60.0) == 0
    os.close(descriptor)
    return ends


def shelve(path: Path) -> dict[str, int]:
    """Write and read a few rows; the shelf's numbers, `hits` among them."""
    user = nvme_user(path, io=IO.model_copy(update={"engine": "threads"}))  # strace alters calls, no rings
    hashes = block_hashes(24)
    user.write(hashes)
    hits = user.hits(hashes)
    user.shelf.check()
    stats = user.shelf.stats() | {"hits": hits}
    user.shelf.close(60.0)
    return stats


if __name__ == "__main__":
    print(json.dumps({"engine": move, "shelf": shelve}[sys.argv[1]](Path(sys.argv[2]))))
