"""What may happen to engines and keeper on one directory, in the order of the protocol's list: never a wrong row.

Each runs beside engines that write, read by copy and attend in place all the while. What needs a file system or a
namespace of its own is in host_scenarios.py; kills at random and at every step are in storm.py and its neighbours.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from kvtier.cache_directory import layout_name
from tests.nursery import Nursery
from tests.rows import LAYOUT, SLOT_BYTES
from tests.soak.crew import BOTH, OPEN_S, Crew, kill, wait_gone
from tests.soak.words import Numbers
from tests.stopped import stopped

PRELUDE = 6
PRELUDE_SEED, HELD_SEED, LIFE_SEED, AFTER_SEED = 1, 2, 1000, 500
MANY = 1 << 12
"""Blocks: more than anybody writes in a life here."""
CALL_MAX_S = 1.0
"""No call of a shelf takes longer, whatever the keeper does; milliseconds, but for a machine that is busy."""
LIFE_S = 1.0
TIGHT, ROOMY = 24, 1600
"""Slots a tier."""


def crew_of(path: Path, count: int, slots: int, **more: Any) -> Crew:
    """A crew with so many slots in either tier."""
    return Crew(path, count, **({"dram_slots": slots, "nvme_bytes": slots * (SLOT_BYTES + 1024) + 64_000} | more))


def judge_lives(lives: list[dict[str, Any]], published: bool = True) -> None:
    """Nobody was held up, everybody was reading, and writing if that was possible."""
    for life in lives:
        assert life["read"] and life["attended"], f"hardly anybody was reading: {life}"
        assert life["published"] or not published, life
        assert life["call_s"] < CALL_MAX_S, f"a call of a shelf has taken {life['call_s']:.1f} s"


def totals(lives: list[dict[str, Any]]) -> dict[str, object]:
    """Sums and the longest call, for a report."""
    sums: dict[str, object] = {
        f"rows_{what}": sum(life[what] for life in lives) for what in ("published", "read", "attended")
    }
    return sums | {"longest_call_s": max(life["call_s"] for life in lives)}


def keeper_killed(count: int, seed: int, scratch: Path) -> Numbers:
    """Keeper killed while A writes a reserved DRAM row and B attends another: both stay, A's is published after."""
    lives: list[dict[str, Any]] = []
    with crew_of(scratch / "cache", 2, TIGHT) as crew:
        b, c = crew.engines
        for turn in range(count):
            a = crew.add(None if turn == 0 else 2, faulty=True)
            block_seed = HELD_SEED + turn
            c("write", "dram", block_seed, 0, 3, 30)
            assert b("known", "dram", block_seed, 0, 3, 60) == 3 and b("lease", "dram", block_seed, 0, 3) == 3
            a("hang", "write")
            assert a("begin", "dram", block_seed, 3, 1) == 1
            keeper = crew.keeper
            c.start("live", LIFE_SEED + seed % 1000 + turn, MANY, LIFE_S, [["dram", block_seed, 3]])
            b.start("look", block_seed, 3, LIFE_S)
            a.start("live", 0, 0, LIFE_S, [])  # nothing of its own, but it listens
            time.sleep(0.4 * LIFE_S)
            kill(keeper)
            lives.append(c.answer())
            assert b.answer(), "B was not reading"
            a.answer()
            a("hang", "")
            crew.join(keeper)
            assert a("known", "dram", block_seed, 3, 1, 60) == 1 and a("hits", "dram", block_seed, 3, 1) == 1
            b.start("look", block_seed, 3, 2 * LIFE_S)
            churned = 0
            while churned < 2 * TIGHT:
                lives.append(
                    c("live", LIFE_SEED + MANY + 100 * turn + len(lives), MANY, 0.3, [["dram", block_seed, 3]])
                )
                churned += lives[-1]["written"]["dram"]
            assert b.answer() and b("leased", "dram") == 3
            b("release", "dram")
            crew.check()
            a.close()  # its calls hang once only
        crew.engines.pop()
        crew.settle()
    judge_lives(lives[:1])
    return {"kills": count, **totals(lives)}


