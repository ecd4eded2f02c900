"""A process that writes keystream rows to the NVMe shelf for ever, telling of each that stands in the journal.

Made to be killed. Run as `python killed_writer.py CACHE_DIRECTORY SEED`; prints one line a row: its number in the
seed's chain, once the row is published and the journal's thread, for which no writer waits, has written so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.rows import block_hashes, journal_bytes, nvme_user

UNTOLD_MAX = 8
"""Rows that the journal may be behind: few enough for those that are told of to stay on the shelf."""


def main() -> None:
    cache = Path(sys.argv[1])
    user = nvme_user(cache, wait_s=60.0)
    hashes = block_hashes(10_000, int(sys.argv[2]))
    untold: list[int] = []
    for number, block_hash in enumerate(hashes):
        (done,) = user.write([block_hash])
        user.now += 1
        if done is not None and done.outcome.value == "done":
            untold.append(number)
        tell(untold, hashes, cache)
        while len(untold) > UNTOLD_MAX:
            time.sleep(0.001)
            tell(untold, hashes, cache)


def tell(untold: list[int], hashes: list[bytes], cache: Path) -> None:
    """Print and take out those that the journal has."""
    written = journal_bytes(cache)
    for number in [number for number in untold if hashes[number] in written]:
        untold.remove(number)
        print(number, flush=True)


main()
