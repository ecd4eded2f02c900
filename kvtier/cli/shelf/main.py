"""Puts the subcommands of `kvtier shelf` together."""

from __future__ import annotations

import typer

from kvtier.cli.shelf.changing import clear, pin, stop, unpin, warm
from kvtier.cli.shelf.looking import list_shelves, stat, verify

app = typer.Typer(
    name="shelf",
    help="Look at the shelves of a cache directory and act on them, while servers run and when none does.",
    epilog="PATH is a cache directory (tiers.nvme.path), an engine.yaml, or a model's folder in a repository.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("ls")(list_shelves)
for command in (stat, verify, clear, warm, pin, unpin, stop):
    app.command()(command)