def keeper_stopped(count: int, seed: int, scratch: Path) -> Numbers:
    """Keeper stopped for COUNT seconds and continued: no call waits, reads go on, then its backlog is worked off."""
    with crew_of(scratch / "cache", 3, ROOMY) as crew:
        crew.publish(PRELUDE_SEED, PRELUDE)
        keeper = crew.keeper
        crew.start_lives(LIFE_SEED + seed, MANY, count + 0.5)
        time.sleep(0.5)
        with stopped(keeper):
            time.sleep(count)
            lives = crew.end_lives(LIFE_SEED + seed)
        begun = time.monotonic()
        for place, engine in enumerate(crew.engines):
            for tier in BOTH:
                engine("write", tier, AFTER_SEED + place, 0, 4, 30)
        crew.join()
        back_s = time.monotonic() - begun
        for place in range(3):
            for tier in BOTH:
                assert crew.engines[place - 1]("known", tier, AFTER_SEED + place, 0, 4, 60) == 4
                assert crew.engines[place - 1]("hits", tier, AFTER_SEED + place, 0, 4) == 4
        for tier in BOTH:
            hits, asked = crew.hits(crew.engines[0], tier)
            assert hits == asked, f"{hits} of {asked} published blocks are left"
        assert crew.keeper == keeper, "it was replaced"
        crew.check()
        crew.settle()
    judge_lives(lives)
    gap_s = max(life["read_gap_s"] for life in lives)
    assert gap_s < 2.0, f"nothing was read for {gap_s:.1f} s"
    return {"stopped_s": count, "longest_pause_of_reads_s": gap_s, "written_again_after_s": back_s, **totals(lives)}


def orphan_reads(count: int, seed: int, scratch: Path) -> Numbers:
    """Engine killed with reads in flight into DRAM rows: the rows' next owners never see a byte of them."""
    chance = random.Random(seed)
    lives: list[dict[str, Any]] = []
    with crew_of(scratch / "cache", 3, ROOMY + 80 * count, dram_slots=TIGHT) as crew:
        crew.engines[0]("write", "nvme", PRELUDE_SEED, 0, PRELUDE, 30)
        for turn in range(count):
            victim = crew.engines[0]
            victim("known", "nvme", PRELUDE_SEED, 0, PRELUDE, 60)
            crew.start_lives(LIFE_SEED + 10 * turn, 40, 0.4, but=victim)
            victim.start("promote", PRELUDE_SEED, PRELUDE, 10.0)
            time.sleep(0.05 + 0.2 * chance.random())
            victim.kill()
            lives += crew.end_lives(LIFE_SEED + 10 * turn, but=victim)
            crew.add(0)
        crew.check()
        crew.settle()
    assert sum(life["attended"] for life in lives) > 0 and all(life["published"] for life in lives)
    return {"kills": count, **totals(lives)}


def first_engines(count: int, seed: int, scratch: Path) -> Numbers:
    """Three first engines at once: one keeper, one set of shelves, in which all read what each writes."""
    lives: list[dict[str, Any]] = []
    with Nursery() as nursery:
        for turn in range(count):
            path = scratch / f"cache{turn}"
            engines = [nursery.engine(path, linger_s=0.1) for _ in range(3)]
            for engine in engines:
                engine.start("open", OPEN_S, 2)
            assert [engine.answer() for engine in engines] == [list(BOTH)] * 3
            keepers = {engine("keeper") for engine in engines}
            assert len(keepers) == 1 and len({engine("owner") for engine in engines}) == 3
            for tier in BOTH:
                assert engines[turn % 3]("write", tier, seed, 0, 4, 60) == 4
                assert engines[turn % 3 - 1]("known", tier, seed, 0, 4, 60) == 4
                assert engines[turn % 3 - 1]("hits", tier, seed, 0, 4) == 4
            known = [[tier, seed, 4] for tier in BOTH]
            for place, engine in enumerate(engines):
                engine.start("live", LIFE_SEED + place, 8, LIFE_S, known)
            met = [engine.answer() for engine in engines]
            for what in ("read", "attended", "published"):
                assert sum(life[what] for life in met), f"nobody has {what} anything"
            lives += met
            for engine in engines:
                engine("check")
                engine.close()
            kill(*keepers)
            wait_gone(*keepers)
    assert max(life["call_s"] for life in lives) < CALL_MAX_S, "a call of a shelf was held up"
    return {"starts": count, **totals(lives)}


