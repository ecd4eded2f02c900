"""What holds for all tests.

Triton-language programs are run by their interpreter, on any machine. And a test that starts processes or a server and
waits for them hangs on what else the machine runs: when it fails it is run again, and the summary counts it ("rerun")
and shows why. A worker that has died is never tried again: that is how a wrong row ends (tests/shelf_worker.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # looked at when triton is first imported, which may be by any test

TESTS = Path(__file__).parent
WAITING = ("faults", "server")
"""Folders of tests that wait for other processes."""
RERUNS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what may be run again."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in WAITING:
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, reruns_delay=5, condition=may_be_the_machine))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests were run again: whoever reads a log with any shall look for the cause."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"run again: {report.nodeid}", sep="_")
        terminalreporter.line(report.longreprtext)


def may_be_the_machine(error: BaseException) -> bool:
    """Whether a failure can be that of a machine which did not let a process run in time."""
    return "the worker has died" not in str(error) and "wrong" not in str(error)
