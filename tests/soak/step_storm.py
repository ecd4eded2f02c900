"""SIGKILL at every directory step: of the keeper, and of one engine of three, while the others live on.

Each step has a cache directory of its own, in turn with room for all and so tight that every reservation evicts. What
a step is, is in steps.py; the engine that is scripted does everything that books can be asked for, once.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.nursery import Nursery
from tests.rows import SLOT_BYTES
from tests.shelf_worker import SCRIPT_BLOCKS
from tests.soak.crew import BOTH, Crew, first_keeper
from tests.soak.words import Numbers

ROOMY, TIGHT = 96, 16
"""Slots a tier."""
PRELUDE = 4
PRELUDE_SEED, SCRIPT_SEED, LIFE_SEED = 1, 2, 100
LIFE_S = 0.5
LIFE_BLOCKS_MAX = 3
PAUSE_MAX_S = 2.0
COME_S = 3.0
"""What a keeper may take to the step at which it dies, once all is done that leads there."""


def keeper_steps(count: int, seed: int, scratch: Path) -> Numbers:
    """The keeper killed at every step of a scripted engine: nothing published is lost, nobody errs."""
    with Nursery() as nursery:
        total = _keeper_step(nursery, scratch / "all", 0, ROOMY)
        chosen = spread(total, count, seed)
        kills = 0
        for place, step in enumerate(chosen):
            kills += _keeper_step(nursery, scratch / f"step{step}", step, TIGHT if place % 2 else ROOMY)
    assert kills >= 0.8 * len(chosen) and total > 50, f"{kills} of {len(chosen)} steps came, of {total}"
    return {"steps": total, "kills": kills}


def engine_steps(count: int, seed: int, scratch: Path) -> Numbers:
    """One of three engines killed at every step: the others go on without error and pause 2 s at most."""
    worst_s = 0.0
    with Nursery() as nursery:
        total, _ = _engine_step(nursery, scratch / "all", 0, ROOMY)
        chosen = spread(total, count, seed)
        kills = 0
        for place, step in enumerate(chosen):
            came, pause_s = _engine_step(nursery, scratch / f"step{step}", step, TIGHT if place % 2 else ROOMY)
            kills += came
            worst_s = max(worst_s, pause_s)
    assert kills >= 0.8 * len(chosen) and total > 50, f"{kills} of {len(chosen)} steps came, of {total}"
    assert worst_s <= PAUSE_MAX_S, f"the others stood still for {worst_s:.1f} s"
    return {"steps": total, "kills": kills, "longest_pause_s": worst_s}


def spread(total: int, count: int, seed: int) -> Sequence[int]:
    """`count` of the steps from 1 to `total`, evenly and moved by the seed; all if there are no more."""
    if count >= total:
        return range(1, total + 1)
    return [1 + (place * total // count + seed) % total for place in range(count)]


def _keeper_step(nursery: Nursery, path: Path, step: int, slots: int) -> int:
    """One run; returns whether the step came in time, or how many steps there were if none was fatal."""
    count_path = path.with_suffix(".count")
    with ExitStack() as stack:
        keeper = stack.enter_context(
            first_keeper(nursery, path, kill_at=step, count_path=str(count_path), linger_s=0.2)
        )
        crew = stack.enter_context(_crew(nursery, path, slots))
        assert crew.last_keeper == keeper.pid
        next_keeper = stack.enter_context(nursery.keeper(path)) if step else keeper
        crew.publish(PRELUDE_SEED, PRELUDE)
        for other in crew.engines[1:]:
            assert other("lease", "dram", PRELUDE_SEED, 0, PRELUDE) == PRELUDE
        keeper.signal(signal.SIGUSR1)
        scripted, *others = crew.engines
        scripted.start("script", SCRIPT_SEED)
        for other in others:
            other.start("look", PRELUDE_SEED, PRELUDE, LIFE_S)
        scripted.answer()
        answers = [other.answer() for other in others]
        assert all(answers), "nobody was reading"
        if not step:
            keeper.signal(signal.SIGUSR2)
        came = step > 0 and keeper.wait(COME_S)
        if came:
            crew.join(keeper.pid)
        assert [other("leased", "dram") for other in others] == [PRELUDE] * 2
        for tier in BOTH if slots == ROOMY else ():
            assert others[0]("known", tier, SCRIPT_SEED, 1, SCRIPT_BLOCKS - 1, 60) == SCRIPT_BLOCKS - 1
            assert others[0]("hits", tier, SCRIPT_SEED, 1, SCRIPT_BLOCKS - 1) == SCRIPT_BLOCKS - 1
        _judge(crew, slots)
        if came:
            if crew.last_keeper != next_keeper.pid:
                next_keeper.drop()  # an engine was faster and has started one
            crew.settle()
        crew.close()
        assert step or keeper.wait(60)
    return int(came) if step else int(count_path.read_text())


def _engine_step(nursery: Nursery, path: Path, step: int, slots: int) -> tuple[int, float]:
    """One run; returns whether the step came, or how many there were, and how long the others stood still at most."""
    with first_keeper(nursery, path, linger_s=0.2), _crew(nursery, path, slots) as crew:
        crew.publish(PRELUDE_SEED, PRELUDE)
        scripted = crew.new(kill_at=step)
        assert scripted("open", 60, 2) == list(BOTH)
        scripted.start("script", SCRIPT_SEED)
        crew.start_lives(LIFE_SEED, 1000 if slots == TIGHT else LIFE_BLOCKS_MAX, LIFE_S)
        came = scripted.died() if step else scripted.answer()
        scripted.close()
        lives = crew.end_lives(LIFE_SEED)
        assert all(life["read"] and life["attended"] for life in lives), lives
        pause_s = max(max(float(life["read_gap_s"]), float(life["call_s"])) for life in lives)
        _judge(crew, slots)
        crew.settle()
    return int(came), pause_s


def _crew(nursery: Nursery, path: Path, slots: int) -> Crew:
    return Crew(path, 3, nursery, dram_slots=slots, nvme_bytes=slots * (SLOT_BYTES + 1024) + 64_000)


def _judge(crew: Crew, slots: int) -> None:
    """Every row right; with room for all, every published one there."""
    crew.engines[0]("settled", "dram", 0.3)  # the keeper has seen its first engine, so that the linger counts
    for tier in BOTH:
        for engine in crew.engines:
            hits, asked = crew.hits(engine, tier)
            assert hits == asked or slots == TIGHT, f"{tier}: {hits} of {asked} blocks are left"
    crew.check()
