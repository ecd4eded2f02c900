"""SIGKILL of engines and keeper, at random and at every step: the soak's scenarios with their short counts."""

from __future__ import annotations

from pathlib import Path

from tests.soak.proving import prove


def test_fifty_kills_of_anybody_cost_no_row_hardly_a_hit_and_leave_nothing_behind(tmp_path: Path) -> None:
    numbers = prove("kills", tmp_path)
    assert numbers["hits"] and numbers["blocks_asked"]


def test_a_keeper_killed_at_any_step_of_the_directory_loses_nothing(tmp_path: Path) -> None:
    prove("keeper-steps", tmp_path)


def test_an_engine_killed_at_any_step_of_the_directory_disturbs_nobody(tmp_path: Path) -> None:
    prove("engine-steps", tmp_path)


def test_a_kill_at_any_system_call_on_the_cache_directory_leaves_it_warm(tmp_path: Path) -> None:
    prove("system-calls", tmp_path)
