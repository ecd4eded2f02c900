"""The plan of a context: where its KV would lie and what reading it costs, before anything is served.

Arithmetic only: bytes over bandwidth. Knows the shape of a model and the budgets of a configuration; loads no weights,
opens no shelf, measures nothing (machine.py does). Called by `kvtier plan`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtier.block import KVLayout, Tier
from kvtier.models.config import ModelConfig


class Served(enum.Enum):
    """How a context would be served."""

    RESIDENT = "resident"
    """All of it in HBM."""
    FROM_DRAM = "streamed from DRAM"
    FROM_NVME = "streamed from NVMe"
    NOWHERE = "refused"
    """All tiers together do not hold it."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Rows that each tier holds, and what of HBM one streamed sequence may have."""

    hbm: int
    dram: int
    nvme: int
    working_set: int
    """Slots of HBM; 0: nothing is streamed."""
    staged: int
    """Rows on NVMe that one pass can stage, and that a day may write; 0: none is streamed from there."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second that a decode step can read from each tier, and operations a second of a matrix product."""

    hbm_bytes_s: float
    dram_bytes_s: float
    nvme_bytes_s: float
    flops_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as far as a plan needs to know it."""

    layout: KVLayout
    parameters: int
    embedding_parameters: int
    """Those of them that a step looks up by row and does not read whole."""
    heads: int
    windows: tuple[int | None, ...]

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.layout.item_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that a decode step reads."""
        return (self.parameters - self.embedding_parameters) * self.layout.item_bytes

    def seen_share(self, tokens: int) -> float:
        """Share of a context's KV that a token at its end attends to; less than 1 with sliding windows."""
        seen = sum(min(tokens, window or tokens) for window in self.windows)
        return seen / (tokens * len(self.windows))

    def prefill_flops(self, tokens: int) -> float:
        """Multiplications and additions of computing a prompt: 2 a weight and token, and 4 a (query, key, dim) pair."""
        pairs = sum(_pairs(tokens, window) for window in self.windows)
        dense = 2.0 * tokens * (self.parameters - self.embedding_parameters)
        return dense + 4.0 * pairs * self.heads * self.layout.head_dim


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of one context."""

    tokens: int
    served: Served
    blocks: dict[Tier, int]
    """Blocks by home once the context is full; of one that is refused, those that find a place."""
    lacking: int
    """Blocks that find none."""
    step_bytes: dict[Tier, int]
    """KV that a decode step reads by tier; weights left out."""
    step_s: float
    """Of one sequence alone: weights and KV over bandwidth, NVMe read ahead meanwhile; 0 if it is refused."""
    prefill_s: float
    """Arithmetic over its measured rate; 0 if it is refused."""
    load_s: dict[Tier, float]
    """Reading the whole context back from a shelf, where that shelf holds it."""
    together: dict[Tier, int]
    """How many such contexts run at once in HBM, and how many more each shelf keeps."""


def shape_of(model: ModelConfig, block_tokens: int, dtype: str) -> Shape:
    """The shape of a checkpoint's `config.json` in a dtype."""
    layout = KVLayout(model.layers, model.kv_heads, model.head_dim, block_tokens, dtype)
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    layer = attention + 3 * model.hidden * model.intermediate + 2 * model.hidden
    embedding = model.vocab * model.hidden
    head = 0 if model.tie_embeddings else embedding
    looked_up = 0 if model.tie_embeddings else embedding  # a tied one is read whole as the head
    total = model.layers * layer + embedding + head + model.hidden
    return Shape(layout, total, looked_up, model.heads, model.windows)


def plan(shape: Shape, capacities: Capacities, speeds: Speeds, tokens: int) -> Plan:
    """Where a context of `tokens` (prompt and answer) lies when it is full, and what a step of it costs."""
    assert tokens > 0
    layout = shape.layout
    total = layout.block_count(tokens)
    served, blocks, lacking = _homes(capacities, total)
    share = shape.seen_share(tokens)
    step_bytes = {tier: int(count * layout.row_bytes * share) for tier, count in blocks.items()}
    near_s = (shape.step_bytes + step_bytes[Tier.HBM]) / speeds.hbm_bytes_s
    near_s += (step_bytes[Tier.DRAM] + step_bytes[Tier.NVME]) / speeds.dram_bytes_s  # staged in DRAM
    step_s = max(near_s, step_bytes[Tier.NVME] / speeds.nvme_bytes_s) if blocks[Tier.NVME] else near_s
    kv_bytes = total * layout.row_bytes
    shelves = {Tier.DRAM: (capacities.dram, speeds.dram_bytes_s), Tier.NVME: (capacities.nvme, speeds.nvme_bytes_s)}
    load_s = {tier: kv_bytes / speed for tier, (rows, speed) in shelves.items() if rows >= total}
    together = {Tier.HBM: capacities.hbm // total, Tier.DRAM: capacities.dram // total}
    together[Tier.NVME] = capacities.nvme // total
    if served is Served.NOWHERE:
        return Plan(tokens, served, blocks, lacking, step_bytes, 0.0, 0.0, load_s, together)
    prefill_s = shape.prefill_flops(tokens) / speeds.flops_s
    return Plan(tokens, served, blocks, lacking, step_bytes, step_s, prefill_s, load_s, together)


def longest(shape: Shape, capacities: Capacities) -> dict[Served, int]:
    """Most tokens of one context that is served so; 0 where it is not."""
    near = capacities.working_set + capacities.dram if capacities.working_set else 0
    far = near + min(capacities.nvme, capacities.staged) if capacities.working_set else 0
    rows = {
        Served.RESIDENT: capacities.hbm,
        Served.FROM_DRAM: near if near > capacities.hbm else 0,
        Served.FROM_NVME: far if far > max(near, capacities.hbm) else 0,
    }
    return {served: count * shape.layout.block_tokens for served, count in rows.items()}


def _homes(capacities: Capacities, total: int) -> tuple[Served, dict[Tier, int], int]:
    """How a context of `total` blocks is served, its blocks by home, and how many have none."""
    if total <= capacities.hbm:
        return Served.RESIDENT, {Tier.HBM: total, Tier.DRAM: 0, Tier.NVME: 0}, 0
    if not capacities.working_set:
        return Served.NOWHERE, {Tier.HBM: capacities.hbm, Tier.DRAM: 0, Tier.NVME: 0}, total - capacities.hbm
    left = total - capacities.working_set
    dram = min(left, capacities.dram)
    nvme = min(left - dram, capacities.nvme, capacities.staged)
    blocks = {Tier.HBM: capacities.working_set, Tier.DRAM: dram, Tier.NVME: nvme}
    lacking = left - dram - nvme
    if lacking:
        return Served.NOWHERE, blocks, lacking
    return (Served.FROM_NVME if nvme else Served.FROM_DRAM), blocks, 0


def _pairs(tokens: int, window: int | None) -> int:
    """(query, key) pairs of causal attention over a prompt."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window
