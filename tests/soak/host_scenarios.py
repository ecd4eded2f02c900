"""Scenarios that need a piece of the host for themselves: a file system that can be frozen or filled, PID namespaces.

Leaves neither mount nor loop device behind. Needs root; where it is refused the reason is given and nothing is run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.nursery import Nursery
from tests.rows import SLOT_BYTES, block_hashes, wait_for_journal
from tests.soak.crew import BOTH, OPEN_S, Crew, kill
from tests.soak.scenarios import AFTER_SEED, LIFE_SEED, PRELUDE, PRELUDE_SEED, judge_lives, totals
from tests.soak.words import Numbers

DISK_BYTES = 64 << 20
SLOTS = 32
IN_FLIGHT = 2
NAMESPACES = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
FREEZE_S = 1.0
NOTICED_S = 30.0
"""Space that others have freed is used within that."""


def disk_reason() -> str:
    """Why no file system of its own can be made here; "" if one can."""
    if os.geteuid() != 0:
        return "only root may mount a file system"
    for program in ("mkfs.ext4", "losetup", "mount", "fsfreeze"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    free = subprocess.run(["losetup", "-f"], capture_output=True)
    return "" if free.returncode == 0 else "there is no loop device"


def namespace_reason() -> str:
    """Why no PID namespace can be made here; "" if one can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"a PID namespace is refused: {tried.stderr.strip()}"


