"""Engines here wait for reads, however crowded the machine is: asserted is where tokens came from, not how soon."""

from __future__ import annotations

import pytest

from kvtier import cost
from tests.engines import PATIENCE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "WAIT_MIN_S", PATIENCE_S)
