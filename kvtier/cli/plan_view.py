"""How a plan looks on a screen and as JSON.

Turns what planning.py says into text; asks and measures nothing. Used by `kvtier plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvtier.block import Tier
from kvtier.byte_text import bytes_text, needed_text
from kvtier.cli.terminal import TIER_NAMES

if TYPE_CHECKING:
    from kvtier.planning import Capacities, Plan, Served, Shape, Speeds


def plan_json(
    shape: Shape, capacities: Capacities, speeds: Speeds, result: Plan, lengths: dict[Served, int]
) -> dict[str, object]:
    """Everything, for machines."""
    row_bytes = shape.layout.row_bytes
    return {
        "context_tokens": result.tokens,
        "served": result.served.value,
        "dtype": shape.layout.dtype,
        "block_tokens": shape.layout.block_tokens,
        "row_bytes": row_bytes,
        "token_bytes": shape.layout.token_bytes,
        "weights_bytes": shape.weights_bytes,
        "kv_bytes": shape.layout.block_count(result.tokens) * row_bytes,
        "lacking_bytes": result.lacking * row_bytes,
        "capacity_blocks": {"hbm": capacities.hbm, "dram": capacities.dram, "nvme": capacities.nvme},
        "working_set_blocks": capacities.working_set,
        "staged_blocks_max": capacities.staged,
        "blocks": {tier.value: count for tier, count in result.blocks.items()},
        "step_bytes": {"weights": shape.step_bytes} | {tier.value: n for tier, n in result.step_bytes.items()},
        "step_s": result.step_s,
        "tokens_per_s": 1 / result.step_s if result.step_s else 0.0,
        "prefill_s": result.prefill_s,
        "load_s": {tier.value: seconds for tier, seconds in result.load_s.items()},
        "together": {tier.value: count for tier, count in result.together.items()},
        "longest_tokens": {served.value: count for served, count in lengths.items()},
        "speeds": {
            "hbm_bytes_s": speeds.hbm_bytes_s,
            "dram_bytes_s": speeds.dram_bytes_s,
            "nvme_bytes_s": speeds.nvme_bytes_s,
            "flops_s": speeds.flops_s,
        },
    }


def show_plan(
    console: Console,
    shape: Shape,
    capacities: Capacities,
    speeds: Speeds,
    result: Plan,
    lengths: dict[Served, int],
    remedy: str,
) -> None:
    """For people; `remedy`: what would let a context in that is refused."""
    layout = shape.layout
    total_bytes = layout.block_count(result.tokens) * layout.row_bytes
    console.print(
        f"{result.tokens:,} token{'' if result.tokens == 1 else 's'} of KV in {layout.dtype}: "
        f"[bold]{bytes_text(total_bytes)}[/] ({bytes_text(layout.token_bytes)} a token, "
        f"{bytes_text(layout.row_bytes)} a block of {layout.block_tokens}); weights {bytes_text(shape.weights_bytes)}"
    )
    console.print(_homes_table(layout.row_bytes, capacities, speeds, result))
    if result.lacking:
        console.print(
            f"[bold red]refused:[/] {needed_text(result.lacking * layout.row_bytes)} find no place; {remedy}, or ask "
            "for a shorter context"
        )
    else:
        console.print(f"served: [bold]{result.served.value}[/]")
        console.print(
            f"a decode step of it alone: at least [bold]{shown_time(result.step_s)}[/], {1 / result.step_s:,.1f} "
            f"tokens/s at most (weights {bytes_text(shape.step_bytes)} and KV, once each; NVMe is read ahead meanwhile)"
        )
        loads = "".join(f", from {TIER_NAMES[tier.value]} {shown_time(s)}" for tier, s in result.load_s.items())
        console.print(f"its first token: computed {shown_time(result.prefill_s)}{loads} (arithmetic or bytes alone)")
    running = result.together[Tier.HBM]
    kept = ", ".join(f"{result.together[tier]:,} on {TIER_NAMES[tier.value]}" for tier in (Tier.DRAM, Tier.NVME))
    console.print(f"such contexts at once: {running:,} resident in HBM; kept for later: {kept}")
    ways = ", ".join(f"{served.value} {count:,}" for served, count in lengths.items() if count)
    console.print(f"tokens of one context that there is room for: {ways or 'none'}")


def _homes_table(row_bytes: int, capacities: Capacities, speeds: Speeds, result: Plan) -> Table:
    table = Table("tier", "holds", "of this context", "a step reads", "at", "takes", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        Tier.HBM: (capacities.hbm, speeds.hbm_bytes_s),
        Tier.DRAM: (capacities.dram, speeds.dram_bytes_s),
        Tier.NVME: (capacities.nvme, speeds.nvme_bytes_s),
    }
    for tier, (count, speed) in rows.items():
        here, read = result.blocks[tier], result.step_bytes[tier]
        table.add_row(
            TIER_NAMES[tier.value],
            bytes_text(count * row_bytes),
            bytes_text(here * row_bytes) if here else "-",
            bytes_text(read) if read else "-",
            f"{speed / 1e9:,.1f} GB/s" if read else "",
            shown_time(read / speed) if read else "",
        )
    return table


def shown_time(seconds: float) -> str:
    """Seconds in the unit that people read."""
    if seconds < 1:
        return f"{seconds * 1e3:,.1f} ms"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:,.1f} {unit}"
    return f"{seconds / 86400:,.1f} days"
