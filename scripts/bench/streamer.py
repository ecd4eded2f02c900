"""Engines whose HBM holds a part of a context only, and one request at a time to them.

Knows how tiers must be sized so that blocks lie where a benchmark wants them. Used by bench_context.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.engine_run import Collector, settle
from kvtier import Engine, EngineConfig, Request, SamplingParams
from kvtier.session import RequestHandle
from kvtier.tiers.header import HEADER_BYTES

TENANT = "bench"
"""Whose quota leaves it next to no DRAM, so that its blocks lie on NVMe."""
TENANT_ROWS = 4
STAGING_BYTES = 64 << 20
"""tiers.dram.staging_bytes as it comes; needs eight times as much DRAM."""
DEPTH, WRITERS = 8, 2
"""Reads and writes of NVMe at once."""
SHARE = 0.25
"""scheduler.streamed_share: what a streamed pass may take of the others' time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows and bytes that the engines are made of."""

    rows: int
    """Of the whole context."""
    row_bytes: int

    def resident(self) -> dict[str, object]:
        """All in HBM, no shelves."""
        return _tiers((self.rows + 2) * self.row_bytes, 0, 0)

    def from_dram(self) -> dict[str, object]:
        """A quarter in HBM, the rest in DRAM."""
        return _tiers(self.rows // 4 * self.row_bytes, int(1.5 * self.rows) * (self.row_bytes + HEADER_BYTES), 0)

    def from_nvme(self) -> dict[str, object]:
        """An eighth in HBM, next to none in DRAM, the rest on NVMe, read `DEPTH` slices at once."""
        slot_bytes = self.row_bytes + HEADER_BYTES
        dram = max(8 * STAGING_BYTES, 2 * self.rows * slot_bytes)
        hung = DEPTH + WRITERS  # slots that no sequence may count on
        tiers = _tiers((self.rows // 8 + hung) * self.row_bytes, dram, int(2.5 * self.rows) * slot_bytes + (16 << 20))
        io = {"io.readers": DEPTH, "io.writers": WRITERS}
        return tiers | io | {"tiers.dram.tenant_bytes": TENANT_ROWS * slot_bytes}


def _tiers(hbm: int, dram: int, nvme: int) -> dict[str, object]:
    return {"tiers.hbm.bytes": hbm, "tiers.dram.bytes": dram, "tiers.nvme.bytes": nvme}


class Streamer:
    """An engine of one kind and what is asked of it."""

    def __init__(self, options: argparse.Namespace, sizes: dict[str, object], folder: Path, tenant: str = "") -> None:
        values: dict[str, object] = {
            "model": options.model, "dtype": options.dtype, "threads": options.threads, "sharing": False,
            "block_tokens": options.block_tokens, "tiers.nvme.path": folder, "tiers.load": "always",
            "scheduler.streamed_max": 1, "scheduler.streamed_hbm": 1.0, "scheduler.streamed_share": SHARE,
        }  # fmt: skip
        self.engine = Engine(EngineConfig.load(None, values | sizes))
        self._tenant = tenant

    def start(
        self, prompt: list[int], tokens: int, first: Callable[[], None] = lambda: None, *, keeps: bool = True
    ) -> tuple[Collector, RequestHandle]:
        """Send one request; `first` is called with its first token. Without `keeps` nothing of it is written."""
        collector = Collector(first)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        handle = self.engine.submit(
            Request(prompt, params, cache_tenant=self._tenant, cache_write=keeps), collector.take
        )
        return collector, handle

    def first_token_s(self, prompt: list[int]) -> float:
        """Time to the first token of a prompt."""
        started = time.perf_counter()
        collector, _ = self.start(prompt, 1)
        collector.wait()
        took_s = collector.arrivals[0][0] - started
        settle(self.engine)
        return took_s

    def decode(self, prompt: list[int], tokens: int, *, keeps: bool = True) -> tuple[float, dict[str, float]]:
        """Tokens a second after the first one, and bytes a second streamed from each shelf meanwhile."""
        marks: list[dict[str, int]] = []
        collector, _ = self.start(prompt, tokens, lambda: marks.append(self.engine.stats()), keeps=keeps)
        collector.wait()
        took_s = collector.arrivals[-1][0] - collector.arrivals[0][0]
        return (tokens - 1) / took_s, self._moved_since(marks[0], took_s)

    def rate(self, running: Collector, tokens: int) -> dict[str, float]:
        """Bytes a second streamed from each shelf, during so many tokens of a request that runs."""
        first, mark, started = len(running.arrivals), self.engine.stats(), time.perf_counter()
        while len(running.arrivals) < first + tokens and not running.done:
            time.sleep(0.01)
        return self._moved_since(mark, time.perf_counter() - started)

    def _moved_since(self, mark: dict[str, int], took_s: float) -> dict[str, float]:
        last = self.engine.stats()
        moved = {tier: last[f"streamed_{tier}_bytes"] - mark[f"streamed_{tier}_bytes"] for tier in ("dram", "nvme")}
        return {tier: count / took_s for tier, count in moved.items()}
