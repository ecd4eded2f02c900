"""kvtier: a language model's KV cache over HBM, DRAM and NVMe, exact and bounded.

The stable Python API: `Engine` with its `EngineConfig`, and the values that go in and come out. Heavy parts are
imported when `Engine` is first used, so that configuration and clients stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.config import EngineConfig
from kvtier.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequest,
    KvtierError,
    RequestError,
    ShelfError,
    Unavailable,
)
from kvtier.request import Completion, FinishReason, Origin, Request, SamplingParams, TokenEvent, Usage

if TYPE_CHECKING:
    from kvtier.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "InvalidRequest",
    "KvtierError",
    "Origin",
    "Request",
    "RequestError",
    "SamplingParams",
    "ShelfError",
    "TokenEvent",
    "Unavailable",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from kvtier.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
