"""The options that `kvtier chat` and `kvtier generate` share, in groups, and what each group becomes.

Owns names, defaults and help texts. Knows no engine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.config import EngineConfig, default_cache_directory
from kvtier.request import SamplingParams

if TYPE_CHECKING:
    from kvtier.engine import RequestOptions

OF_MODEL = "the model's"
"""Default of what its generation_config.json may say."""
ModelDirectory = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face model folder (config.json, *.safetensors, tokenizer).")
]


def option(panel: str, *names: str, metavar: str | None = None, text: str | None = None, default: str = "") -> Any:
    """An option of a panel; `default` is how the help shows what holds without it."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=default or False)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends."""

    max_tokens: Annotated[
        int | None,
        option("Sampling", "--max-tokens", metavar="N", text="Longest answer, 1 or more.", default="1024"),
    ] = None
    temperature: Annotated[
        float | None,
        option(
            "Sampling",
            "--temperature",
            metavar="T",
            text="0 to 100; 0 is greedy.",
            default=f"{OF_MODEL}, else 0; 1 with any of those below",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        option("Sampling", "--top-k", metavar="K", text="The K likeliest; 0: all.", default=f"{OF_MODEL}, else 0"),
    ] = None
    top_p: Annotated[
        float | None,
        option(
            "Sampling",
            "--top-p",
            metavar="P",
            text="Above 0, to 1: the likeliest that make up P.",
            default=f"{OF_MODEL}, else 1",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        option(
            "Sampling",
            "--min-p",
            metavar="P",
            text="0 to 1: those of P times the likeliest or more.",
            default=f"{OF_MODEL}, else 0",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        option(
            "Sampling",
            "--repetition-penalty",
            metavar="X",
            text="0.01 to 100; 1: off.",
            default=f"{OF_MODEL}, else 1",
        ),
    ] = None
    seed: Annotated[
        int | None,
        option("Sampling", "--seed", metavar="N", text="0 or more: sampling is repeatable.", default="drawn"),
    ] = None
    stop: Annotated[
        list[str] | None,
        option("Sampling", "--stop", metavar="TEXT", text="End the answer before this text. Repeatable."),
    ] = None

    def params(self) -> SamplingParams:
        """Raises InvalidRequest."""
        return SamplingParams(**{**asdict(self), "stop": tuple(self.stop or ())})


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What becomes of the blocks of a request. Each name is that of a field of `Request`."""

    cache_salt: Annotated[
        str, option("Cache", "--cache-salt", metavar="TEXT", text="Share blocks only with requests of this salt.")
    ] = ""
    cache_tenant: Annotated[
        str,
        option("Cache", "--cache-tenant", metavar="TEXT", text="Who is charged for the blocks.", default="the salt"),
    ] = ""
    cache_priority: Annotated[
        int,
        option("Cache", "--cache-priority", metavar="N", text="-100 to 100: the lower ones go first.", default="0"),
    ] = 0
    cache_ttl_s: Annotated[
        int | None,
        option("Cache", "--cache-ttl", metavar="SECONDS", text="Forget the blocks after this long.", default="never"),
    ] = None
    cache_pin: Annotated[
        bool,
        option(
            "Cache",
            "--cache-pin",
            text="Keep the prompt's blocks on the shelves, within tiers.pin_share, until they expire.",
        ),
    ] = False
    cache_read: Annotated[
        bool, option("Cache", "--cache-read/--no-cache-read", text="Reuse blocks, or compute all.", default="reuse")
    ] = True
    cache_write: Annotated[
        bool, option("Cache", "--cache-write/--no-cache-write", text="Leave blocks for later.", default="leave")
    ] = True

    def of_request(self) -> RequestOptions:
        """As `Engine.stream` and `Engine.generate` take them."""
        return asdict(self)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine is made of besides the model."""

    config: Annotated[
        Path | None, option("Engine", "--config", metavar="FILE", text="An engine.yaml to start from.")
    ] = None
    overrides: Annotated[
        list[str] | None,
        option(
            "Engine",
            "--set",
            metavar="KEY=VALUE",
            text="Override any key of engine.yaml, such as block_tokens=16. Repeatable.",
        ),
    ] = None
    dtype: Annotated[
        str | None, option("Engine", "--dtype", text="auto, float32, bfloat16 or float16.", default="auto")
    ] = None
    hbm: Annotated[
        str | None, option("Engine", "--hbm", metavar="SIZE", text="Bytes of HBM for KV.", default="512MiB")
    ] = None
    dram: Annotated[
        str | None, option("Engine", "--dram", metavar="SIZE", text="Bytes of DRAM; 0: off.", default="1GiB")
    ] = None
    nvme: Annotated[
        str | None, option("Engine", "--nvme", metavar="SIZE", text="Bytes on NVMe; 0: off.", default="0")
    ] = None
    cache_directory: Annotated[
        Path | None,
        option(
            "Engine",
            "--cache-dir",
            metavar="DIR",
            text="Where the NVMe tier lives; it stays warm for the next run.",
            default="~/.cache/kvtier",
        ),
    ] = None

    def engine_config(self, model: Path) -> EngineConfig:
        """The configuration of a command line: file, then options, then `--set`. Raises ConfigError."""
        values: dict[str, object] = {"model": model, "dtype": self.dtype}
        values |= {"tiers.hbm.bytes": self.hbm, "tiers.dram.bytes": self.dram, "tiers.nvme.bytes": self.nvme}
        given = parse_overrides(self.overrides or [])
        if self.cache_directory is not None:
            values["tiers.nvme.path"] = self.cache_directory
        elif self.config is None and "tiers.nvme.path" not in given:
            values["tiers.nvme.path"] = default_cache_directory()
        return EngineConfig.load(self.config, {**values, **given})


def parse_overrides(items: list[str]) -> dict[str, str]:
    """`KEY=VALUE` texts as a mapping; a wrong one ends the command with its usage."""
    parsed = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"--set wants KEY=VALUE, such as --set block_tokens=16; got {item!r}")
        parsed[key] = value
    return parsed
