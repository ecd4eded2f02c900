"""The keeper's process: `python -m kvtier.keeper CACHE_DIRECTORY LOCK_DESCRIPTOR LINGER_S`, started by an engine.

Takes the locked descriptor over, closes every other one, leaves the engine's session and serves until it is done.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
from pathlib import Path

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import KvtierError
from kvtier.keeper.server import Server

FIRST_FOREIGN = 3


def main(path: str, lock: str, linger_s: str) -> int:
    """Serve; the exit status of the process."""
    descriptor = int(lock)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)
    os.closerange(FIRST_FOREIGN, descriptor)
    os.closerange(max(FIRST_FOREIGN, descriptor + 1), limit)
    os.set_inheritable(descriptor, False)
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    gc.disable()  # the books have no cycles, and a collection would walk every record
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    log = logging.getLogger("kvtier.keeper")
    try:
        server = Server(CacheDirectory(Path(path), None, descriptor), float(linger_s))
        log.info("the keeper is here")
        server.run()
    except (KvtierError, OSError) as error:
        log.error("the keeper cannot serve: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
