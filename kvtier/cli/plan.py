"""`kvtier plan`: what of a context fits where, and what a decode step of it costs, before anything is served.

Owns what is measured; the arithmetic is planning.py's, how it is shown plan_view.py's. Loads no weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvtier.block import Tier
from kvtier.byte_text import parse_whole_bytes
from kvtier.cli import options
from kvtier.cli.groups import with_groups
from kvtier.cli.options import option
from kvtier.cli.plan_view import plan_json, show_plan
from kvtier.cli.terminal import messages, reported
from kvtier.config import EngineConfig
from kvtier.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from kvtier.planning import Capacities, Shape, Speeds
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
        typer.echo(json.dumps(plan_json(shape, capacities, speeds, result, lengths)))
    else:
        show_plan(Console(highlight=False), shape, capacities, speeds, result, lengths, remedy)
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
