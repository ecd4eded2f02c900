"""The words of the door: what a caller asks (`Request`, `SamplingParams`) and gets (`TokenEvent`, `Completion`).

Values only; every one validates itself when made, so no later floor sees an impossible request. Knows no tokenizer,
tier or tensor.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import InvalidRequest
from kvtier.record import tenant_digest
from kvtier.retention import PRIORITY_MAX, PRIORITY_MIN, Retention

STOPS_MAX = 16
STOP_CHARACTERS_MAX = 256
SALT_CHARACTERS_MAX = 256
TENANT_CHARACTERS_MAX = 256
TTL_S_MAX = 31_536_000
"""A year."""
TEMPERATURE_MAX = 100.0
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0


class FinishReason(enum.Enum):
    """Why a sequence ended; `value` is what clients see."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context was reached."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `None` means: the model's generation_config, else the plain default.

    `temperature=0` is greedy. `max_tokens=None` means the rest of the context, capped by the configuration.
    Raises InvalidRequest naming the field, the limit and the value.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    """0 or -1: off."""
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _listed("stop", stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        _whole_or_none("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        _whole_or_none("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole_or_none("seed", self.seed, 0, 2**64 - 1)
        if len(self.stop) > STOPS_MAX:
            raise InvalidRequest(f"stop: at most {STOPS_MAX} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= STOP_CHARACTERS_MAX:
                raise InvalidRequest(f"stop: each must be a string of 1 to {STOP_CHARACTERS_MAX} characters")
        if len(self.stop_token_ids) > STOPS_MAX:
            raise InvalidRequest(f"stop_token_ids: at most {STOPS_MAX}, got {len(self.stop_token_ids)}")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to run. `prompt` is text, token ids, or chat messages (`[{"role": ..., "content": ...}, ...]`)."""

    prompt: str | list[int] | list[dict[str, object]]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower runs first, as in Triton's priority levels; 0 is the default level."""
    cache_salt: str = ""
    """Separates tenants: blocks are only shared between requests of one salt."""
    cache_tenant: str = ""
    """Who is charged for the blocks it makes; without it the salt says so, without either nobody is."""
    cache_priority: int = 0
    """-100 to 100: of the blocks of a tier those of a lower priority are evicted first."""
    cache_ttl_s: int | None = None
    """Seconds after which its blocks are not found any more; None: they stay as long as there is room."""
    cache_pin: bool = False
    """Keeps the blocks of the prompt, not those of the answer, on the shelves, within `tiers.pin_share`.

    Until they expire: those that are there without a TTL stay pinned, whatever `cache_ttl_s` says.
    """
    cache_read: bool = True
    """False: reuses nothing, every token of the prompt is computed."""
    cache_write: bool = True
    """False: leaves nothing behind, no later request finds what it computes."""

    def __post_init__(self) -> None:
        prompt = _anything(self.prompt)
        if not isinstance(prompt, (str, list, tuple)):
            raise InvalidRequest(f"prompt: must be text, token ids or chat messages, got {type(prompt).__name__}")
        if len(prompt) == 0:
            raise InvalidRequest("prompt: must not be empty")
        _whole("priority", self.priority, -(2**31), 2**31 - 1)
        _text("cache_salt", self.cache_salt, SALT_CHARACTERS_MAX)
        _text("cache_tenant", self.cache_tenant, TENANT_CHARACTERS_MAX)
        _whole("cache_priority", self.cache_priority, PRIORITY_MIN, PRIORITY_MAX)
        try:
            _whole_or_none("cache_ttl_s", self.cache_ttl_s, 1, TTL_S_MAX)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error}; leave it out for blocks that stay as long as there is room") from None
        for name in ("cache_pin", "cache_read", "cache_write"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name}: must be true or false, got {getattr(self, name)!r}")
        self._check_that_what_is_kept_is_written()

    def retention(self, unix_s: float) -> Retention:
        """What it asks of the tiers for its blocks, if it comes in at `unix_s`. A pin is meant for the prompt alone."""
        expiry_s = 0 if self.cache_ttl_s is None else math.ceil(unix_s) + self.cache_ttl_s
        tenant = tenant_digest(self.cache_tenant or self.cache_salt)
        return Retention(self.cache_priority, expiry_s, self.cache_pin, tenant)

    def _check_that_what_is_kept_is_written(self) -> None:
        if self.cache_write:
            return
        wanted = {
            "cache_priority": self.cache_priority or None,
            "cache_ttl_s": self.cache_ttl_s,
            "cache_pin": self.cache_pin or None,
        }
        for name, value in wanted.items():
            if value is not None:
                raise InvalidRequest(
                    f"{name}: is for blocks that are kept, got {value!r} with cache_write false; leave one of them out"
                )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the KV of each prompt token came from; the four sum to the prompt's tokens."""

    hbm: int = 0
    dram: int = 0
    nvme: int = 0
    computed: int = 0

    def as_dict(self) -> dict[str, int]:
        """`{"hbm", "dram", "nvme", "computed"}` in tokens."""
        return {"hbm": self.hbm, "dram": self.dram, "nvme": self.nvme, "computed": self.computed}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request used: tokens in and out, where the prompt came from, blocks reused and allocated."""

    prompt_token_count: int
    output_token_count: int
    origin: Origin
    reused_blocks: int
    allocated_blocks: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step's news of a request. Only the last event has `finish_reason`; its `usage` is None on error."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: Exception | None = None
    """Set with FinishReason.ERROR only: Unavailable, a model's NonFiniteError, or a bug's exception."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, as `Engine.generate` returns it."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_count: int
    origin: dict[str, int]
    ttft_s: float
    usage: Usage


def _anything(value: object) -> object:
    """A value whose annotation callers may not have kept."""
    return value


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(f"{name}: must be a list, got {value!r}")
    return tuple(value)


def _text(name: str, value: object, characters_max: int) -> None:
    if not isinstance(value, str) or not _is_encodable(value):
        raise InvalidRequest(f"{name}: must be text that UTF-8 can hold, got {value!r}")
    if len(value) > characters_max:
        raise InvalidRequest(f"{name}: at most {characters_max} characters, got {len(value)}")


def _is_encodable(text: str) -> bool:
    """Lone surrogates are no characters: UTF-8 has no bytes for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole_or_none(name: str, value: object, low: int, high: int) -> None:
    if value is not None:
        _whole(name, value, low, high)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}: must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name}: must be from {low} to {high}, got {_shown(value)}")


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
        raise InvalidRequest(f"{name}: must be a finite number, got {value!r}")
    if not low <= value <= high or (open_low and value == low):
        bound = f"above {low:g}, at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name}: must be {bound}, got {_shown(value)}")


def _shown(value: float) -> str:
    """A number for an error text; Python refuses to write whole numbers of thousands of digits."""
    return repr(value) if abs(value) < 2**128 or isinstance(value, float) else "a number beyond all bounds"
