"""Memory is what the configuration says, from the start, and nothing grows with the number of requests served."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engines import wait_for
from tiny import make_checkpoint

from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout, Tier

BLOCK = 16
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
WARM_REQUESTS, REQUESTS, AT_ONCE = 500, 2000, 10
GROWTH_BYTES = 3 << 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Tiers that 500 requests fill many times over, so that all of them evict from the warm-up on."""
    values = {
        "model": make_checkpoint(tmp_path / "model", "llama", tokenizer=True),
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": 40 * LAYOUT.row_bytes,
        "tiers.dram.bytes": 60 * SLOT_BYTES,
        "tiers.dram.staging_bytes": 0,
        "tiers.nvme.bytes": "3MiB",
        "sharing": False,
        "tiers.nvme.path": tmp_path / "cache",
        "tiers.load": "always",
    }
    with Engine(EngineConfig.load(None, values)) as engine:
        yield engine


def serve(engine: Engine, chance: random.Random, count: int) -> None:
    """Short requests of every kind: hits and misses, sampled and greedy, cancelled ones, with and without text."""
    shared = [[chance.randrange(3, 250) for _ in range(3 * BLOCK)] for _ in range(4)]
    for _ in range(count // AT_ONCE):
        prompts = [
            [*chance.choice(shared)[: chance.randrange(1, 48)], chance.randrange(3, 250)] for _ in range(AT_ONCE)
        ]
        prompts[0] = [chance.randrange(3, 250) for _ in range(2 * BLOCK + 3)]
        seed = chance.randrange(1000)
        params = SamplingParams(max_tokens=4, temperature=0.9, seed=seed, repetition_penalty=1.1, stop=("zzz",))
        engine.generate(prompts[:-1], params)
        engine.stream(prompts[-1], SamplingParams(max_tokens=100, ignore_eos=True)).close()


def used_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_two_thousand_requests_leave_no_trace(engine: Engine) -> None:
    chance = random.Random(5)
    serve(engine, chance, WARM_REQUESTS)
    warm = used_bytes()
    serve(engine, chance, REQUESTS - WARM_REQUESTS)
    grown = used_bytes() - warm
    engine.evict("hbm")
    wait_for(lambda: not engine._loop._live)  # who has been cancelled last
    wait_for(lambda: engine.stats()["waiting_writes"] == 0 and not engine._store.busy)  # what goes on to NVMe
    stats = engine.stats()
    assert stats["dram_evictions"] > 200 and stats["nvme_evictions"] > 200 and stats["hbm_evictions"] > 200
    assert grown < GROWTH_BYTES, f"{grown} bytes more after {REQUESTS} requests than after {WARM_REQUESTS}"
    assert sum(engine.metrics.requests.value(reason) for reason in ("stop", "length", "cancelled")) == REQUESTS
    assert_nothing_left(engine)


def assert_nothing_left(engine: Engine) -> None:
    """No forgotten sequence, fetch, transfer, wish or hold anywhere."""
    loop, scheduler, store = engine._loop, engine._scheduler, engine._store
    assert not loop._live and not loop._inbox and not loop._cancels and not loop._drains
    assert not scheduler.sequences and not scheduler._stalled
    promoter, demoter = store._promoter, store._demoter
    assert not promoter._by_hash and not promoter._by_ticket
    assert not demoter._onward and len(store._draining) == 0
    assert not demoter._writes and not any(demoter._wishes.values()) and not any(demoter._writing.values())
    for shelf in store._shelves.values():
        assert shelf.in_flight == 0 and not shelf._writes
        shelf.check()
    assert store.available_count == store.slot_count
    store.check(Counter())


def test_the_arenas_are_as_large_as_configured_and_there_from_the_start(engine: Engine) -> None:
    assert engine._store.capacities()["hbm"] == 40 and engine._store.capacities()["dram"] == 60
    arena, dram = engine._store._arena, engine._store._shelves[Tier.DRAM]
    assert arena.bytes_total == 40 * LAYOUT.row_bytes and dram.bytes_total == 60 * SLOT_BYTES
    assert resident_bytes(arena.address(0)) >= arena.bytes_total
    mapping = dram._slab.mapping
    assert mapping is not None and len(mapping) == dram.bytes_total


def resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that holds an address."""
    for mapping in psutil.Process().memory_maps(grouped=False):
        first, last = (int(part, 16) for part in mapping.addr.split("-"))
        if first <= address < last:
            return int(mapping.rss)
    raise AssertionError("the arena is not mapped")
