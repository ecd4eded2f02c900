"""What holds for all tests.

Triton-language programs are run by their interpreter, on any machine. And a test that starts processes or a server and
waits for them hangs on what else the machine runs: when it fails it is run again, and the summary counts it ("rerun")
and shows why. A worker that has died is never tried again: that is how a wrong row ends (tests/shelf_worker.py). Nor is
what no machine can be blamed for: an engine that has failed, or what is wrong within the package.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # looked at when triton is first imported, which may be by any test

TESTS = Path(__file__).parent
WAITING = ("faults", "server", "equivalence/test_identity.py", "equivalence/test_sharing.py")
"""Where tests wait for other processes, below this folder."""
RERUNS = 2
PACKAGE = TESTS.parent / "kvtier"
ENGINE = str(PACKAGE / "loop.py")
"""Where the error of an engine that has failed comes from."""
BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""In the package."""
NEVER_AGAIN = ("the worker has died", "the engine has failed", "wrong", "'token_ids'")
"""In the text of a failure; the last is the field of two answers that differ in it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what may be run again."""
    for item in items:
        if any(item.path.is_relative_to(TESTS / place) for place in WAITING):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, reruns_delay=5, condition=may_be_the_machine))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests were run again: whoever reads a log with any shall look for the cause."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"run again: {report.nodeid}", sep="_")
        terminalreporter.line(report.longreprtext)


def may_be_the_machine(error: BaseException) -> bool:
    """Whether a failure can be that of a machine which did not let a process run in time."""
    places = traceback.extract_tb(error.__traceback__)
    in_package = [Path(place.filename).is_relative_to(PACKAGE) for place in places]
    if any(place.filename == ENGINE and place.name == "_run" for place in places):
        return False
    return not (isinstance(error, BUGS) and any(in_package[-1:])) and not any(w in str(error) for w in NEVER_AGAIN)
