"""The keeper's log: written by a thread of its own, since the disk that it lies on may hang, and never long.

Whoever logs hands a record over and goes on; what comes while the disk takes nothing is dropped beyond a bound. Used by
`__main__` alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
from typing import TextIO

LOG_BYTES_MAX = 1 << 20
RECORDS_MAX = 1024


class ShortLog(logging.StreamHandler[TextIO]):
    """Writes to the standard error stream, a file that is emptied before it grows beyond bounds."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        with contextlib.suppress(OSError):
            status = os.fstat(2)
            if stat.S_ISREG(status.st_mode) and status.st_size > LOG_BYTES_MAX:
                os.ftruncate(2, 0)
        super().emit(record)


class LateLog(logging.Handler):
    """Hands records to another handler on a thread. See the module."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self._target = target
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(RECORDS_MAX)
        self._thread = threading.Thread(target=self._write, name="kvtier-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. Returns at once."""
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(record)

    def end(self, deadline_s: float) -> bool:
        """Write what is left; False if the disk does not take it in time."""
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            self._target.handle(record)
