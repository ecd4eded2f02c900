"""Builds kvtier/native with sanitizers and runs the tests of its kernels on those builds.

Two runs: address and undefined behaviour (out-of-bounds, use after free, leaks), then threads (races). Python, torch
and their libraries are not built like that, so what a sanitizer says counts only where it names a frame of ours. Exit
status 0 if every test passed and nothing was said of the module. Builds stay in .cache/sanitize and are renewed as
needed; the first takes minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import environment

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "kvtier" / "native"
CACHE = ROOT / ".cache" / "sanitize"
SUITES = (
    "test_attention.py",
    "test_ops.py",
    "test_few_rows.py",
    "test_native_layers.py",
    "test_native_reading.py",
    "test_checksum.py",
    "test_header.py",
    "test_uring.py",
    "test_uring_registered.py",
    "test_uring_pieces.py",
)
"""Tests of the native module, in tests/unit; those that are there are run."""
OURS = re.compile(r"_native|kvtier/native")
"""What the frames of the module have: the name of its library or of a source."""

DEFINED_ONCE = "nanobind__native_exec"
"""A frame of the module's definition at its import: what that allocates, Python keeps to the end."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to build the module and to look at it."""

    name: str
    flags: str
    libraries: tuple[str, ...]
    """Runtimes that must be there before Python is."""
    options: dict[str, str]
    """Environment of the run; each gets the path of a log. Names for addresses are looked up here, where it counts."""
    reports: str
    """Pattern of a report's first line."""
    says: str


ADDRESS = Run(
    "address",
    "-fsanitize=address,undefined",
    ("libasan.so", "libubsan.so", "libstdc++.so"),
    {
        "ASAN_OPTIONS": "detect_leaks=1:symbolize=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:symbolize=0",
    },
    r"ERROR: AddressSanitizer|runtime error:|(?:Direct|Indirect) leak of",
    "no out-of-bounds, no leak, no undefined behaviour",
)
THREAD = Run(
    "thread",
    "-fsanitize=thread",
    ("libtsan.so", "libstdc++.so"),
    {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:symbolize=0"},
    r"WARNING: ThreadSanitizer",
    "no race",
)
RUNS = {run.name: run for run in (ADDRESS, THREAD)}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="scripts/sanitize", description=__doc__)
    parser.add_argument("--only", choices=RUNS, help="one of the two runs")
    parser.add_argument("tests", nargs="*", help="tests or options for pytest, instead of all tests of the kernels")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    known, rest = parser.parse_known_args()
    tests = known.tests + rest
    if known.inside:
        _inside(Path(known.inside[0]), Path(known.inside[1]), tests)
        return 0
    tests = tests or [str(path) for name in SUITES if (path := ROOT / "tests/unit" / name).exists()]
    bad = [run.name for run in RUNS.values() if known.only in (None, run.name) and not _check(run, tests)]
    return 1 if bad else 0


def _check(run: Run, tests: list[str]) -> bool:
    """Build, run, and say what came of it."""
    module = _build(run)
    print(f"== {run.name}: tests on {module.relative_to(ROOT)}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        verdict, logs = Path(folder) / "verdict", Path(folder) / "logs"
        logs.mkdir()
        variables = environment()
        variables["LD_PRELOAD"] = " ".join(_library(name) for name in run.libraries)
        variables |= {name: f"{options}:log_path={logs / name}" for name, options in run.options.items()}
        # The sanitizer of threads wants the memory map that it knows, so: no random addresses.
        command = ["setarch", "-R", sys.executable, __file__, "--inside", str(module), str(verdict), *tests]
        status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        passed = verdict.exists() and verdict.read_text() == "0" and status >= 0  # reports may come after the tests
        text = "\n".join(path.read_text(errors="replace") for path in sorted(logs.iterdir()))
    reports = _split(text, run.reports)
    ours = [_with_names(report, module) for report in reports if OURS.search(report)]
    ours = [report for report in ours if not (" leak of " in report and DEFINED_ONCE in report)]
    print("".join(ours), end="")
    said = run.says if not ours else f"{len(ours)} REPORTS, see above"
    tested = "tests passed" if passed else "TESTS FAILED or never ended"
    others = f"{len(reports) - len(ours)} reports name no frame of ours"
    print(f"== {run.name}: {tested}, {said} ({others}; {time.monotonic() - began:.0f} s)", flush=True)
    return passed and not ours


def _inside(module: Path, verdict: Path, tests: list[str]) -> None:
    """Within the sanitized process: put `module` in the place of kvtier._native, run tests, write their status."""
    import pytest

    import kvtier

    spec = importlib.util.spec_from_file_location("kvtier._native", module)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["kvtier._native"] = native
    kvtier._native = native
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-o", "timeout=0", *tests])
    assert sys.modules["kvtier._native"] is native
    verdict.write_text(str(int(status)))


def _build(run: Run) -> Path:
    """The module, built where it is not up to date. CalledProcessError if that fails."""
    folder = CACHE / run.name
    flags = f"{run.flags} -O1 -g -fno-omit-frame-pointer"
    print(f"== {run.name}: building with {run.flags}", flush=True)
    configure = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CXX_FLAGS={flags}",
        "-DKVTIER_OPTIMIZATION=-O1",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",  # which nanobind does not strip
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-DNDEBUG",
    ]
    cmake = [sys.executable, "-m", "cmake"]
    made_of = folder / "CMakeCache.txt"
    if made_of.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={NATIVE}\n" not in made_of.read_text():
        shutil.rmtree(folder)  # of a checkout that lay elsewhere, which cmake refuses
    subprocess.run([*cmake, "-S", str(NATIVE), "-B", str(folder), *configure], check=True, stdout=subprocess.DEVNULL)
    build = [*cmake, "--build", str(folder), "--parallel", "2"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    [module] = folder.glob("_native*.so")
    return module


def _library(name: str) -> str:
    """Path of one of the compiler's libraries."""
    asked = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    path = asked.stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"sanitize: g++ has no {name}; install the sanitizers of the compiler (Debian: libgcc-12-dev)")
    return path


def _with_names(report: str, module: Path) -> str:
    """A report with functions and lines behind the frames of the module."""
    offsets = re.findall(rf"{re.escape(module.name)}\+(0x[0-9a-f]+)", report)
    if not offsets:
        return report
    command = ["addr2line", "-Cfpse", str(module), *offsets]
    names = iter(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())
    pattern = rf"({re.escape(module.name)}\+0x[0-9a-f]+\))"
    return re.sub(pattern, lambda match: f"{match[1]} {next(names, '')}", report)


def _split(text: str, first_line: str) -> list[str]:
    """The reports in a sanitizer's log: each from its first line to the next one's."""
    starts = [match.start() for match in re.finditer(rf"^.*(?:{first_line}).*$", text, re.MULTILINE)]
    return [text[start:end] for start, end in zip(starts, [*starts, len(text)][1:], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
