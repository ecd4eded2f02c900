"""What every subcommand shows: errors as one message, the loading of a model, and what an answer cost.

Answers go to stdout, everything else to stderr, so that output can be piped. Knows no options.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier.config import EngineConfig
from kvtier.errors import KvtierError
from kvtier.request import Usage

if TYPE_CHECKING:
    from kvtier.engine import Engine

TIER_NAMES = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe", "computed": "computed"}
"""How the origins of tokens are called on a screen, in the order in which they are shown."""


def messages() -> Console:
    """The console for everything but answers."""
    return Console(stderr=True, highlight=False)


@contextlib.contextmanager
def reported(status: int = 2) -> Iterator[None]:
    """Print kvtier's own errors as one message and end with `status`; anything else is a bug, its traceback stays."""
    try:
        yield
    except KvtierError as error:
        console = messages()
        console.print("[bold red]error:[/] ", end="")
        console.print(str(error), markup=False)
        raise typer.Exit(status) from None


@contextlib.contextmanager
def loaded_engine(config: EngineConfig) -> Iterator[Engine]:
    """An engine for the `with` block, with a progress bar while its weights are read."""
    console = messages()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"loading {config.model.name}", total=None)
        from kvtier.engine import Engine  # torch takes a second or two: the bar is there first

        engine = Engine(config, lambda done, total: bar.update(task, completed=done, total=total))
    try:
        yield engine
    finally:
        engine.close()


def cost_line(usage: Usage, elapsed_s: float | None) -> str:
    """One line about an answer: tokens, where the prompt came from, time to first token, speed after it if known."""
    origin = ", ".join(f"{TIER_NAMES[name]} {count:,}" for name, count in usage.origin.as_dict().items() if count)
    parts = [
        f"{usage.prompt_token_count:,} token{'' if usage.prompt_token_count == 1 else 's'} in ({origin})",
        f"{usage.output_token_count:,} out",
        f"first after {usage.ttft_s:.2f} s",
    ]
    decode_s = (elapsed_s or 0.0) - usage.ttft_s
    if usage.output_token_count > 1 and decode_s > 0:
        parts.append(f"{(usage.output_token_count - 1) / decode_s:.0f} tokens/s")
    return " · ".join(parts)
