"""A fault at some of the I/Os of a run, in small counts; `scripts/soak --full` does it at every one."""

from __future__ import annotations

from pathlib import Path

from tests.soak.proving import prove


def test_a_fault_at_any_io_of_a_shelf_is_survived_and_over_once_it_is_gone(tmp_path: Path) -> None:
    prove("nth-io-shelf", tmp_path)


def test_a_fault_at_any_io_of_an_engine_changes_no_bit_of_its_logits(tmp_path: Path) -> None:
    prove("nth-io-engine", tmp_path)
