"""fio, the yardstick of the disk: random direct reads or writes of one length with io_uring and registered buffers.

Knows nothing of kvtier. Used by bench_io.py, which runs it in turn with ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HOW_TO_GET = "fio is not installed (Debian, Ubuntu: apt-get install fio; Fedora: dnf install fio)"


@dataclass(frozen=True, slots=True)
class FioPass:
    """What one run of fio did."""

    bytes_s: float
    cpu_ms_gb: float


def has_fio() -> bool:
    """Whether there is a fio to run."""
    return shutil.which("fio") is not None


class Fio:
    """A file in `folder`, written whole when it is made."""

    def __init__(self, folder: Path, total_bytes: int, block_bytes: int) -> None:
        self._file = folder / f"fio-{block_bytes}"
        self._total_bytes = total_bytes // block_bytes * block_bytes
        self._block_bytes = block_bytes
        self._run("write", 16, "--fallocate=posix")

    def close(self) -> None:
        """Take the file from the disk."""
        self._file.unlink()

    def load(self, depth: int) -> FioPass:
        """Read the file once, in random order."""
        return self._run("randread", depth)

    def store(self, depth: int) -> FioPass:
        """Write the file once, in random order."""
        return self._run("randwrite", depth)

    def _run(self, kind: str, depth: int, *more: str) -> FioPass:
        command = ["fio", "--name=pass", f"--filename={self._file}", f"--size={self._total_bytes}", f"--rw={kind}"]
        command += [f"--bs={self._block_bytes}", f"--iodepth={depth}", "--ioengine=io_uring", "--direct=1"]
        command += ["--fixedbufs=1", "--registerfiles=1", "--output-format=json", *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"fio: {(done.stderr or done.stdout).strip()[-300:]}")
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        side = job["read" if "read" in kind else "write"]
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * side["runtime"] / 1e3
        return FioPass(side["bw_bytes"], cpu_s * 1e12 / side["io_bytes"])
