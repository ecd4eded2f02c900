"""What the subcommands of `kvtier shelf` share: options, the way to the desk, and how results are printed.

Results go to stdout, as text or JSON; everything else to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtier.cli.shelf import work
from kvtier.cli.shelf.view import TIERS
from kvtier.cli.terminal import messages, reported
from kvtier.errors import ShelfError
from kvtier.keeper.desk import Desk
from kvtier.keeper.operator_line import KeeperTrouble

STATUS_UNWELL = 1

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Cache directory, engine.yaml, or a model's folder in a repository.")
]
Json = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]
LayoutOption = Annotated[
    str, typer.Option("--layout", metavar="DIGITS", help="This row layout only, by its first digits.")
]
TierOption = Annotated[str, typer.Option("--tier", metavar="dram|nvme", help="This tier only.")]
TenantOption = Annotated[
    str, typer.Option("--tenant", metavar="NAME", help="Blocks of this tenant only, by name or by its digest in `ls`.")
]
HashesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[HASH]...", help="First digits of block hashes, as ls --blocks shows.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Every block.")]


@contextmanager
def opened_desk(path: Path, files_will_do: bool = False) -> Iterator[Desk]:
    """The desk of a cache directory; with a keeper in trouble its files, if those will do."""
    with reported():
        directory = work.resolve(path)
        try:
            desk = Desk(directory)
        except KeeperTrouble as error:
            if not files_will_do:
                raise
            warn(f"{error}; going on with what the files say")
            desk = Desk(directory, call=False)
        with desk:
            yield desk


def tier_name(name: str) -> str:
    if name and name not in TIERS:
        raise ShelfError(f"--tier: is dram or nvme, got {name!r}")
    return name


def print_json(values: dict[str, object]) -> None:
    typer.echo(json.dumps(values))


def console() -> Console:
    return Console(highlight=False)


def warn(text: str) -> None:
    console = messages()
    console.print("[bold yellow]note:[/] ", end="")
    console.print(text, markup=False)
