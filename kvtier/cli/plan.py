"""`kvtier plan`: what of a context fits where, and what a decode step of it costs, before anything is served.

Owns what is measured and how the plan is shown; the arithmetic is planning.py's. Loads no weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier.block import Tier
from kvtier.byte_text import bytes_text, needed_text, parse_whole_bytes
from kvtier.cli import options
from kvtier.cli.groups import with_groups
from kvtier.cli.options import option
from kvtier.cli.terminal import TIER_NAMES, messages, reported
from kvtier.config import EngineConfig
from kvtier.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from kvtier.planning import Capacities, Plan, Served, Shape, Speeds
    from kvtier.sizing import Place

DISK_ROWS = 256
"""Read at most to measure a disk."""
DISK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """Rates to plan with instead of this machine's."""

    memory_speed: Annotated[
        str | None,
        option("Speeds", "--memory-speed", metavar="SIZE", text="HBM, bytes a second: 3350GB.", default="measured"),
    ] = None
    dram_speed: Annotated[
        str | None,
        option(
            "Speeds", "--dram-speed", metavar="SIZE", text="DRAM, as a pass reads it: 50GB.", default="that of memory"
        ),
    ] = None
    nvme_speed: Annotated[
        str | None,
        option("Speeds", "--nvme-speed", metavar="SIZE", text="NVMe, direct reads: 6GB.", default="measured"),
    ] = None
    flops: Annotated[
        float | None,
        option(
            "Speeds", "--flops", metavar="N", text="Matrix products, operations a second: 600e12.", default="measured"
        ),
    ] = None


@with_groups
def plan(
    model: options.ModelDirectory,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="TOKENS", help="Prompt + answer, such as 8192; none: the longest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    *,
    engine_options: options.EngineOptions,
    speed_options: SpeedOptions,
) -> None:
    """Say what of a context fits where, and what a decode step will cost: bytes over bandwidth, measured here.

    Only config.json of the model is read. Rates that are given are not measured: another machine can be planned.

    Examples:

      [bold]kvtier plan .cache/models/smollm2 --context 8192 --hbm 64MiB --nvme 10GiB[/]

      [bold]kvtier plan ./Llama-3.1-8B --hbm 8GiB --dram 200GiB --nvme 2TiB \\
          --memory-speed 3350GB --dram-speed 50GB --nvme-speed 6GB \\
          --flops 600e12[/]   # another machine
    """
    with reported():
        config = engine_options.engine_config(model)
        from kvtier.capacity import way_out
        from kvtier.models.config import ModelConfig  # torch takes a second or two
        from kvtier.planning import Served, longest, shape_of
        from kvtier.planning import plan as planned
        from kvtier.sizing import context_max

        checkpoint = ModelConfig.from_folder(config.model)
        name = config.dtype if config.dtype != "auto" else checkpoint.checkpoint_dtype or "float32"
        shape = shape_of(checkpoint, config.block_tokens, name)
        limit = context_max(config, checkpoint.context)
        tokens = limit if context is None else context
        if not 1 <= tokens <= limit:
            raise InvalidRequest(f"--context: model and `context` take 1 to {limit} tokens, got {tokens}")
        capacities = _capacities(config, shape, limit)
        speeds = _speeds(config, shape, speed_options, bool(capacities.nvme))
        result = planned(shape, capacities, speeds, tokens)
        nvme_is_short = result.blocks[Tier.NVME] == capacities.nvme
        lengths, remedy = longest(shape, capacities), way_out(config, capacities.working_set, nvme_is_short)
    if as_json:
        typer.echo(json.dumps(_as_json(shape, capacities, speeds, result, lengths)))
    else:
        _show(Console(highlight=False), shape, capacities, speeds, result, lengths, remedy)
    if result.served is Served.NOWHERE:
        raise typer.Exit(1)


