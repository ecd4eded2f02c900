"""Options that several subcommands share, and how they become an EngineConfig and SamplingParams.

Owns names and help texts of options. Knows no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.config import EngineConfig, default_cache_directory

ENGINE, SAMPLING = "Engine", "Sampling"

ModelDirectory = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face model folder (config.json, *.safetensors, tokenizer).")
]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="An engine.yaml to start from.", rich_help_panel=ENGINE),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override any key of engine.yaml, such as block_tokens=16. Repeatable.",
        rich_help_panel=ENGINE,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=ENGINE, show_default="auto"),
]
Hbm = Annotated[
    str | None,
    typer.Option("--hbm", metavar="SIZE", help="Bytes of HBM for KV.", rich_help_panel=ENGINE, show_default="512MiB"),
]
Dram = Annotated[
    str | None,
    typer.Option("--dram", metavar="SIZE", help="Bytes of DRAM; 0: off.", rich_help_panel=ENGINE, show_default="1GiB"),
]
Nvme = Annotated[
    str | None,
    typer.Option("--nvme", metavar="SIZE", help="Bytes on NVMe; 0: off.", rich_help_panel=ENGINE, show_default="0"),
]
CacheDirectory = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Where the NVMe tier lives; it stays warm for the next run.",
        rich_help_panel=ENGINE,
        show_default="~/.cache/kvtier",
    ),
]

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Longest answer in tokens.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="0 is greedy.", rich_help_panel=SAMPLING),
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="0: off.", rich_help_panel=SAMPLING)]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", rich_help_panel=SAMPLING)]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="P", rich_help_panel=SAMPLING)]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="X", help="1: off.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="End the answer before this text. Repeatable.", rich_help_panel=SAMPLING
    ),
]


def engine_config(
    model: Path,
    config: Path | None,
    overrides: list[str] | None,
    cache_directory: Path | None,
    **keys: str | None,
) -> EngineConfig:
    """The configuration of a command line: file, then options, then `--set`. Raises ConfigError.

    `keys`: values of `dtype`, `hbm`, `dram`, `nvme`; None leaves a key as it is.
    """
    values: dict[str, object] = {"model": model, "dtype": keys.get("dtype")}
    for tier in ("hbm", "dram", "nvme"):
        values[f"tiers.{tier}.bytes"] = keys.get(tier)
    given = parse_overrides(overrides or [])
    if cache_directory is not None:
        values["tiers.nvme.path"] = cache_directory
    elif config is None and "tiers.nvme.path" not in given:
        values["tiers.nvme.path"] = default_cache_directory()
    return EngineConfig.load(config, {**values, **given})


def parse_overrides(items: list[str]) -> dict[str, str]:
    """`KEY=VALUE` texts as a mapping; a wrong one ends the command with its usage."""
    parsed = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"--set wants KEY=VALUE, such as --set block_tokens=16; got {item!r}")
        parsed[key] = value
    return parsed
