"""The engine's one configuration: `engine.yaml` read into typed, frozen models.

Owns every key, its unit, default and bounds, and the only look at the environment. Unknown keys, bad units and
impossible values are `ConfigError`s that name the key, the value and the way out. Knows no model, allocates nothing.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Union

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvtier.byte_text import parse_bytes, parse_whole_bytes
from kvtier.errors import ConfigError


def parse_device(value: object) -> str:
    """`cpu`, `cuda`, or one of several GPUs by its number, such as `cuda:1`."""
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", value):
        raise ValueError("is cpu, cuda, or one of several GPUs such as cuda:1")
    return value


WholeBytes = Annotated[int, BeforeValidator(parse_whole_bytes)]
Bytes = Annotated[Union[int, float], BeforeValidator(parse_bytes)]  # noqa: UP007 (pydantic on 3.10)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class HbmConfig(_Section):
    """The tier attention computes on: memory of the GPU. With `device: cpu` an arena of host memory."""

    bytes: Bytes = "512MiB"  # type: ignore[assignment]


class DramConfig(_Section):
    """The DRAM shelf; 0 turns it off. What is staged from NVMe comes out of its bytes."""

    bytes: Bytes = "1GiB"  # type: ignore[assignment]
    staging_bytes: WholeBytes = "64MiB"  # type: ignore[assignment]
    """Of them, memory for slices of NVMe rows that are attended to, at most half; 0: off."""
    tenant_bytes: WholeBytes = 0
    """Most that a tenant with a name may take; 0: no quota."""


class NvmeConfig(_Section):
    """The NVMe shelf; 0 bytes turn it off. `path` is the cache directory (0700), where engines that share meet."""

    bytes: Bytes = 0
    path: Path | None = None
    policy: Literal["through", "selective", "back"] = "through"
    """When rows are written: once sealed, once used again, or when DRAM lets them go."""
    tenant_bytes: WholeBytes = 0
    """Most that a tenant with a name may take; 0: no quota."""
    write_bytes_day: WholeBytes = 0
    """Most that is written within 24 hours, by all engines that share it and across restarts; 0: no limit."""
    wait_s: float = Field(10.0, ge=0, le=600)
    """How long to wait at start for another engine to leave the cache directory."""


class TiersConfig(_Section):
    """Budgets of the three tiers and the deadline of a wait on a shelf."""

    hbm: HbmConfig = HbmConfig()
    dram: DramConfig = DramConfig()
    nvme: NvmeConfig = NvmeConfig()
    pin_share: float = Field(0.25, ge=0, le=1)
    """Share of a shelf's rows that requests may pin; a pin beyond it is not granted."""
    fetch_deadline_s: float = Field(5.0, gt=0, le=600)
    """A promotion that takes longer counts as a miss: its tokens are computed."""
    load: Literal["auto", "always"] = "auto"
    """Whether cold blocks are read only if that is sooner than computing them, by measured speeds, or always."""
    linger_s: float = Field(60.0, ge=0, le=86400)
    """How long shared shelves stay, DRAM and all, once their last engine has gone."""


