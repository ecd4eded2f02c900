"""Every soak scenario by name, with the counts of the tests and those of `scripts/soak --full`.

Owns the list and nothing else: what a scenario does is in the module that it comes from. Read by tests/soak/__main__.py
and by the fault tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.soak.call_storm import call_kills, strace_reason
from tests.soak.caps import caps
from tests.soak.company import crowd, forked, two_layouts, versions
from tests.soak.corruption import corrupt_rows, damage_journal
from tests.soak.host_scenarios import disk_full, disk_reason, namespace_reason, orphan_writes, pid_namespaces
from tests.soak.nth_io import fail_each_engine_io, fail_each_shelf_io
from tests.soak.power import cut_off_ext4, ext4_reason, forget_unsynced
from tests.soak.scenarios import (
    first_engines,
    journal_lost,
    keeper_killed,
    keeper_stopped,
    orphan_reads,
    reload,
    removed,
)
from tests.soak.step_storm import engine_steps, keeper_steps
from tests.soak.storm import kill_storm
from tests.soak.words import Numbers

EVERY = 1_000_000
"""More than there are: each one, once."""


def everywhere() -> str:
    """The `skip_reason` of what runs on any machine."""
    return ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One proof. The first line of `run`'s docstring says what it shows."""

    run: Callable[[int, int, Path], Numbers]
    """`run(count, seed, scratch)`: AssertionError on a violation. Leaves no process, mount or loop device behind."""
    short_count: int
    full_count: int
    skip_reason: Callable[[], str] = everywhere
    """Why it cannot run on this machine; "" if it can."""

    @property
    def about(self) -> str:
        """What it shows, in a line."""
        return (self.run.__doc__ or "").partition("\n")[0]


SCENARIOS: dict[str, Scenario] = {
    "kills": Scenario(kill_storm, 50, 1000),
    "keeper-steps": Scenario(keeper_steps, 6, EVERY),
    "engine-steps": Scenario(engine_steps, 6, EVERY),
    "system-calls": Scenario(call_kills, 4, EVERY, strace_reason),
    "keeper-killed": Scenario(keeper_killed, 1, 20),
    "keeper-stopped": Scenario(keeper_stopped, 1, 60),
    "orphan-reads": Scenario(orphan_reads, 2, 40),
    "orphan-writes": Scenario(orphan_writes, 1, 10, disk_reason),
    "first-engines": Scenario(first_engines, 1, 20),
    "removed": Scenario(removed, 1, 10),
    "reload": Scenario(reload, 2, 30),
    "versions": Scenario(versions, 2, 6),
    "disk-full": Scenario(disk_full, 1, 6, disk_reason),
    "journal-lost": Scenario(journal_lost, 2, 20),
    "pid-namespaces": Scenario(pid_namespaces, 1, 10, namespace_reason),
    "crowd": Scenario(crowd, 1, 10),
    "forked": Scenario(forked, 1, 20),
    "two-layouts": Scenario(two_layouts, 1, 10),
    "caps": Scenario(caps, 10, 50),
    "corruption": Scenario(corrupt_rows, 200, 10_000),
    "journal-corruption": Scenario(damage_journal, 24, 1000),
    "nth-io-shelf": Scenario(fail_each_shelf_io, 60, 500),
    "nth-io-engine": Scenario(fail_each_engine_io, 8, 350),
    "power-cut": Scenario(cut_off_ext4, 10, 200, ext4_reason),
    "unsynced-writes": Scenario(forget_unsynced, 10, 300),
}
