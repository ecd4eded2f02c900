"""What a host may not give a process: io_uring, locked memory, vector instructions, a native module that it could not
build. It says so once and stays exact.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WARNINGS = {
    "io_uring": ["no io_uring here (Operation not permitted)"],
    "io_uring_register": ["its memory cannot be registered with io_uring: Operation not permitted"],
    "memlock": ["raise `ulimit -l`"],
    "registering": ["raise `ulimit -l`"],
    "vectors": ["plain C++"],
    "compiler": ["Install a C++ compiler", "no io_uring here (kvtier._native was not built)"],
}
"""What is said where it is lacking. Without any locked memory there are, by kernel, no rings or none with DRAM's."""
CANNOT = 77
"""Status: this machine lets no process forbid itself a call."""
CALLS = {"io_uring": 425, "io_uring_register": 427}
"""Those that a filter refuses; of the first, io_uring_setup."""
CAP_IPC_LOCK = 14


@pytest.mark.parametrize("forbidden", WARNINGS)
def test_what_is_forbidden_is_done_without_and_said_once(forbidden: str) -> None:
    pytest.importorskip("kvtier._native")
    command = [sys.executable, "-m", "tests.faults.test_forbidden", forbidden]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode == CANNOT:
        pytest.skip("seccomp filters are not to be had")
    assert done.returncode == 0, done.stderr
    *said, streamed = done.stdout.splitlines()
    assert len(said) == len(WARNINGS[forbidden]), said
    assert all(part in line for part, line in zip(WARNINGS[forbidden], said, strict=True)), said
    assert streamed == "streamed: True"


def forbid(what: str) -> None:
    """For this process, from now on."""
    if what in ("memlock", "registering"):
        limit = 0 if what == "memlock" else 1 << 17  # room for rings
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
        _heed_memlock()
    elif what in CALLS:
        _answer_with_eperm(CALLS[what])
    elif what == "compiler":
        sys.modules["kvtier._native"] = None  # type: ignore[assignment]
    else:
        from kvtier import _native

        kernels = _native.Kernels
        _native.supported_isas = lambda: ["plain"]
        _native.Kernels = lambda threads, isa: kernels(threads, "plain" if isa == "auto" else isa)


def _heed_memlock() -> None:
    """Root goes without the right to lock more: the capability is cleared in what is effective and permitted."""
    head, sets = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None)
    assert libc.capget(head, sets) == 0
    words = list(struct.unpack("6I", sets.raw))
    words[:2] = [word & ~(1 << CAP_IPC_LOCK) for word in words[:2]]
    assert libc.capset(head, struct.pack("6I", *words)) == 0


def _answer_with_eperm(call: int) -> None:
    """By a seccomp filter, as runtimes of containers have: load the number, compare, refuse, else allow."""

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    steps = step(0x20, 0, 0, 0) + step(0x15, 0, 1, call) + step(0x06, 0, 0, 0x50001) + step(0x06, 0, 0, 0x7FFF0000)
    held = ctypes.create_string_buffer(steps, len(steps))
    rules = struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, rules, 0, 0) != 0:
        sys.exit(CANNOT)


class Said(logging.Handler):
    """Prints warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage())


def main(forbidden: str) -> None:
    """A context larger than HBM and DRAM beside one that fits HBM: the same bits, and what is said meanwhile."""
    forbid(forbidden)
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "equivalence")]
    from test_streamed_contexts import CONTEXT, PLACES, config, long_context
    from tiny import make_checkpoint
    from workloads import assert_equal, run_workload

    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model", "llama", max_position_embeddings=CONTEXT)
        rounds = long_context()
        reference = run_workload(config(model, 256, 0), rounds)
        logging.getLogger("kvtier").addHandler(Said(logging.WARNING))
        places = PLACES[1].overrides(Path(folder) / "cache")
        small = run_workload(config(model, 34, 0, io__writers=1, **places), rounds)
        assert_equal(reference, small)
        print("streamed:", small.stats["streamed_nvme_bytes"] > 0)


if __name__ == "__main__":
    main(sys.argv[1])
