#!/usr/bin/env python3
"""Make `.venv` with what requirements.lock names and kvtier itself; do nothing where it is up to date.

Runs on the standard library alone, by the Python that `.venv` shall have. Checks first what pip could not mend:
compiler, Python headers, libpython, venv. kvtier is installed in place, so that edits need no new install; it is
installed again when its native sources change or a module comes or goes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "kvtier.stamp"
"""In `.venv`: digests of what was installed, one line each for lock file and package; written last."""
PIP = ("-m", "pip", "--disable-pip-version-check")


def main() -> int:
    """Command line. Exit status 1 with the remedy if the machine lacks something or pip fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    packages = missing_packages()
    if packages:
        print("This machine lacks what kvtier is built with. On Debian or Ubuntu:", file=sys.stderr)
        print(f"    apt-get install {' '.join(packages)}", file=sys.stderr)
        return 1
    try:
        update(ROOT / ".venv")
    except subprocess.CalledProcessError as error:
        print(f"make_venv: `{' '.join(map(str, error.cmd))}` ended with status {error.returncode}", file=sys.stderr)
        print("Its message above says why; what was made so far is used next time.", file=sys.stderr)
        return 1
    return 0


def missing_packages() -> list[str]:
    """Debian packages to install before anything can work, for this interpreter."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = {
        "g++": any(shutil.which(compiler) for compiler in ("g++", "c++", "clang++")),
        f"{name}-venv": importlib.util.find_spec("ensurepip") is not None,
        f"{name}-dev": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
        f"lib{name}": _has_libpython(name),
    }
    return [package for package, there in found.items() if not there]


def _has_libpython(name: str) -> bool:
    """Whether the Triton server's Python backend will find the shared library of this interpreter."""
    library = f"lib{name}.so.1.0"
    if (Path(sysconfig.get_config_var("LIBDIR") or "") / library).exists():
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def update(folder: Path) -> None:
    """Bring `folder` up to date. Raises CalledProcessError where a step fails."""
    lock = digest([ROOT / "requirements.lock"])
    native = [path for path in sorted((ROOT / "kvtier" / "native").iterdir()) if path.is_file()]
    modules = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "kvtier").rglob("*.py"))]
    package = digest([ROOT / "pyproject.toml", *native], modules)
    stamp = folder / STAMP
    done = stamp.read_text().splitlines() if stamp.exists() else []
    python = folder / "bin" / "python"
    if not _runs(python, "-m", "pip", "--version"):
        print(f"making {folder.name} with {sys.executable}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        done = []
    if lock not in done:
        print("installing what requirements.lock names; the first time this takes some minutes", flush=True)
        subprocess.run([str(python), *PIP, "install", "-r", str(ROOT / "requirements.lock")], check=True)
        stamp.write_text(f"{lock}\n")
    if lock not in done or package not in done:
        print("building kvtier", flush=True)
        options = ["--quiet", "--no-build-isolation", "--no-deps", "--editable", str(ROOT)]
        subprocess.run([str(python), *PIP, "install", *options], check=True)
        stamp.write_text(f"{lock}\n{package}\n")


def digest(paths: Iterable[Path], names: Iterable[str] = ()) -> str:
    """One digest of the names and contents of files, of more `names`, and of the Python they are installed for."""
    content = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {list(names)}".encode())
    for path in paths:
        content.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return content.hexdigest()


def _runs(*command: object) -> bool:
    try:
        return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
