"""A keeper in a process of the nursery's: the real server, with a death at a chosen step or another protocol.

Takes `keeper.lock` itself, as an engine does for the keepers that it starts. Forked by tests/nursery.py.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from kvtier.cache_directory import CacheDirectory
from kvtier.io.files import lock_request
from kvtier.keeper import greeting, server
from kvtier.keeper.spawn import LOG_NAME
from kvtier.keeper.wire import PROTOCOL_VERSION
from tests.soak.steps import KEEPER_STEPS, Steps


@dataclass(frozen=True, slots=True)
class KeeperSetting:
    """Which directory, and how it ends."""

    keeper_path: str
    linger_s: float = 1.0
    kill_at: int = 0
    """The step at which it kills itself, counted from a SIGUSR1 on; 0: none."""
    protocol: int = PROTOCOL_VERSION
    """What it says that it speaks."""
    count_path: str = ""
    """Where it leaves the number of steps, and a newline, at a SIGUSR2."""


def serve(setting: KeeperSetting) -> None:
    """Wait until nobody else is the directory's keeper, then be it."""
    path = Path(setting.keeper_path)
    cache = CacheDirectory(path, None)
    lock = cache.open_lock()
    cache.close()
    fcntl.fcntl(lock, fcntl.F_OFD_SETLKW, lock_request(fcntl.F_WRLCK, 0, 1))
    os.umask(0o077)
    logging.basicConfig(filename=path / LOG_NAME, level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    vars(greeting)["PROTOCOL_VERSION"] = setting.protocol
    steps = Steps(setting.kill_at)
    steps.watch(KEEPER_STEPS)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(steps, "armed", True))
    signal.signal(signal.SIGUSR2, lambda *_: Path(setting.count_path).write_text(f"{steps.count}\n"))
    server.Server(CacheDirectory(path, None, lock), setting.linger_s).run()
