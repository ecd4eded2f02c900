"""Bytes on DRAM and disk, and slots of a tenant, looked at ten times a second from outside through churn and kills.

What counts is in footprint.py: slabs, the journal and its rewrite, files that are deleted but open, memory that anybody
still maps. Asserts that no look has ever seen more than was configured.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.record import tenant_digest
from tests.nursery import Worker
from tests.rows import SLOT_BYTES
from tests.soak import footprint
from tests.soak.crew import BOTH, OPEN_S, Crew, kill
from tests.soak.words import Numbers

LOOK_S = 0.1
SLOTS = 48
QUOTA_SLOTS = 10
DRAM_BYTES = SLOTS * SLOT_BYTES
NVME_BYTES = SLOTS * (SLOT_BYTES + 1024) + 64_000
TENANTS = ("one", "two", "")
LIFE_S = 0.5
MANY = 1 << 12


@dataclass
class _Looks:
    """The most that was seen."""

    count: int = 0
    dram_bytes: int = 0
    disk_bytes: int = 0
    tenant_slots: int = 0
    errors: list[BaseException] = field(default_factory=list)


def caps(count: int, seed: int, scratch: Path) -> Numbers:
    """COUNT times the capacity written, with kills: bytes and tenants' slots never pass what was configured."""
    chance = random.Random(seed)
    looks, published, kills, turn = _Looks(), dict.fromkeys(BOTH, 0), 0, 0
    by_tenant = dict.fromkeys(TENANTS, 0)
    setting = {"dram_slots": SLOTS, "nvme_bytes": NVME_BYTES, "tenant_bytes": QUOTA_SLOTS * SLOT_BYTES}
    with Crew(scratch / "cache", 0, **setting) as crew:
        for place, tenant in enumerate(TENANTS):
            crew.engines.append(_start(crew, tenant))
            assert place or crew.engines[0]("keeper")
        crew.join()
        with _looking(crew, looks):
            while min(published.values()) < count * SLOTS:
                seed_now = 10 + 3 * turn
                crew.start_lives(seed_now, MANY, LIFE_S)
                time.sleep(LIFE_S * chance.random())
                keeper, victim = 0, chance.choice([None, *range(3)])
                if victim is None or chance.random() < 0.2:
                    keeper = crew.last_keeper
                    kill(keeper)
                if victim is not None:
                    crew.engines[victim].kill()
                for place, engine in enumerate(crew.engines):
                    if place != victim:
                        lived = engine.answer()
                        by_tenant[TENANTS[place]] += lived["published"]
                        for tier in BOTH:
                            published[tier] += lived["written"][tier]
                if victim is not None:
                    crew.engines[victim] = _start(crew, TENANTS[victim])
                crew.join(keeper)
                kills += (victim is not None) + (keeper > 0)
                turn += 1
        crew.check()
        crew.settle()
    assert looks.count > turn and looks.dram_bytes and looks.disk_bytes and looks.tenant_slots, looks
    assert looks.dram_bytes <= DRAM_BYTES, f"{looks.dram_bytes} bytes of DRAM, {DRAM_BYTES} are allowed"
    assert looks.disk_bytes <= NVME_BYTES, f"{looks.disk_bytes} bytes of disk, {NVME_BYTES} are allowed"
    assert looks.tenant_slots <= QUOTA_SLOTS, f"{looks.tenant_slots} slots of a tenant, {QUOTA_SLOTS} are allowed"
    assert all(by_tenant[tenant] > QUOTA_SLOTS for tenant in TENANTS), f"hardly any churn: {by_tenant}"
    return {
        "looks": looks.count,
        "kills": kills,
        "published": sum(published.values()),
        "dram_share": looks.dram_bytes / DRAM_BYTES,
        "disk_share": looks.disk_bytes / NVME_BYTES,
        "tenant_share": looks.tenant_slots / QUOTA_SLOTS,
    }


def _start(crew: Crew, tenant: str) -> Worker:
    engine = crew.new(tenant=tenant)
    assert engine("open", OPEN_S, 2) == list(BOTH)
    return engine


@contextlib.contextmanager
def _looking(crew: Crew, looks: _Looks) -> Iterator[None]:
    """Look at everything again and again while the block runs."""
    over = threading.Event()

    def look() -> None:
        try:
            while not over.wait(LOOK_S):
                seen = crew.footprint()
                looks.count += 1
                looks.dram_bytes = max(looks.dram_bytes, seen.dram_bytes)
                looks.disk_bytes = max(looks.disk_bytes, seen.disk_bytes)
                for process in list(seen.processes)[:1]:
                    for tenant in filter(None, TENANTS):
                        slots = footprint.tenant_slots(process, tenant_digest(tenant))
                        looks.tenant_slots = max([looks.tenant_slots, *slots])
        except BaseException as error:
            looks.errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not looks.errors, looks.errors
