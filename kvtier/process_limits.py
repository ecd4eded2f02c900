"""What a process can run out of besides memory: descriptors, threads and memory that it may lock.

Tells errors that mean this from others, and names the limit and the way out. Knows nothing of who met them. Used by
the engine and by both ends of the line to a keeper.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from kvtier.byte_text import bytes_text
from kvtier.errors import ConfigError

_NO_THREAD = "can't start new thread"


def what_is_short(error: BaseException | None) -> str:
    """The limit that an error, or one that led to it, has met, and the way out; empty: it has met none."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EMFILE or os.strerror(errno.EMFILE) in str(error):  # libraries in Rust have only the text
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"{os.strerror(errno.EMFILE)}: a process may have {limit:,} files and sockets here; raise `ulimit -n`"
            )
        if number == errno.ENFILE:
            return f"{os.strerror(errno.ENFILE)}; raise the sysctl fs.file-max"
        if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
            return f"{_NO_THREAD}; raise `ulimit -u`, pids.max of the cgroup, or its memory"
        error = error.__cause__ or error.__context__
    return ""


def why_no_ring(error: OSError) -> str:
    """What an error with an io_uring to be made means, and the way out. Some kernels count rings as locked memory."""
    return f"{error.strerror or error}{_locking(error.errno)}"


def why_not_registered(number: int) -> str:
    """What an error with memory to be registered with an io_uring means, and the way out."""
    text = "its memory cannot be registered with io_uring"
    if number == errno.EINVAL:
        return f"{text}, which needs Linux 5.19 or later"
    return f"{text}: {os.strerror(number)}{_locking(number)}"


def _locking(number: int | None) -> str:
    """What to add to an error that may come of the limit of locked memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if number != errno.ENOMEM or limit == resource.RLIM_INFINITY:
        return ""
    return f", a process may lock {bytes_text(limit)} here; raise `ulimit -l` (for a container `--ulimit memlock=-1`)"


@contextlib.contextmanager
def shortage_as_config_error() -> Iterator[None]:
    """Turns whatever came of such a shortage into a ConfigError that names it."""
    try:
        yield
    except Exception as error:
        if short := what_is_short(error):
            raise ConfigError(short) from error
        raise


def raise_descriptor_limit() -> None:
    """As many descriptors as this process may give itself."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
