"""The model processes (stubs) and shared memory of one Triton server, told apart by the prefix of their regions.

Linux only (`/proc`, `/dev/shm`). Touches nothing whose name does not begin with the prefix.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
STACK_BYTES = 64 << 20
"""Of each thread of a server: the HTTP frontend (2.51) keeps bodies of forms, as `curl -d` sends them, twice on the
stack, and JSON level by level; 8 MiB, the usual limit, end with 4.2 MB or 50,000 levels."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """One live stub and the name of the model it runs."""

    pid: int
    model: str

    def kill(self) -> None:
        """End it at once; no error if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def model_processes(prefix: str) -> list[ModelProcess]:
    """Live stubs whose shared memory region begins with `prefix`; zombies do not count."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        # triton_python_backend_stub MODEL/VERSION/model.py REGION ...
        if len(words) > 2 and words[0].endswith("triton_python_backend_stub") and words[2].startswith(prefix):
            found.append(ModelProcess(int(folder.name), Path(words[1]).parent.parent.name))
    return found


def server_setup() -> Callable[[], None]:
    """A `preexec_fn` for a server: `end_with_parent`, and stacks of `STACK_BYTES`, or what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack_bytes = STACK_BYTES if soft == resource.RLIM_INFINITY else max(STACK_BYTES, soft)
    if hard != resource.RLIM_INFINITY:
        stack_bytes = min(stack_bytes, hard)
    follow = end_with_parent()

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard))
        follow()

    return prepare


def end_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child SIGTERM when the thread that started it ends, by SIGKILL even."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # found before the fork: the child must not load anything

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)

    return ask_kernel


def clean_up(prefix: str) -> None:
    """Kill the stubs and remove the shared memory that a dead server of this prefix left behind."""
    for process in model_processes(prefix):
        process.kill()
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