class IoConfig(_Section):
    """The I/O engine of the shelves."""

    engine: Literal["auto", "uring", "threads"] = "auto"
    """Of NVMe: io_uring where it can be had (auto: if the file is open for direct I/O), else threads. DRAM: threads."""
    depth: int = Field(32, ge=1, le=4096)
    """Reads, and as many writes, that io_uring has under way at once, per shelf; at least `readers` and `writers`."""
    readers: int = Field(4, ge=1, le=64)
    writers: int = Field(2, ge=1, le=64)
    in_flight_max: int = Field(256, ge=1, le=65536)
    """Rows in transfer at once, per shelf and direction; half of the reads for loads, half for streamed contexts."""

    @property
    def reads_at_once(self) -> int:
        """Reads that a hung disk can keep."""
        return self.readers if self.engine == "threads" else max(self.readers, self.depth)

    @property
    def writes_at_once(self) -> int:
        """Writes that a hung disk can keep."""
        return self.writers if self.engine == "threads" else max(self.writers, self.depth)

    def within(self, slot_count: int) -> IoConfig:
        """This for an HBM of so many rows, of which io_uring shall not keep too many: 1/32, or what threads would."""
        return self.model_copy(update={"depth": max(1, min(self.depth, slot_count // 32))})


class SchedulerConfig(_Section):
    """What one step may hold and how many requests may wait."""

    step_tokens: int = Field(512, ge=1, le=65536)
    """Token budget of a step: one for each decoding sequence, the rest for prefill chunks."""
    beside_tokens: int | None = Field(None, ge=1, le=65536)
    """Token budget of a step in which some decode, half of it or more for prompts. None: on a CPU 256, on a GPU all."""
    sequences_max: int = Field(64, ge=1, le=4096)
    """Sequences that run at once."""
    queue_max: int = Field(1024, ge=1, le=1_000_000)
    """Requests that may wait; more are answered UNAVAILABLE."""
    streamed_max: int = Field(2, ge=0, le=64)
    """Requests with a context larger than HBM that run at once; the others wait. 0: such requests are refused."""
    streamed_hbm: float = Field(0.5, gt=0, le=1)
    """Share of HBM that they may hold together; the rest of their blocks lies on the shelves."""
    streamed_share: float = Field(0.25, gt=0, le=1)
    """By what share of the time that they take alone others' steps may grow, in the mean, beside one that streams."""


class EngineConfig(_Section):
    """Everything an engine needs to know. Load with `EngineConfig.load`, override any key by its dotted name."""

    model: Path
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, BeforeValidator(parse_device)] = "cpu"
    """Where the weights lie and passes run."""
    block_tokens: Literal[8, 16, 32, 64, 128] = 32
    context: int | None = Field(None, ge=1, le=2**24)
    """Longest prompt + answer in tokens; None: what the model was trained for."""
    max_tokens_default: int = Field(1024, ge=1, le=2**24)
    """Cap of an answer whose request gives no max_tokens."""
    attention: Literal["auto", "native", "reference", "triton_kernel"] = "auto"
    eviction: Literal["lru", "s3fifo", "reuse"] = "reuse"
    """Who goes when a tier is full; `scripts/bench_eviction.py` compares them on a trace."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of kernels and matrix products; None: one per core."""
    senders: int = Field(2, ge=1, le=8)
    """Threads that hand events to callers, off the engine thread."""
    sharing: bool = True
    """Whether the shelves of tiers.nvme.path are shared with other engines. Without a path nothing is."""
    tiers: TiersConfig = TiersConfig()
    io: IoConfig = IoConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> EngineConfig:
        """Read `path` (None: defaults only), apply `overrides` by dotted key, resolve paths, validate.

        Relative paths in the file are taken from the file's folder, those in overrides from the working directory.
        Raises ConfigError with one line for each key that is wrong.
        """
        values: dict[str, object] = {}
        if path is not None:
            values = _read_yaml(Path(path))
            for key in PATH_KEYS:
                _anchor(values, key, Path(path).resolve().parent)
        for key, value in (overrides or {}).items():
            if value is not None:
                _put(values, key, value if key in PATH_KEYS else _scalar(value))
        for key in PATH_KEYS:
            _anchor(values, key, Path.cwd())
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None
        if config.tiers.nvme.bytes and config.tiers.nvme.path is None:
            raise ConfigError(
                f"tiers.nvme.path: needed when tiers.nvme.bytes is not 0; for example {default_cache_directory()}"
            )
        return config


PATH_KEYS = ("model", "tiers.nvme.path")


def default_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/kvtier` or `~/.cache/kvtier`: private to the user, never a shared temporary directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtier"


def environment_path() -> str:
    """The search path of programs (for starting servers)."""
    return os.environ.get("PATH", "")


def environment() -> dict[str, str]:
    """A copy of the whole environment, to start child processes with."""
    return dict(os.environ)


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold keys and values, got {type(values).__name__}")
    return values


def _put(values: dict[str, object], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {section} is a value, not a section")
        values = inner
    values[last] = value


def _scalar(value: object) -> object:
    """Text from a command line or config.pbtxt as YAML reads it: `16` is a number, `512MiB` stays text."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return parsed if isinstance(parsed, (bool, int, float)) else value


def _anchor(values: dict[str, object], key: str, folder: Path) -> None:
    *sections, last = key.split(".")
    node: object = values
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(node.get(last), (str, Path)):
        path = Path(str(node[last])).expanduser()
        while path.parts[:1] == ("..",):  # `folder` is no symlink: its parent is what .. leads to
            folder, path = folder.parent, Path(*path.parts[1:])
        node[last] = folder / path


def _explain(item: object) -> str:
    assert isinstance(item, dict)
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"{key}: no such key; {_hint(location)}"
    if item["type"] == "missing":
        return f"{key}: is needed"
    text = str(item["msg"]).removeprefix("Value error, ")
    return f"{key}: {text}, got {item['input']!r}"


def _hint(location: list[str]) -> str:
    """Keys that may have been meant, in full: the one beside it that is written alike, or those so called elsewhere."""
    keys, above = list(_keys_below(EngineConfig, "")), "".join(f"{part}." for part in location[:-1])
    beside = [key.removeprefix(above) for key in keys if key.startswith(above) and "." not in key.removeprefix(above)]
    near = [above + name for name in difflib.get_close_matches(location[-1], beside, 1)]
    near = near or [key for key in keys if key.rpartition(".")[2] == location[-1]]
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(above + name for name in beside)}"


def _keys_below(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Dotted names of a section's keys and, depth first, of theirs."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys_below(field.annotation, f"{prefix}{name}.")