def reload(count: int, seed: int, scratch: Path) -> Numbers:
    """Reload with the old engine alive: the new one is warm at once, and stays so when the old one ends."""
    lives: list[dict[str, Any]] = []
    with crew_of(scratch / "cache", 1, ROOMY) as crew:
        crew.publish(PRELUDE_SEED, PRELUDE)
        for turn in range(count):
            old = crew.engines[0]
            old.start("live", LIFE_SEED + turn, 4, 0.4, crew.known())
            new = crew.add(0)
            assert all(new("hits", tier, PRELUDE_SEED, 0, PRELUDE) == PRELUDE for tier in BOTH), "not warm"
            lives.append(old.answer())
            crew.note(LIFE_SEED + turn, lives[-1])
            if (turn + seed) % 2:
                old.kill()
            else:
                old.close()
            for tier in BOTH:
                hits, asked = crew.hits(new, tier)
                assert hits == asked, f"{tier}: {hits} of {asked}"
        crew.check()
        crew.settle()
    judge_lives(lives)
    return {"reloads": count, **totals(lives)}


def removed(count: int, seed: int, scratch: Path) -> Numbers:
    """Cache directory removed underneath: no error, what is attended stays, then all meet again in a new one."""
    lives: list[dict[str, Any]] = []
    with crew_of(scratch / "cache", 2, ROOMY) as crew:
        for turn in range(count):
            crew.publish(PRELUDE_SEED + turn, PRELUDE)
            keeper = crew.keeper
            crew.start_lives(LIFE_SEED + seed % 1000 + 10 * turn, MANY, 1.5)
            time.sleep(0.4)
            shutil.rmtree(scratch / "cache")
            lives += crew.end_lives(0)
            for tier in BOTH:
                crew.forget(tier)
            for engine in crew.engines:
                engine.start("reopen", OPEN_S)
            assert [engine.answer() for engine in crew.engines] == [list(BOTH)] * 2
            crew.join(keeper)
            wait_gone(keeper)
            crew.settle()
        crew.publish(AFTER_SEED, PRELUDE)
        crew.check()
    judge_lives(lives)
    return {"removals": count, **totals(lives)}


def journal_lost(count: int, seed: int, scratch: Path) -> Numbers:
    """Journal truncated, corrupted or deleted, under a running keeper or before the next: all is found from headers."""
    chance = random.Random(seed)
    lives: list[dict[str, Any]] = []
    with crew_of(scratch / "cache", 2, ROOMY, linger_s=0.2) as crew:
        journal = scratch / "cache" / layout_name(LAYOUT) / "journal"
        crew.publish(PRELUDE_SEED, PRELUDE)
        for turn in range(count):
            everybody, cut = turn % 2 == 1, False
            keeper = crew.keeper
            crew.start_lives(LIFE_SEED + 10 * turn, 4, 0.3)
            if not everybody:
                _damage(journal, chance)
                time.sleep(0.05)
                kill(keeper)
            lives += crew.end_lives(LIFE_SEED + 10 * turn)
            if everybody:
                crew.wait_for_journal()
                kill(keeper)
                for engine in crew.engines:
                    engine.kill()
                wait_gone(keeper)
                cut = _damage(journal, chance)
                crew.forget("dram")
                crew.add(0), crew.add(1)
            crew.join(keeper)
            for tier in BOTH:
                hits, asked = crew.hits(crew.engines[turn % 2], tier)
                assert hits == asked or cut, (
                    f"{tier}: {hits} of {asked} published blocks are left, everybody killed: {everybody}"
                )
            if cut:
                crew.forget("nvme")  # what came after the cut is rightly lost, and is not asked for again
            if everybody:
                crew.publish(AFTER_SEED + turn, PRELUDE)
        crew.check()
        crew.settle()
    return {"damages": count, **totals(lives)}


def _damage(journal: Path, chance: random.Random) -> bool:
    """Cut it, flip a bit of its head, or take it away; whether it was cut, which costs what comes after."""
    what = chance.randrange(3)
    if what == 0:
        journal.unlink()
    elif what == 1:
        os.truncate(journal, chance.randrange(max(1, journal.stat().st_size)))
    else:
        with open(journal, "r+b") as file:
            data = bytearray(file.read(64))
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.seek(0)
            file.write(data)
    return what == 1
