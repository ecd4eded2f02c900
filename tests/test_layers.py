"""The floors of DESIGN.md section 4: imports run downwards only, and three things have one home each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvtier"

WORDS, BOOKS, BYTES, SHELF, STORE, MIND, BODY, TOP = "words", "books", "bytes", "shelf", "store", "mind", "body", "top"
BELOW = {
    WORDS: set(),
    BOOKS: {WORDS},
    BYTES: {WORDS},
    SHELF: {WORDS, BOOKS, BYTES},
    STORE: {WORDS, BOOKS, BYTES, SHELF},
    MIND: {WORDS, BOOKS, STORE},
    BODY: {WORDS, BOOKS, BYTES},
    TOP: {WORDS, BOOKS, BYTES, SHELF, STORE, MIND, BODY},
}
FLOORS = {
    WORDS: [
        "_native",
        "errors",
        "byte_text",
        "config",
        "block",
        "namespace",
        "request",
        "record",
        "retention",
        "terms",
        "ticket",
    ],
    BOOKS: [
        "eviction",
        "pool",
        "prefix",
        "resident",
        "sequence",
        "directory",
        "slots",
        "ready",
        "breaker",
        "expiry",
        "write_budget",
        "shortage",
        "cost",
    ],
    BYTES: [
        "io",
        "tiers",
        "journal",
        "replay",
        "layout_bytes",
        "file_watch",
        "process_limits",
        "boot_clock",
        "metrics",
        "cache_directory",
        "digest_memory",
    ],
    SHELF: [
        "books",
        "shelf",
        "holdings",
        "reads",
        "writes",
        "watch",
        "shelves",
        "rebuild",
        "transfers",
        "stager",
        "staging",
        "keeper",
    ],
    STORE: [
        "lane",
        "fetch",
        "promotion",
        "demotion",
        "draining",
        "copy_leases",
        "writing_back",
        "reopening",
        "source",
        "host_counts",
        "homes",
        "row_asking",
        "row_writing",
        "lease_asking",
        "hand_down",
        "store_report",
        "store",
    ],
    MIND: ["scheduler", "admission", "staged_parts", "sealing", "stream", "streams"],
    BODY: ["batch", "attention", "models", "sampler", "runner", "device"],
    TOP: [
        "engine",
        "assembly",
        "assembly_log",
        "intake",
        "capacity",
        "session",
        "loop",
        "own_process",
        "drains",
        "bell",
        "turns",
        "allowance",
        "suspended",
        "outbox",
        "tokens",
        "door",
        "cli",
        "serving",
        "client",
        "machine",
        "sizing",
        "planning",
    ],
}
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules}
SOURCES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "model_repository").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top two names of every module that a file imports, those inside functions and type-checking blocks included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own(names: set[str]) -> set[str]:
    """Modules of kvtier among imported names; `from kvtier import Engine` counts as the engine."""
    found = {name.split(".")[1] for name in names if name.startswith("kvtier.")}
    return {"engine" if module == "Engine" else module for module in found if module in FLOOR_OF or module == "Engine"}


@pytest.mark.parametrize("path", [p for p in SOURCES if PACKAGE in p.parents], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards_only(path: Path) -> None:
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module == "__init__":
        return
    assert module in FLOOR_OF, f"{module} stands on no floor: add it to FLOORS"
    floor = FLOOR_OF[module]
    for other in own(imported(path)):
        assert FLOOR_OF[other] == floor or FLOOR_OF[other] in BELOW[floor], f"{module} ({floor}) imports {other}"


def test_every_floor_is_filled() -> None:
    present = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert set(FLOOR_OF) - present <= {"_native"}, "FLOORS names modules that are gone"


def test_mind_and_books_and_words_know_no_torch() -> None:
    for path in SOURCES:
        module = path.relative_to(ROOT).parts[1].removesuffix(".py")
        if FLOOR_OF.get(module) in (WORDS, BOOKS, BYTES, SHELF, STORE, MIND):
            assert not any(name.split(".")[0] == "torch" for name in imported(path)), path


def test_the_triton_server_is_imported_in_model_py_alone() -> None:
    users = {p.name for p in SOURCES if any("triton_python_backend_utils" in name for name in imported(p))}
    assert users == {"model.py"}


def test_the_environment_is_read_in_config_alone() -> None:
    for path in SOURCES:
        reads = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]
        assert not reads or path.name == "config.py", path
