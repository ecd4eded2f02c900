"""Finds the Triton server and checks that its Python backend can run this interpreter.

Owns what has to be true before a start (numpy, stub, libpython) and the environment of the server. Starts nothing.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import environment, environment_path
from kvtier.serving.errors import ServingError

SERVER_BINARY = "pytriton/tritonserver/bin/tritonserver"
"""Where `scripts/install_server.py` leaves the binary, below its target folder."""
STUB = "triton_python_backend_stub"
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where there is none of them (the second is WSL's) there is no GPU."""
GPU_OPTIONS = {"--allow-gpu-metrics": "false", "--pinned-memory-pool-byte-size": "0"}
"""What a server looks for at start even without a GPU, complaining of errors that are none."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A server that was found: its binary, its Python backend's files and the stub for this interpreter."""

    binary: Path
    python_backend: Path
    """Folder with libtriton_python.so."""
    stub: Path
    """The real file: ldd and the loader find its libraries relative to it."""

    def assemble_backends(self, folder: Path) -> Path:
        """Make a backend directory under `folder` with the stub as a symlink (a copied one loses its libraries)."""
        if self.stub.parent == self.python_backend:
            return self.python_backend.parent
        target = folder / "backends" / "python"
        target.mkdir(parents=True)
        for item in self.python_backend.iterdir():
            (target / item.name).symlink_to(item.resolve())
        (target / STUB).symlink_to(self.stub)
        return target.parent

    def environment(self) -> dict[str, str]:
        """The caller's environment with this interpreter first on PATH and its libpython first for the loader.

        The stub ignores PYTHONPATH: it finds site-packages through the `python3` that PATH names.
        """
        values = environment()
        values["PATH"] = f"{Path(sys.executable).parent}:{environment_path()}"
        paths = [str(folder) for folder in [_libpython_folder()] if folder is not None]
        paths += [values["LD_LIBRARY_PATH"]] if values.get("LD_LIBRARY_PATH") else []
        if paths:
            values["LD_LIBRARY_PATH"] = ":".join(paths)
        return values

    def check(self) -> None:
        """Raise ServingError unless the stub can run this interpreter; the text names the remedy."""
        check_numpy(importlib.metadata.version("numpy"))
        command = ["ldd", str(self.stub)]
        result = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)
        missing = re.findall(r"^\s*(\S+) => not found", result.stdout, re.MULTILINE)
        if missing:
            packages = " ".join(sorted({package_of(library) for library in missing}))
            raise ServingError(
                f"the Triton server's Python backend lacks {', '.join(missing)}: run `apt-get install {packages}`"
            )
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        linked = re.search(r"libpython(\d+\.\d+)\.so", result.stdout)
        if linked is not None and linked[1] != version:
            raise ServingError(f"this Triton server runs Python {linked[1]}, this is Python {version}: use {linked[1]}")


def locate(server_directory: Path) -> Installation:
    """Find the server: `tritonserver` on PATH if there, else the files in `server_directory`.

    Raises ServingError when there is none or it has no stub for this version of Python.
    """
    found = shutil.which("tritonserver", path=environment_path())
    if found is not None:
        binary = Path(found).resolve()
        backend = binary.parent.parent / "backends" / "python"
        if not (backend / STUB).exists():
            raise ServingError(f"{binary} has no Python backend beside it (looked for {backend / STUB})")
        return Installation(binary, backend, backend / STUB)
    binary = server_directory.absolute() / SERVER_BINARY
    if not binary.exists():
        raise ServingError(f"no tritonserver on PATH and none in {server_directory}: run scripts/install_server.py")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = binary.parent.parent / "python_backend_stubs"
    stub = stubs / version / STUB
    if not stub.exists():
        known = ", ".join(sorted(item.name for item in stubs.iterdir()))
        raise ServingError(f"this Triton server has stubs for Python {known}, not for {version}")
    return Installation(binary, binary.parent.parent / "backends" / "python", stub.resolve())


def package_of(library: str) -> str:
    """The Debian package that brings a shared library: `libpython3.11.so.1.0` is in `libpython3.11`."""
    python = re.fullmatch(r"(libpython\d+\.\d+)\.so.*", library)
    if python is not None:
        return python[1]
    stem, _, version = library.partition(".so")
    return (stem + version.split(".")[1] if version.count(".") else stem).lower().replace("_", "-")


def arguments_without_gpu(given: Sequence[str], devices: Sequence[Path] = GPU_DEVICES) -> list[str]:
    """Arguments that spare a server its search for a GPU where there is none, but for what was `given` already."""
    if any(device.exists() for device in devices):
        return []
    names = {argument.partition("=")[0] for argument in given}
    return [f"{name}={value}" for name, value in GPU_OPTIONS.items() if name not in names]


def check_numpy(version: str) -> None:
    """Raise ServingError for numpy 2 and later."""
    if int(version.split(".")[0]) >= 2:
        raise ServingError(
            f"numpy {version} is installed, but with numpy 2 the Triton server 2.51 hands models empty numeric "
            "tensors and dies on strings: run `pip install 'numpy<2'`"
        )


def _libpython_folder() -> Path | None:
    """The folder of this interpreter's own shared libpython, if it has one."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if not folder or not name or not (Path(folder) / name).exists():
        return None
    return Path(folder)