class _AbsentGpu:
    """A GPU that this machine has not: `sizing.Place` for budgets in bytes."""

    lands_rows = True
    launcher = "as each has one"

    def free_bytes(self) -> int:
        """ConfigError."""
        raise ConfigError("tiers.hbm.bytes: a share of a GPU's memory, and there is none here; give bytes, as in 60GiB")


def _place(config: EngineConfig) -> Place:
    from kvtier.device import make_device

    try:
        return make_device(config.device)
    except ConfigError:
        return _AbsentGpu()


def _capacities(config: EngineConfig, shape: Shape, context: int) -> Capacities:
    """Rows by tier, sized as those of an engine for contexts of up to `context` tokens."""
    from kvtier.planning import Capacities
    from kvtier.shelves import dram_slot_count, row_format
    from kvtier.sizing import nvme_slots_planned, spare_count, tier_sizes, working_set_count

    layout = shape.layout
    sizes = tier_sizes(config, layout, context, _place(config))
    usable = sizes.slot_count - spare_count(config, sizes.slot_count)
    form, staged = row_format(layout, bytes(32)), sizes.staging_bytes // layout.slice_bytes // 2
    day_max = config.tiers.nvme.write_bytes_day // form.slot_bytes
    return Capacities(
        hbm=usable,
        dram=dram_slot_count(form, sizes.dram_bytes) if sizes.dram_bytes else 0,
        nvme=nvme_slots_planned(config, layout),
        working_set=working_set_count(config, usable),
        staged=min(staged, day_max or staged),
    )


def _speeds(config: EngineConfig, shape: Shape, given: SpeedOptions, has_nvme: bool) -> Speeds:
    """What was given; the rest measured, with a word on stderr while that takes its second or two."""
    from kvtier import machine
    from kvtier.planning import Speeds

    memory, dram = _speed("--memory-speed", given.memory_speed), _speed("--dram-speed", given.dram_speed)
    nvme, flops = _speed("--nvme-speed", given.nvme_speed), given.flops
    if flops is not None and not flops > 0:
        raise ConfigError(f"--flops: operations a second, such as 600e12, got {flops}")
    if config.device != "cpu":
        needed = {"--memory-speed": memory, "--dram-speed": dram, "--flops": flops}
        if lacking := [name for name, value in needed.items() if value is None]:
            raise ConfigError(
                f"{', '.join(lacking)}: to be given for {config.device}; what is measured here is the CPU"
            )
    with messages().status("measuring this machine"):
        if memory is None:
            memory = machine.memory_read_bytes_s()
        if nvme is None and has_nvme:
            folder = _existing(config.tiers.nvme.path or Path.cwd())
            rows = max(8, min(DISK_ROWS, DISK_BYTES // shape.layout.row_bytes))
            nvme = machine.disk_read_bytes_s(folder, shape.layout.row_bytes, rows, config.io.readers)
        if flops is None:
            import torch

            flops = machine.matmul_flops_s(getattr(torch, shape.layout.dtype))
    if has_nvme and not nvme:
        raise ConfigError("tiers.nvme.path: its disk has no direct I/O to measure; give --nvme-speed, such as 3GB")
    return Speeds(memory, memory if dram is None else dram, nvme or 0.0, flops)


def _speed(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = parse_whole_bytes(text)
    except ValueError:
        raise ConfigError(f"{name}: bytes read within a second, as in 3GB or 512MiB; got {text!r}") from None
    if value == 0:
        raise ConfigError(f"{name}: more than 0 bytes a second, such as 3GB; got {text!r}")
    return float(value)


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _as_json(
    shape: Shape, capacities: Capacities, speeds: Speeds, result: Plan, lengths: dict[Served, int]
) -> dict[str, object]:
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


def _show(
    console: Console,
    shape: Shape,
    capacities: Capacities,
    speeds: Speeds,
    result: Plan,
    lengths: dict[Served, int],
    remedy: str,
) -> None:
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
