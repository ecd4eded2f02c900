"""The scenarios at the end of the shelf protocol, each beside engines that read in place: their short counts.

One is not here: a request that is cancelled in mid-pass is the engine's business, and in test_streamed_shelf.py.
"""

from __future__ import annotations

from pathlib import Path

from tests.soak.proving import prove


def test_a_keeper_killed_between_a_reservation_and_an_attended_row_costs_neither(tmp_path: Path) -> None:
    prove("keeper-killed", tmp_path)


def test_a_stopped_keeper_holds_no_call_up_and_works_its_backlog_off(tmp_path: Path) -> None:
    prove("keeper-stopped", tmp_path)


def test_reads_of_a_killed_engine_land_in_nobodys_rows(tmp_path: Path) -> None:
    prove("orphan-reads", tmp_path)


def test_writes_of_a_killed_engine_on_a_frozen_device_keep_their_slots(tmp_path: Path) -> None:
    numbers = prove("orphan-writes", tmp_path)
    assert numbers["slots_kept_back"]


def test_engines_that_are_first_together_find_one_keeper(tmp_path: Path) -> None:
    prove("first-engines", tmp_path)


def test_engines_meet_again_when_their_directory_was_removed(tmp_path: Path) -> None:
    prove("removed", tmp_path)


def test_a_reload_is_warm_while_the_old_engine_is_there_and_after(tmp_path: Path) -> None:
    prove("reload", tmp_path)


def test_another_version_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    prove("versions", tmp_path)


def test_a_full_disk_before_and_after_the_slab_is_made_costs_nothing_but_room(tmp_path: Path) -> None:
    prove("disk-full", tmp_path)


def test_a_lost_journal_is_made_up_for_by_the_headers(tmp_path: Path) -> None:
    prove("journal-lost", tmp_path)


def test_two_pid_namespaces_share_a_directory_and_one_of_them_may_go(tmp_path: Path) -> None:
    prove("pid-namespaces", tmp_path)


def test_64_engines_are_served_while_they_read_and_the_65th_is_refused(tmp_path: Path) -> None:
    prove("crowd", tmp_path)


def test_the_child_of_an_engine_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    prove("forked", tmp_path)


def test_another_layout_gets_what_is_left_of_the_budget(tmp_path: Path) -> None:
    prove("two-layouts", tmp_path)
