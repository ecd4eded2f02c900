"""`kvtier shelf ls | stat | verify`: what is there, how it is, and whether every byte of it is right.

Status 0: all is well; 1: `verify` has found bad rows; 2: it could not be done, and why.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kvtier.byte_text import bytes_text, parse_bytes
from kvtier.cli.shelf import view, work
from kvtier.cli.shelf.options import (
    STATUS_UNWELL,
    Json,
    LayoutOption,
    PathArgument,
    TierOption,
    console,
    opened_desk,
    print_json,
    tier_name,
    warn,
)
from kvtier.cli.terminal import TIER_NAMES
from kvtier.errors import ShelfError


def list_shelves(
    path: PathArgument,
    blocks: Annotated[bool, typer.Option("--blocks", help="Every block; with --json one object a line.")] = False,
    layout: LayoutOption = "",
    tier: TierOption = "",
    as_json: Json = False,
) -> None:
    """List the shelves: row layouts, tiers, blocks, bytes, and who has how many blocks.

    Examples:

      [bold]kvtier shelf ls .cache/kv[/]

      [bold]kvtier shelf ls model_repository/smollm2[/]   # the directory of that model

      [bold]kvtier shelf ls .cache/kv --blocks --tier nvme --json | head[/]
    """
    with opened_desk(path, files_will_do=True) as desk:
        overview = work.narrowed(desk.overview(), layout, tier_name(tier))
        if not blocks:
            if as_json:
                print_json(view.overview_json(desk, overview))
            else:
                console().print(view.layouts_table(desk, overview))
                for line in view.tenant_lines(desk, overview):
                    typer.echo(line)
            return
        for found, shelf in work.choose(overview, "", ""):
            if not as_json:
                typer.echo(f"{found.name[:8]} {TIER_NAMES[view.TIERS[shelf.tier]]}\n{view.BLOCKS_HEAD}")
            for page in desk.rows(found.name, shelf.tier):
                for row in view.rows_json(found, shelf.tier, page):
                    typer.echo(json.dumps(row) if as_json else view.block_line(row))


def stat(path: PathArgument, as_json: Json = False) -> None:
    """Say how the shelves are: the keeper, the engines, bytes, evictions, pins, journal, write budget.

    Examples:

      [bold]kvtier shelf stat .cache/kv[/]

      [bold]kvtier shelf stat .cache/kv --json | jq .totals.nvme.used_bytes[/]
    """
    with opened_desk(path, files_will_do=True) as desk:
        overview = desk.overview()
        if as_json:
            print_json(view.overview_json(desk, overview))
            return
        for line in view.stat_lines(desk, overview):
            typer.echo(line)


def verify(
    path: PathArgument,
    layout: LayoutOption = "",
    tier: TierOption = "",
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE", help="Read at most this much a second, such as 200MiB.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Leave bad rows where they are.")] = False,
    as_json: Json = False,
) -> None:
    """Read every row again and check it to the last byte; drop the bad ones. Status 1: there were some.

    Rows that are replaced meanwhile are passed over. Servers go on: they check whatever they read anyway.

    Examples:

      [bold]kvtier shelf verify .cache/kv[/]

      [bold]kvtier shelf verify .cache/kv --tier nvme --rate 200MiB --dry-run[/]
    """
    with opened_desk(path) as desk:
        chosen = work.choose(desk.overview(), layout, tier_name(tier))
        with work.progress("verifying", sum(shelf.rows for _, shelf in chosen)) as advance:
            found = work.verify(desk, chosen, _rate(rate), not dry_run, advance)
    for note in found.notes:
        warn(note)
    if as_json:
        print_json({**asdict(found), "seconds": round(found.seconds, 3)})
    else:
        for row in found.bad_rows:
            typer.echo(f"bad: {row['tier']} block {str(row['hash'])[:16]} in slot {row['slot']}: {row['reason']}")
        typer.echo(
            f"{found.rows:,} rows ({bytes_text(found.read_bytes)}) in {found.seconds:.1f} s: "
            f"{found.good:,} good, {found.bad:,} bad ({found.dropped:,} dropped), "
            f"{found.changed:,} replaced meanwhile, {found.unreadable:,} unreadable"
        )
    if not found.is_sound:
        raise typer.Exit(STATUS_UNWELL)


def _rate(text: str) -> float:
    """Bytes a second; 0: no limit."""
    if not text:
        return 0.0
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise ShelfError(f"--rate: {error}, got {text!r}") from None
    if not isinstance(found, int) or found <= 0:
        raise ShelfError(f"--rate: is bytes a second such as 200MiB, got {text!r}")
    return float(found)
