"""What tiers cost a decode that has nothing to load: an engine with DRAM and NVMe beside one that has HBM alone.

Knows how the two are made, and in which turns they are asked the same. Used by bench_context.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import harmonic_mean

from bench.engine_run import EngineDecode, settle
from bench.workload import Settings, Workload
from kvtier import Engine, EngineConfig

BATCHES = (1, 8)
CONTEXT_MAX = 1024
"""Tokens of each prompt: the shorter, the more a step's fixed costs weigh."""
TURNS = ("tiered", "bare", "bare", "tiered")
"""Of one round: what drifts in one direction falls on both alike."""
SHELF_BYTES = 1 << 30
REST_S = 0.05
"""Between turns, so that idle threads of the one before are asleep."""
GOAL = ">= 0.98"


@dataclasses.dataclass(frozen=True, slots=True)
class TieringCost:
    """Tokens a second of both engines, by round."""

    batch: int
    writes: bool
    """Whether full blocks of the answers are written down to DRAM and NVMe meanwhile."""
    tiered: list[float]
    bare: list[float]

    @property
    def name(self) -> str:
        """What is measured."""
        return f"decode, batch {self.batch}, tiers on, {'answers written down' if self.writes else 'nothing to move'}"


def measure_tiering(settings: Settings, folder: Path, advance: Callable[[], None]) -> Iterator[TieringCost]:
    """Decode of both engines in turns, for each batch without writes and with; `advance` is called after each round.

    The engine with tiers has them as the default configuration does: shared, with a keeper.
    """
    context = min(settings.contexts[0], CONTEXT_MAX)
    workload = Workload(
        dataclasses.replace(
            settings,
            prefix_tokens=context,
            contexts=(context,),
            batches=BATCHES,
            output_tokens=2 * settings.output_tokens,
        )
    )
    shelves = {"bare": 0, "tiered": SHELF_BYTES}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(_open(workload, shelf_bytes, folder)) for name, shelf_bytes in shelves.items()
        }
        for batch in BATCHES:
            prompts = workload.prompts(batch, context)
            decodes = {name: EngineDecode(engine, prompts, lambda _: None) for name, engine in engines.items()}
            costs = [TieringCost(batch, writes, [], []) for writes in (False, True)]
            settle(engines["tiered"])
            for _ in range(settings.rounds):
                for cost in costs:
                    before = _moved(engines["tiered"])
                    _run_round(workload, decodes, cost)
                    assert (_moved(engines["tiered"]) > before) is cost.writes, "rows moved, or none did"
                advance()
            yield from costs


def _open(workload: Workload, shelf_bytes: int, folder: Path) -> Engine:
    overrides = workload.tier_overrides(workload.hbm_bytes(), shelf_bytes, shelf_bytes, folder)
    if shelf_bytes:  # one that shares a folder uses the shelves that are there, even if it brings none
        overrides |= {"sharing": True, "tiers.load": "auto", "tiers.linger_s": 0}
    return Engine(EngineConfig.load(None, overrides))


def _moved(engine: Engine) -> int:
    """Rows that its shelves have read or written."""
    stats = engine.stats()
    return sum(stats[f"{tier}_{moves}"] for tier in ("dram", "nvme") for moves in ("reads", "writes"))


def _run_round(workload: Workload, decodes: dict[str, EngineDecode], cost: TieringCost) -> None:
    rates: dict[str, list[float]] = {name: [] for name in decodes}
    last_tokens = workload.last_tokens(cost.batch)
    for name in TURNS:
        time.sleep(REST_S)
        rates[name].append(decodes[name].run(last_tokens, workload.settings.output_tokens, keeps=cost.writes)[0])
    cost.tiered.append(harmonic_mean(rates["tiered"]))
    cost.bare.append(harmonic_mean(rates["bare"]))
