"""The keeper's process: `python -m kvtier.keeper CACHE_DIRECTORY LOCK_DESCRIPTOR LINGER_S`, started by an engine.

Takes the locked descriptor over, closes every other one, leaves the engine's session and serves until it is done.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from pathlib import Path

from kvtier.cache_directory import CacheDirectory
from kvtier.errors import KvtierError
from kvtier.keeper.log_file import LateLog, ShortLog
from kvtier.keeper.server import Server
from kvtier.process_limits import raise_descriptor_limit, what_is_short

FIRST_FOREIGN = 3
LOG_END_S = 1.0


def main(path: str, lock: str, linger_s: str) -> int:
    """Serve; the exit status of the process."""
    raise_descriptor_limit()
    descriptor = int(lock)
    for foreign in [int(name) for name in os.listdir("/proc/self/fd")]:
        if foreign >= FIRST_FOREIGN and foreign != descriptor:
            with contextlib.suppress(OSError):
                os.close(foreign)
    os.set_inheritable(descriptor, False)
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    gc.disable()  # the books have no cycles, and a collection would walk every record
    target = ShortLog()
    target.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    log = logging.getLogger("kvtier.keeper")
    try:
        late_log = LateLog(target)
    except RuntimeError as error:
        logging.basicConfig(level=logging.INFO, handlers=[target])
        log.error("the keeper cannot serve: %s", what_is_short(error) or error)
        return 1
    logging.basicConfig(level=logging.INFO, handlers=[late_log])
    try:
        server = Server(CacheDirectory(Path(path), None, descriptor), float(linger_s))
        log.info("the keeper is here")
        server.run()
    except (KvtierError, OSError, RuntimeError) as error:
        short = what_is_short(error)
        if isinstance(error, RuntimeError) and not short:
            raise
        log.error("the keeper cannot serve: %s", short or error)
        return 1
    finally:
        late_log.end(LOG_END_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
