"""A scenario as a test: its short count, a fixed seed, a skip with its reason. Used by the fault tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.table import SCENARIOS
from tests.soak.words import Numbers

SEED = 7


def prove(name: str, scratch: Path) -> Numbers:
    """Run a scenario of the table with its short count; what it has counted. Skips where it cannot run."""
    scenario = SCENARIOS[name]
    reason = scenario.skip_reason()
    if reason:
        pytest.skip(reason)
    print(f"{name}: {scenario.short_count} times, seed {SEED}")
    numbers = scenario.run(scenario.short_count, SEED, scratch)
    print(numbers)
    return numbers
