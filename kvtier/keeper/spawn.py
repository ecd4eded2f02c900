"""Starting a keeper, and finding one that is there.

Whoever gets `keeper.lock` starts it and passes the locked descriptor on; everyone else tries the socket again. The
keeper is made by exec, in a session of its own, and is nobody's child. Called by the client, on its thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.cache_directory import LOCK_NAME, CacheDirectory
from kvtier.config import environment
from kvtier.errors import ShelfError
from kvtier.io.files import lock_exclusively, open_private
from kvtier.keeper.owners import open_owners
from kvtier.keeper.wire import SOCKET_NAME

LOG_NAME = "keeper.log"
LOG_BYTES_MAX = 1 << 20
RETRY_S = 0.02
_LOCK_DESCRIPTOR = 3


def connect(
    cache: CacheDirectory, deadline: float, linger_s: float, closing: Callable[[], bool]
) -> socket.socket | None:
    """A socket to the keeper, which is started if none answers; None if the monotonic `deadline` has passed.

    The cache directory holds the socket: end it with `hang_up`. Raises ShelfError if no keeper can be started.
    """
    started = False
    while not closing() and time.monotonic() < deadline:
        with cache.forking:
            link = knock(cache.top)
            if link is not None:
                cache.hold(link.fileno())
                return link
        if not started:
            with cache.forking:  # a child with the locked descriptor would keep every later keeper from starting
                lock = cache.hold(cache.open_lock())
            try:
                if lock_exclusively(lock, 0.0) and _try_again(cache, lock):
                    _spawn(cache, lock, linger_s)
                    started = True
            finally:
                cache.drop(lock)
        time.sleep(RETRY_S)
    return None


def hang_up(cache: CacheDirectory, link: socket.socket) -> None:
    """Close a socket that `connect` has made."""
    cache.drop(link.detach())


def knock(top: int) -> socket.socket | None:
    """A socket to the keeper of a cache directory (a descriptor) if there is one. ShelfError: it is another user's."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(1.0)
        _connect_to(link, top)
        _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            raise ShelfError(f"the keeper belongs to user {user}")
    except BaseException as error:
        link.close()
        if isinstance(error, OSError):
            return None
        raise
    return link


def _connect_to(link: socket.socket, top: int) -> None:
    """Connect to the socket of that name itself: a symlink in its place is not followed. Raises OSError."""
    place = os.open(SOCKET_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        link.connect(f"/proc/self/fd/{place}")
    finally:
        os.close(place)


def _try_again(cache: CacheDirectory, lock: int) -> bool:
    """Under the lock: it is that of this directory, and there is no keeper. ShelfError: none could serve here."""
    if not cache.is_there():
        raise ShelfError("the cache directory is gone or replaced")
    if not cache.is_current(LOCK_NAME, lock):
        return False
    os.close(open_owners(cache.top))
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(SOCKET_NAME, dir_fd=cache.top, follow_symlinks=False).st_mode):
            raise ShelfError(f"{SOCKET_NAME} in the cache directory is a folder; remove it")
    return True


def _spawn(cache: CacheDirectory, lock: int, linger_s: float) -> None:
    """Run the keeper with the lock; the process that is our child ends at once."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        log = _open_log(cache)
        try:
            child = _run(cache, lock, linger_s, null, log)
        finally:
            os.close(log)
    finally:
        os.close(null)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _run(cache: CacheDirectory, lock: int, linger_s: float, null: int, log: int) -> int:
    """The process of the child."""
    arguments = [str(cache.path), str(_LOCK_DESCRIPTOR), str(linger_s)]
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    actions.append((os.POSIX_SPAWN_DUP2, lock, _LOCK_DESCRIPTOR))
    program = interpreter()
    variables = environment() | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    variables["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_FOLDER), variables["PYTHONPATH"]])
    try:
        command = [program, "-m", "kvtier.keeper", *arguments]
        return os.posix_spawn(program, command, variables, file_actions=actions, setsid=True)
    except OSError as error:
        raise ShelfError(f"the keeper cannot be started: {error.strerror}") from None


def interpreter() -> str:
    """The Python that runs this; inside another program (the Triton server's stub) the one that belongs to it."""
    candidates = [Path(sys.executable or "/nothing")]
    for prefix in (sys.prefix, sys.base_prefix):
        names = (f"python{sys.version_info.major}.{sys.version_info.minor}", "python3", "python")
        candidates += [Path(prefix) / "bin" / name for name in names]
    for candidate in candidates:
        if candidate.name.startswith("python") and os.access(candidate, os.X_OK):
            return str(candidate)
    raise ShelfError(f"no Python found in {sys.prefix} to start the keeper with")


def _open_log(cache: CacheDirectory) -> int:
    try:
        log = open_private(LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, cache.top)
        try:
            if os.fstat(log).st_size > LOG_BYTES_MAX:
                os.ftruncate(log, 0)
        except BaseException:
            os.close(log)
            raise
    except OSError as error:
        raise ShelfError(f"{LOG_NAME} in the cache directory cannot be written: {error.strerror}") from None
    return log


PACKAGE_FOLDER = Path(__file__).parent.parent.parent
