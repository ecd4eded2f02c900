"""What somebody may have put in the place of a file, and a bound on what might wait for it for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

Value = TypeVar("Value")

KINDS = ("pipe", "folder", "link", "dangling", "socket", "device", "hard_link")
PATIENCE_S = 30.0


def put(path: Path, kind: str) -> None:
    """Put something of this kind there; skips where only root may."""
    elsewhere = path.parent / "elsewhere"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("link", "hard_link"):
        elsewhere.write_bytes(b"of somebody else")
        path.symlink_to(elsewhere) if kind == "link" else path.hardlink_to(elsewhere)
    elif kind == "dangling":
        path.symlink_to(elsewhere)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
            listener.bind(path.name)
    else:
        assert kind == "device"
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes device nodes, and not everywhere")


def ends(work: Callable[[], Value]) -> Value:
    """What `work` returns or raises, on a thread that is left behind should it hang."""
    ended: list[tuple[Value | None, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert ended, "it hangs"
    value, error = ended[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
