"""The seam for faults tells the truth: what strace makes the kernel answer has the same end as what the seam plays."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from tests.faults.seam_child import PAGE, move
from tests.soak.call_storm import strace_reason

ROOT = Path(__file__).parent.parent.parent
SYSTEM_CALLS = {Call.READ: "preadv,preadv2", Call.WRITE: "pwritev,pwritev2", Call.SYNC: "fdatasync"}


pytestmark = pytest.mark.skipif(strace_reason() != "", reason=strace_reason())


def traced(what: str, path: Path, *injections: str) -> tuple[Any, int]:
    """What the child printed, and how many of its calls strace tampered with."""
    log = path.parent / "strace.log"
    names = ",".join(SYSTEM_CALLS.values())
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", str(log), "-e", f"trace={names}"]
    for injection in injections:
        command += ["-e", f"inject={injection}"]
    command += [sys.executable, "-m", "tests.faults.seam_child", what, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), log.read_text().count("(INJECTED)")


def fault_and_injection(fault: Fault) -> str:
    what = "retval=0" if fault.effect is Effect.SHORT else f"error={errno.errorcode[int(fault.value)]}"
    return f"{SYSTEM_CALLS[fault.call]}:{what}:when={fault.nth}{'+' if fault.sticky else ''}"


FAULTS = [
    Fault(Call.READ, 3, Effect.ERROR, errno.EIO),
    Fault(Call.READ, 2, Effect.ERROR, errno.EIO, sticky=True),
    Fault(Call.READ, 1, Effect.ERROR, errno.EINTR),
    Fault(Call.READ, 4, Effect.SHORT, 0),
    Fault(Call.WRITE, 2, Effect.ERROR, errno.EIO),
    Fault(Call.WRITE, 3, Effect.ERROR, errno.ENOSPC, sticky=True),
    Fault(Call.WRITE, 5, Effect.ERROR, errno.EROFS),
    Fault(Call.WRITE, 1, Effect.ERROR, errno.EINTR),
    Fault(Call.WRITE, 3, Effect.SHORT, 0),
    Fault(Call.SYNC, 1, Effect.ERROR, errno.EIO),
    Fault(Call.SYNC, 2, Effect.ERROR, errno.EINTR),
]


@pytest.mark.parametrize(
    "fault",
    FAULTS,
    ids=lambda f: f"{f.call.value} {f.nth}{'+' * f.sticky} {errno.errorcode.get(int(f.value), 'nothing')}",
)
def test_a_fault_at_the_seam_ends_like_the_kernel_s_own(fault: Fault, tmp_path: Path) -> None:
    if fault.call is Call.READ:
        assert all(error == 0 for _, _, error, _ in move(tmp_path / "traced"))
    found, injected = traced("engine", tmp_path / "traced", fault_and_injection(fault))
    assert injected > 0, "strace has changed nothing"
    played = [list(end) for end in move(tmp_path / "played", FaultyCalls([fault]))]
    assert found == played
    interrupted = fault.effect is Effect.ERROR and fault.value == errno.EINTR
    troubled = [end for end in played if end[2] or (end[0] != "sync" and end[1] != 2 * PAGE)]
    assert bool(troubled) != interrupted, "an interrupted call is made again, any other fault is told"


def test_a_kernel_that_says_it_has_written_and_has_not_gives_misses(tmp_path: Path) -> None:
    slot_bytes = 4 * PAGE
    found, injected = traced("shelf", tmp_path / "cache", f"{SYSTEM_CALLS[Call.WRITE]}:retval={slot_bytes}:when=4+3")
    lost = found["bad_row"]
    assert injected >= lost > 0 and found["hits"] == 24 - lost > 0, found


def test_reads_that_were_never_made_give_misses(tmp_path: Path) -> None:
    found, injected = traced("shelf", tmp_path / "cache", f"{SYSTEM_CALLS[Call.READ]}:retval={4 * PAGE}:when=2+4")
    assert injected == found["bad_row"] > 0 and found["hits"] == 24 - injected > 0, found


def test_an_interrupted_and_failing_disk_under_a_shelf_costs_rows_and_no_truth(tmp_path: Path) -> None:
    found, injected = traced(
        "shelf",
        tmp_path / "cache",
        f"{SYSTEM_CALLS[Call.READ]}:error=EIO:when=3+7",
        f"{SYSTEM_CALLS[Call.WRITE]}:error=EINTR:when=3+5",
    )
    assert injected > found["io_error"] > 0 and found["hits"] == 24 - found["io_error"], found
