"""Who else may come while engines write, read by copy and attend in place: a crowd, forks, other layouts and versions.

The rest of the protocol's list, as in scenarios.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from kvtier.keeper.fields import OWNERS_MAX
from kvtier.keeper.wire import PROTOCOL_VERSION
from tests.nursery import Nursery
from tests.rows import LAYOUT
from tests.soak.crew import BOTH, OPEN_S, first_keeper, refused
from tests.soak.scenarios import LIFE_SEED, MANY, PRELUDE, PRELUDE_SEED, ROOMY, crew_of, judge_lives, totals
from tests.soak.words import Numbers

COMPANY_S = 2.0
ALL_ROOM = 16 * ROOMY
"""Slots for all that lives write in all turns beside the stocks of 64 engines, so that nothing is evicted."""


def crowd(count: int, seed: int, scratch: Path) -> Numbers:
    """64 engines are served and find each other's blocks, the 65th is refused and says why; nobody is held up."""
    lives = []
    with crew_of(scratch / "cache", 2, ALL_ROOM) as crew:
        crew.publish(PRELUDE_SEED, PRELUDE)
        for turn in range(count):
            crew.start_lives(LIFE_SEED + seed + 10 * turn, MANY, COMPANY_S)
            with contextlib.ExitStack() as company:
                more = [company.enter_context(crew.new()) for _ in range(OWNERS_MAX - 2)]
                for engine in more:
                    engine.start("open", OPEN_S, 2)
                assert [engine.answer() for engine in more] == [list(BOTH)] * len(more)
                last = company.enter_context(crew.new())
                refused(last, f"{OWNERS_MAX} engines")
                lives += crew.end_lives(LIFE_SEED + seed + 10 * turn)
                for tier in BOTH:
                    assert more[-1]("known", tier, PRELUDE_SEED, 0, PRELUDE, 60) == PRELUDE
                    assert more[-1]("hits", tier, PRELUDE_SEED, 0, PRELUDE) == PRELUDE, more[-1]("stats", tier)
        crew.check()
        crew.settle()
    judge_lives(lives)
    return {"crowds": count, **totals(lives)}


def forked(count: int, seed: int, scratch: Path) -> Numbers:
    """An engine with reservations and reads forks and is killed: its child holds nothing, its slots are free again."""
    lives = []
    with crew_of(scratch / "cache", 3, ALL_ROOM) as crew:
        crew.publish(PRELUDE_SEED, PRELUDE)
        for turn in range(count):
            victim = crew.engines[0]
            crew.start_lives(LIFE_SEED + seed + 10 * turn, MANY, COMPANY_S / 2, but=victim)
            assert victim("reserve", "dram", 4) == 4
            child = victim("fork")
            try:
                assert "kvtier-dram" not in Path(f"/proc/{child}/maps").read_text(), "it would keep the memory"
                victim.kill()
                lives += crew.end_lives(LIFE_SEED + seed + 10 * turn, but=victim)
                crew.add(0)
                for tier in BOTH:
                    assert crew.engines[0]("known", tier, PRELUDE_SEED, 0, PRELUDE, 60) == PRELUDE
                    assert crew.engines[0]("hits", tier, PRELUDE_SEED, 0, PRELUDE) == PRELUDE
            finally:
                os.kill(child, signal.SIGKILL)
        crew.check()
        crew.settle()
    judge_lives(lives)
    return {"forks": count, **totals(lives)}


def two_layouts(count: int, seed: int, scratch: Path) -> Numbers:
    """A layout that was there before gets its part of NVMe, a new one nothing, with the reason; the first goes on.

    What a journal has yet to grow into is nobody else's: the files of all never pass the total.
    """
    lives = []
    before, new = {"layers": LAYOUT.layers + 1}, {"layers": LAYOUT.layers + 2}
    with crew_of(scratch / "cache", 1, ROOMY, **before):
        pass
    with crew_of(scratch / "cache", 2, 6 * ROOMY) as crew:
        crew.publish(PRELUDE_SEED, PRELUDE)
        most_bytes = 0
        for turn in range(count):
            crew.start_lives(LIFE_SEED + seed + 10 * turn, MANY, COMPANY_S)
            with crew.new(**before) as other, crew.new(**new) as another:
                assert other("open", OPEN_S, 1) == ["nvme"] and "tiers.dram.bytes" in other("refusal")
                assert other("reserve", "nvme", 4) == 4
                assert another("open", OPEN_S) == [] and "tiers.nvme.bytes" in another("refusal")
                most_bytes = max(most_bytes, _file_bytes(crew.path))
                lives += crew.end_lives(LIFE_SEED + seed + 10 * turn)
                most_bytes = max(most_bytes, _file_bytes(crew.path))
            assert most_bytes <= crew.nvme_bytes, f"{most_bytes} bytes in files, {crew.nvme_bytes} are allowed"
        for tier in BOTH:
            hits, asked = crew.hits(crew.engines[1], tier)
            assert hits == asked, f"{hits} of {asked} published blocks are left"
        crew.check()
    judge_lives(lives)
    return {"visits": count, "nvme_share": most_bytes / crew.nvme_bytes, **totals(lives)}


def versions(count: int, seed: int, scratch: Path) -> Numbers:
    """Older keeper and newer engine, and the other way round: refused with the reason, nobody else is disturbed."""
    lives: list[dict[str, Any]] = []
    with Nursery() as nursery:
        for turn in range(count):
            path = scratch / f"cache{turn}"
            theirs, ours = PROTOCOL_VERSION + 1, PROTOCOL_VERSION
            if (turn + seed) % 2:
                theirs, ours = ours, theirs
            with first_keeper(nursery, path, protocol=ours) as keeper:
                with crew_of(path, 2, ROOMY, nursery=nursery, protocol=ours) as crew:
                    crew.publish(PRELUDE_SEED, PRELUDE)
                    crew.start_lives(LIFE_SEED, 20, 0.6)
                    stranger = crew.new(protocol=theirs)
                    refused(stranger, f"protocol {theirs}, the keeper speaks {ours}")
                    lives += crew.end_lives(LIFE_SEED)
                    assert keeper.is_alive and crew.keeper == keeper.pid, "a refused engine kills no keeper"
                    stranger.close()
                    crew.check()
                    crew.settle()
                assert keeper.wait(60)
    judge_lives(lives)
    return {"refusals": count, **totals(lives)}


def _file_bytes(path: Path) -> int:
    """Of all files in the folders of a cache directory."""
    sizes = []
    for file in path.rglob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # journals are renamed
            sizes.append(file.stat().st_size)
    return sum(sizes)