def orphan_writes(count: int, seed: int, scratch: Path) -> Numbers:
    """Engine killed with writes in flight on a frozen device: its slots go to nobody before they have landed."""
    lives: list[dict[str, Any]] = []
    held = 0
    with _disk(scratch) as disk:
        for turn in range(count):
            with _crew(disk / f"cache{turn}", 3) as crew:
                victim, other, _ = crew.engines
                crew.publish(PRELUDE_SEED, PRELUDE)
                total = victim("stats", "nvme")["slots_total"]
                crew.start_lives(LIFE_SEED, 0, 2 * FREEZE_S, but=victim)
                with _frozen(disk):
                    victim.start("begin", "nvme", LIFE_SEED + seed, 0, IN_FLIGHT)
                    assert victim.answer() == IN_FLIGHT
                    time.sleep(FREEZE_S)  # the writes are in the kernel
                    victim.strike()
                    lives += crew.end_lives(LIFE_SEED, but=victim)
                    free = other("reserve", "nvme", total, 3)
                    used = [other("settled", "nvme", 0.5)]
                    while len(used) < 3 or len(set(used[-3:])) > 1:
                        used.append(other("settled", "nvme", 0.5))
                    kept = used[-1] - free
                    assert not victim.wait(0), "nothing was in flight"
                    assert kept >= IN_FLIGHT and free < total - IN_FLIGHT, "slots of writes in flight were given away"
                victim.kill()
                gained = other("reserve", "nvme", IN_FLIGHT)
                assert gained == IN_FLIGHT, "its slots never came back"
                held += kept
                crew.engines[0] = crew.new()
                assert crew.engines[0]("open", OPEN_S, 2) == list(BOTH)
                other.kill()  # what it has reserved is free again
                crew.engines[1] = crew.new()
                assert crew.engines[1]("open", OPEN_S, 2) == list(BOTH)
                for engine in crew.engines[:2]:
                    engine("write", "nvme", AFTER_SEED + engine("owner"), 0, 4, 30)
                for engine in crew.engines:
                    for block_seed in [PRELUDE_SEED, LIFE_SEED + seed, *(AFTER_SEED + owner for owner in range(5))]:
                        engine("hits", "nvme", block_seed, 0, SLOTS // 2)
                crew.join()
                crew.check()
                crew.settle()
    judge_lives(lives, published=False)
    return {"freezes": count, "slots_kept_back": held, **totals(lives)}


def disk_full(count: int, seed: int, scratch: Path) -> Numbers:
    """Disk full before the slab is made, and after: DRAM serves, NVMe once and as far as it has room, nobody errs."""
    lives: list[dict[str, Any]] = []
    noticed_s = 0.0
    with _disk(scratch) as disk:
        for turn in range(count):
            filler = disk / "filler"
            _fill(filler, disk)
            with Nursery() as nursery:
                engine = nursery.engine(disk / f"refused{turn}", linger_s=0.1)
                assert engine("open", OPEN_S, 1) == ["dram"], "there was no room for a slab"
                assert "tiers.nvme.bytes: the slab needs" in engine("refusal")
                assert engine("write", "dram", seed, 0, 5, 60) == 5 and engine("hits", "dram", seed, 0, 5) == 5
                filler.unlink()
                begun = time.monotonic()
                assert engine("anew", NOTICED_S, 2) == list(BOTH), "freed space is not noticed"
                noticed_s = max(noticed_s, time.monotonic() - begun)
                assert engine("write", "nvme", seed, 0, 5, 60) == 5 and engine("hits", "nvme", seed, 0, 5) == 5
                keeper = engine("keeper")
                engine.close()
                kill(keeper)
            shutil.rmtree(disk / f"refused{turn}")
            with _crew(disk / f"cache{turn}", 2) as crew:
                crew.publish(PRELUDE_SEED, PRELUDE)
                _fill(filler, disk)
                crew.start_lives(LIFE_SEED, 200, 1.0)
                lives += crew.end_lives(LIFE_SEED)
                keeper = crew.keeper
                kill(keeper)
                crew.join(keeper)
                for tier in BOTH:
                    hits, asked = crew.hits(crew.engines[turn % 2], tier)
                    assert hits >= min(asked, SLOTS // 4) > 0, f"{tier}: {hits} of {asked} blocks are left"
                filler.unlink()
                crew.check()
    judge_lives(lives)
    return {"times": count, "freed_space_noticed_s": noticed_s, **totals(lives)}


def pid_namespaces(count: int, seed: int, scratch: Path) -> Numbers:
    """Two containers' worth of PID namespaces on one directory: shared, and warm when one of them is gone at once."""
    lives: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        inside = [stack.enter_context(Nursery(NAMESPACES)) for _ in range(2)]
        for turn in range(count):
            path = scratch / f"cache{turn}"
            first, second = (nursery.engine(path, dram_slots=200, linger_s=0.1) for nursery in inside)
            assert first("open", OPEN_S, 2) == list(BOTH) == second("open", OPEN_S)
            assert first("owner") != second("owner")
            for tier in BOTH:
                assert first("write", tier, seed, 0, PRELUDE, 60) == PRELUDE
                assert second("known", tier, seed, 0, PRELUDE, 60) == PRELUDE
            known = [[tier, seed, PRELUDE] for tier in BOTH]
            for place, engine in enumerate((first, second)):
                engine.start("live", LIFE_SEED + place, 8, 1.5, known)
            lives.append(first.answer())
            for block_seed, written in ((seed, PRELUDE), (LIFE_SEED, lives[-1]["written"]["nvme"])):
                wait_for_journal(path, block_hashes(written, block_seed))
            inside[0].kill()  # with its engine and the keeper
            lives.append(second.answer())
            assert first.wait(60), "an engine has outlived its container"
            first.drop()
            inside[0] = stack.enter_context(Nursery(NAMESPACES))
            third = inside[0].engine(path, dram_slots=200, linger_s=0.1)
            assert third("open", OPEN_S, 2) == list(BOTH) and second("joined", OPEN_S)
            for engine in (second, third):
                for tier in BOTH:
                    assert engine("hits", tier, seed, 0, PRELUDE) == PRELUDE, f"{tier} is not warm"
                    assert engine("hits", tier, LIFE_SEED, 0, 8) == lives[-2]["written"][tier]
                engine("check")
            second.close()
            third.close()
    judge_lives(lives)
    return {"containers_killed": count, **totals(lives)}


def _crew(path: Path, count: int) -> Crew:
    return Crew(path, count, dram_slots=200, nvme_bytes=SLOTS * (SLOT_BYTES + 1024) + 64_000)


@contextlib.contextmanager
def _disk(scratch: Path) -> Iterator[Path]:
    """A mounted ext4 of its own."""
    image, disk = scratch / "image", scratch / "disk"
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    disk.mkdir()
    _run("mkfs.ext4", "-q", "-F", str(image))
    _run("mount", "-o", "loop", str(image), str(disk))  # the loop device goes with the mount
    os.chmod(disk, 0o700)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], capture_output=True)


@contextlib.contextmanager
def _frozen(disk: Path) -> Iterator[None]:
    """Every write to the file system hangs in the kernel."""
    _run("fsfreeze", "-f", str(disk))
    try:
        yield
    finally:
        _run("fsfreeze", "-u", str(disk))


def _fill(filler: Path, disk: Path) -> None:
    """Leave no block free."""
    with open(filler, "wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    with open(filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while os.statvfs(disk).f_bavail:
            file.write(bytes(4096))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
