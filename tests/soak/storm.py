"""SIGKILL of engines and their keeper at random times, while they write, read by copy and attend in place.

Asserts what must hold after each: no wrong byte, hardly a lost block, a quick return, nothing left behind.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.own_time import OwnTime, own_time, starved_s
from tests.rows import SLOT_BYTES
from tests.soak import footprint
from tests.soak.crew import BOTH, Crew, kill

ENGINES = 3
BLOCKS_MAX = 2
"""What an engine publishes in a cycle and tier."""
LIFE_S = 0.08
LOOK_EVERY = 50
"""Cycles between two looks at everything."""
HIT_SHARE = 0.95
REOPEN_S = 2.0
ONE, KEEPER, BOTH_OF_THEM, EVERYBODY = "engine", "keeper", "engine and keeper", "everybody"
CHANCES = {ONE: 70, KEEPER: 16, BOTH_OF_THEM: 10, EVERYBODY: 4}


@dataclass
class _Tally:
    """What has come of the cycles so far."""

    clock: OwnTime
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHANCES, 0))
    keeper_back_s: list[float] = field(default_factory=list)
    """Until all had joined the next one, by the clock, not counting what it and the engines waited for a CPU."""
    worst_share: float = 1.0
    hits: int = 0
    asked: int = 0
    read: int = 0
    attended: int = 0
    into_asked: int = 0
    looks: list[tuple[int, ...]] = field(default_factory=list)


def kill_storm(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """SIGKILL of engines and keeper at random times: no wrong row, 95 % of blocks still hit, back in 2 s, no leak."""
    chance = random.Random(seed)
    slots = 256 + (BLOCKS_MAX + 1) * ENGINES * count
    with contextlib.ExitStack() as stack:
        tally = _Tally(stack.enter_context(own_time()))
        setting = {"dram_slots": slots, "nvme_bytes": slots * (SLOT_BYTES + 1024)}
        crew = stack.enter_context(Crew(scratch / "cache", ENGINES, clock=lambda: tally.clock.seconds, **setting))
        first = crew.settle()
        for cycle in range(count):
            _cycle(crew, tally, chance, 1 + cycle * ENGINES)
            if (cycle + 1) % LOOK_EVERY == 0 or cycle + 1 == count:
                _look(crew, tally, first.dram_bytes)
        crew.check()
        opened_s = crew.opened_s
    assert tally.read > count and tally.attended > count, "hardly anybody was reading"
    assert tally.into_asked > 0, "nobody wrote into rows that were asked for"
    assert max(tally.keeper_back_s, default=0.0) < REOPEN_S, tally.keeper_back_s
    assert max(opened_s) < REOPEN_S, opened_s
    return {
        "cycles": count,
        "kills": tally.kills,
        "blocks_asked": tally.asked,
        "hits": tally.hits,
        "worst_hit_share": round(tally.worst_share, 4),
        "rows_read": tally.read,
        "rows_attended": tally.attended,
        "rows_into_asked": tally.into_asked,
        "engine_open_s": _spread(opened_s),
        "keeper_back_s": _spread(tally.keeper_back_s),
    }


def _cycle(crew: Crew, tally: _Tally, chance: random.Random, seed: int) -> None:
    """All live, somebody dies, who was left over tells, who died comes back."""
    crew.start_lives(seed, BLOCKS_MAX, LIFE_S)
    keeper = 0
    (what,) = chance.choices(list(CHANCES), list(CHANCES.values()))
    tally.kills[what] += 1
    victims = {ONE: 1, BOTH_OF_THEM: 1, EVERYBODY: ENGINES}.get(what, 0)
    places = chance.sample(range(ENGINES), victims)
    time.sleep(chance.random() * LIFE_S * 1.2)
    if what != ONE:
        keeper = crew.last_keeper
        kill(keeper)
    killed_at, starved = tally.clock.seconds, {engine.pid: starved_s(engine.pid) for engine in crew.engines}
    for place in places:
        crew.engines[place].strike()
    for place, engine in enumerate(crew.engines):
        if place in places:
            engine.kill()
        else:
            lived = engine.answer()
            crew.note(seed + place, lived)
            tally.read += lived["read"]
            tally.attended += lived["attended"]
            tally.into_asked += lived["into_asked"]
    if what == EVERYBODY:
        crew.forget("dram")
    for place in places:
        crew.add(place)
    crew.join(keeper)
    if keeper:
        back_s = tally.clock.seconds - killed_at - starved_s(crew.last_keeper)
        tally.keeper_back_s.append(back_s - sum(starved_s(e.pid) - starved.get(e.pid, 0.0) for e in crew.engines))


def _look(crew: Crew, tally: _Tally, dram_bytes: int) -> None:
    """Everything that was published, from another engine's side each time; and what the host holds for us."""
    for tier in BOTH:
        hits, asked = crew.hits(crew.engines[len(tally.looks) % ENGINES], tier)
        assert hits >= HIT_SHARE * asked, f"{tier}: {hits} of {asked} published blocks are left"
        tally.hits, tally.asked = tally.hits + hits, tally.asked + asked
        tally.worst_share = min(tally.worst_share, hits / asked if asked else 1.0)
    now = crew.settle()
    assert now.dram_bytes == dram_bytes, (now, dram_bytes)
    counts = sorted(engine("descriptors") for engine in crew.engines)
    tally.looks.append((footprint.descriptor_count(crew.keeper), *counts))
    assert tally.looks[-1] == tally.looks[0], f"descriptors or threads leak: {tally.looks}"


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "worst": round(ordered[-1], 3),
    }
