"""Engines that share one cache directory, and the keeper that they have found: started, killed, replaced, looked after.

Keeps book of every block that an engine was told is published, so that anybody can be asked for all of them. Used by
the soak scenarios, in the process that drives them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.eviction.reuse import ExpectedReuse
from kvtier.keeper.server import SOCKET_NAME
from tests.nursery import Nursery, Worker
from tests.own_time import starved_s
from tests.rows import block_hashes, wait_for_journal
from tests.soak import footprint
from tests.soak.footprint import Footprint

BOTH = ("dram", "nvme")
OPEN_S, REFUSED_S = 60.0, 0.4
FILES = {"keeper.lock", "keeper.sock", "keeper.log", "owners.lock", "journal", "nvme.slab"}


class Crew:
    """See the module. A context manager: in the end all engines are closed and the keeper has left."""

    def __init__(
        self,
        path: Path,
        count: int,
        nursery: Nursery | None = None,
        clock: Callable[[], float] = time.monotonic,
        **setting: Any,
    ) -> None:
        """`setting`: as in `shelf_engine.Setting`. The engines are opened; a `nursery` that is given stays open.

        `clock`: in seconds, how long openings take.
        """
        self.path = path
        self._own_nursery = nursery is None
        self.nursery = nursery if nursery is not None else Nursery()
        self._setting = {"linger_s": 1.0, "policy": ExpectedReuse.name} | setting
        self.published: dict[str, list[tuple[int, int]]] = {tier: [] for tier in BOTH}
        """(seed, count) of chains whose first blocks are published."""
        self.engines: list[Worker] = []
        self._clock = clock
        self.opened_s: list[float] = []
        """How long each opening took, not counting what the engine waited for a CPU."""
        self.last_keeper = 0
        """The keeper when all had joined one."""
        try:
            for _ in range(count):
                self.add()
            if count:
                self.join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if error[0] is None:
            wait_gone(self.last_keeper)

    def close(self) -> None:
        """End all engines."""
        for engine in self.engines:
            engine.close()
        if self._own_nursery:
            self.nursery.close()

    @property
    def nvme_bytes(self) -> int:
        """Budget of the directory's NVMe files."""
        return int(self._setting["nvme_bytes"])

    @property
    def keeper(self) -> int:
        """Process of the keeper that the first engine knows."""
        return int(self.engines[0]("keeper"))

    def new(self, **more: Any) -> Worker:
        """An engine that is not opened yet, and not of the crew."""
        return self.nursery.engine(self.path, **(self._setting | more))

    def add(self, place: int | None = None, **more: Any) -> Worker:
        """Start and open an engine, in the place of one that was killed if asked; `more`: settings of its own."""
        engine = self.new(**more)
        if place is None:
            self.engines.append(engine)
        else:
            self.engines[place] = engine
        begun = self._clock()
        tiers = engine("open", OPEN_S, 2)
        assert tiers == list(BOTH), (tiers, engine("refusal"))
        self.opened_s.append(self._clock() - begun - starved_s(engine.pid))
        return engine

    def known(self, newest: int = 50) -> list[tuple[str, int, int]]:
        """(tier, seed, count) of the newest chains, as `live` wants them."""
        return [(tier, *chain) for tier, chains in self.published.items() for chain in chains[-newest:]]

    def note(self, seed: int, lived: dict[str, Any]) -> None:
        """Take down what a life has published."""
        for tier, count in lived["written"].items():
            if count:
                self.published[tier].append((seed, count))

    def forget(self, tier: str) -> None:
        """The tier's blocks may be gone."""
        self.published[tier].clear()

    def publish(self, seed: int, count: int) -> None:
        """Have the first engine publish so many blocks a tier, known to all."""
        for tier in BOTH:
            self.engines[0]("write", tier, seed, 0, count, 30)
            self.published[tier].append((seed, count))
            for engine in self.engines:
                assert engine("known", tier, seed, 0, count, 60) == count

    def start_lives(self, seed: int, blocks_max: int, wait_s: float, but: Worker | None = None) -> None:
        """Let all engines but one live for a while."""
        for place, engine in enumerate(self.engines):
            if engine is not but:
                engine.start("live", seed + place, blocks_max, wait_s, self.known())

    def end_lives(self, seed: int, but: Worker | None = None) -> list[dict[str, Any]]:
        """How they were, by place; what they have published is taken down."""
        lives = []
        for place, engine in enumerate(self.engines):
            if engine is not but:
                lives.append(engine.answer())
                self.note(seed + place, lives[-1])
        return lives

    def hits(self, engine: Worker, tier: str) -> tuple[int, int]:
        """(hits, published) over all that was taken down, every byte judged."""
        chains = self.published[tier]
        found = sum(engine("hits", tier, seed, 0, count) for seed, count in chains)
        return found, sum(count for _, count in chains)

    def join(self, but_keeper: int = 0) -> None:
        """Wait until every engine has a line to a keeper, another than that process."""
        for engine in self.engines:
            engine.start("joined", OPEN_S, but_keeper)
        answers = [engine.answer() for engine in self.engines]
        assert all(answers), "an engine has found no keeper"
        self.last_keeper = self.keeper

    def wait_for_journal(self) -> None:
        """Until the journal has all that was published on NVMe, so that it outlives everybody."""
        for seed, count in self.published["nvme"]:
            wait_for_journal(self.path, block_hashes(count, seed))

    def check(self) -> None:
        """Assert every engine's books, and that nobody has met a bad row."""
        for engine in self.engines:
            engine("check")
            for tier in BOTH:
                assert engine("stats", tier)["bad_row"] == 0

    def footprint(self) -> Footprint:
        """What the directory takes now."""
        return footprint.take(self.path)

    def settle(self) -> Footprint:
        """Wait until there are just the engines, one keeper, its files and memory; AssertionError for what is left."""
        end = time.monotonic() + 60
        while True:
            now = self.footprint()
            expected = {engine.pid for engine in self.engines} | {self.keeper}
            names = {os.path.basename(name) for name in now.names}
            if now.processes == expected and names == FILES and now.memory_count == 3:
                return now
            assert time.monotonic() < end, f"{now}, expected {expected}"
            time.sleep(0.05)


def first_keeper(nursery: Nursery, path: Path, **setting: Any) -> Worker:
    """A keeper of the nursery's that every engine finds from now on; `setting` as in `KeeperSetting`."""
    keeper = nursery.keeper(path, **setting)
    end = time.monotonic() + 60
    while not (path / SOCKET_NAME).exists():
        assert time.monotonic() < end and keeper.is_alive, "no keeper"
        time.sleep(0.002)
    return keeper


def refused(engine: Worker, words: str) -> None:
    """Wait until the keeper has refused an engine with these words; it must never be let in."""
    end = time.monotonic() + 60
    while True:
        assert engine("open", REFUSED_S) == [], "it was let in"
        if words in (refusal := engine("refusal")):
            return
        assert time.monotonic() < end, refusal


def kill(process: int) -> None:
    """SIGKILL a keeper; it may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def wait_gone(process: int, timeout_s: float = 60.0) -> None:
    """Until a process that is not our child is gone."""
    end = time.monotonic() + timeout_s
    while os.path.exists(f"/proc/{process}"):
        assert time.monotonic() < end, "a process does not end"
        time.sleep(0.01)
