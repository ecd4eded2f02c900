"""Processes to be killed, each forked in milliseconds from one that has imported everything already.

`Nursery` owns that process, `Worker` is the near end of an engine's shelves (tests/shelf_worker.py) or a keeper's
process (tests/keeper_process.py). Run as `python -m tests.nursery DESCRIPTOR` it is the far end.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import keeper_process, shelf_worker
from tests.rows import NVME_BYTES
from tests.shelf_engine import Setting

ROOT = Path(__file__).parent.parent
_CREDENTIALS = struct.Struct("iII")
GATE_PAUSE_S = 0.002
ANSWER_S = 300.0
"""No command takes that long: an answer that is later is a hang, and the test's to report."""


class Nursery:
    """See the module. A context manager; ending it ends no worker, but they end when their near end is closed."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs the nursery, e.g. in namespaces of its own."""
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "tests.nursery", str(far.fileno())],
                cwd=ROOT,
                pass_fds=[far.fileno()],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def engine(
        self, path: Path, dram_slots: int = 64, nvme_bytes: int = NVME_BYTES, linger_s: float = 5.0, **more: Any
    ) -> Worker:
        """An engine's shelves on a cache directory, not opened yet; `more` as in `shelf_engine.Setting`.

        With `gate`, a path, it does nothing but look for that until it is there; neither does a keeper.
        """
        setting = {"path": str(path), "dram_slots": dram_slots, "nvme_bytes": nvme_bytes, "linger_s": linger_s} | more
        return self._fork(setting)

    def keeper(self, path: Path, **more: Any) -> Worker:
        """A keeper for a cache directory as soon as no other has it; `more` as in `keeper_process.KeeperSetting`."""
        return self._fork({"keeper_path": str(path)} | more)

    def _fork(self, setting: dict[str, Any]) -> Worker:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with far:
            socket.send_fds(self._control, [json.dumps(setting).encode()], [far.fileno()])
        return Worker(near)

    def kill(self) -> None:
        """SIGKILL what runs the nursery: with namespaces of its own, all that lives in them."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the nursery."""
        self._control.close()
        self.process.wait()


class Worker:
    """One worker process. Every call waits for its answer."""

    def __init__(self, near: socket.socket) -> None:
        near.settimeout(ANSWER_S)
        _, extra, _, _ = near.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        self.pid: int = _CREDENTIALS.unpack(extra[0][2])[0]
        """As seen from here, whatever namespace it lives in."""
        self._pidfd = os.pidfd_open(self.pid)
        self._near = near
        self._lines = near.makefile("rw")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def __call__(self, command: str, *arguments: Any) -> Any:
        """Run a command and wait for its answer."""
        self.start(command, *arguments)
        return self.answer()

    def start(self, command: str, *arguments: Any) -> None:
        """Start a command; its answer is due."""
        self._lines.write(json.dumps([command, *arguments]) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        """Wait for the answer of the last command."""
        line = self._lines.readline()
        assert line, "the worker has died"
        return json.loads(line)

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def signal(self, number: int) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came."""
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.strike()
        assert self.wait(60)
        self._end()

    def died(self) -> bool:
        """Wait for its answer or its end; whether it was its end."""
        try:
            self.answer()
        except (AssertionError, ConnectionError):
            assert self.wait(60)
            return True
        return False

    def drop(self) -> None:
        """SIGKILL if it has not ended, and let go of it."""
        if self._pidfd >= 0:
            self.kill()

    def strike(self) -> None:
        """SIGKILL, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Close its shelves and let it end; whatever it was told before."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(OSError, AssertionError):
            self("close")
        if not self.wait(30):
            self.strike()
            self.wait(30)
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
        self._near.close()
        os.close(self._pidfd)
        self._pidfd = -1


def main(control: socket.socket) -> None:
    """Fork a worker for every message, until there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are reaped at once
    while True:
        data, extra, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        (descriptor,) = array.array("i", extra[0][2])
        with socket.socket(fileno=descriptor) as far:
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _work(far, json.loads(data))


def _work(far: socket.socket, setting: dict[str, Any]) -> None:
    """In the child: do what is asked for, then end without what belongs to the parent."""
    status = 1
    try:
        far.sendall(b".")
        gate = setting.pop("gate", "")
        while gate and not os.access(gate, os.F_OK):
            time.sleep(GATE_PAUSE_S)
        if "keeper_path" in setting:
            keeper_process.serve(keeper_process.KeeperSetting(**setting))
        else:
            shelf_worker.serve(far.makefile("rw"), Setting(**setting))
        status = 0
    except BrokenPipeError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
