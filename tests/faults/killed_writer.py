"""A process that writes keystream rows to the NVMe shelf for ever, telling of each that was published, to be killed.

Run as `python killed_writer.py CACHE_DIRECTORY SEED`; prints one line a published row: its number in the seed's chain.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.rows import block_hashes, nvme_user


def main() -> None:
    user = nvme_user(Path(sys.argv[1]), wait_s=20.0)
    hashes = block_hashes(10_000, int(sys.argv[2]))
    for number, block_hash in enumerate(hashes):
        (done,) = user.write([block_hash])
        user.now += 1
        if done is not None and done.outcome.value == "done":
            print(number, flush=True)


main()
