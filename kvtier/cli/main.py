"""The `kvtier` command: puts the subcommands together.

Owns names, help and `--version`. Each subcommand is a module of its own; none of them loads torch before it has to.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier import __version__
from kvtier.cli.chat import chat
from kvtier.cli.generate import generate
from kvtier.cli.plan import plan
from kvtier.cli.shelf.main import app as shelf_app
from kvtier.cli.smoke import smoke

EPILOG = "Every subcommand has its own --help with examples. A wrong option, configuration or model ends with status 2."

app = typer.Typer(
    name="kvtier",
    help="A language model with its KV cache over HBM, DRAM and NVMe.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
for command in (chat, generate, plan, smoke):
    app.command()(command)
app.add_typer(shelf_app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A language model with its KV cache over HBM, DRAM and NVMe."""


if __name__ == "__main__":
    app()
