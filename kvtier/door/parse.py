"""One request of the wire into one `Request` and what its responses shall hold.

Owns the meaning of every input besides sampling, and of a request's parameters. Pure; called by model.py's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvtier.door import values
from kvtier.door.inputs import INPUTS
from kvtier.door.sampling import SAMPLING_KEYS, known_sampling_key, sampling_params
from kvtier.errors import InvalidRequest
from kvtier.request import SALT_CHARACTERS_MAX, TENANT_CHARACTERS_MAX, Request, SamplingParams

_TRITON_KEYS = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headers")
_TRITON_PREFIX = "triton_"
_CACHE_READERS: dict[str, Callable[[str, object], object]] = {
    "cache_salt": partial(values.text, bytes_max=4 * SALT_CHARACTERS_MAX),
    "cache_tenant": partial(values.text, bytes_max=4 * TENANT_CHARACTERS_MAX),
    "cache_priority": values.whole,
    "cache_ttl_s": values.whole,
    "cache_pin": values.flag,
    "cache_read": values.flag,
    "cache_write": values.flag,
}
TEXT_BYTES_MIN = 64 << 10
"""Texts up to this length are always looked at, however small the model's context is."""


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """How big a request may be before anything looks into it, and the priority levels of its model."""

    text_bytes_max: int = 1 << 20
    """Of `text_input` and of `chat`."""
    input_ids_max: int = 1 << 20
    """Of `input_ids`, and of the values of any other input."""
    json_bytes_max: int = 64 << 10
    """Of `sampling_parameters` and of a JSON list in `stop`."""
    json_depth_max: int = 16
    priority_levels: int = 0
    """As in config.pbtxt: levels go from 1, the most urgent, to this. 0: there are none."""
    default_priority_level: int = 0

    @classmethod
    def of_model(cls, context: int, token_bytes_max: int, levels: int, default_level: int) -> DoorLimits:
        """Never more than a context of so many tokens, none longer than `token_bytes_max` bytes, can hold.

        A text beyond that would keep every other request waiting while it is tokenized, only to be refused.
        """
        text_bytes_max = max(TEXT_BYTES_MIN, context * token_bytes_max)
        return cls(text_bytes_max, context, priority_levels=levels, default_priority_level=default_level)


@dataclass(frozen=True, slots=True)
class DoorRequest:
    """A request and how it wants to be answered."""

    request: Request
    stream: bool = False
    """False: exactly one response."""
    echo: str = ""
    """Text that the answer begins with: the prompt if `exclude_input_in_output` is false, else nothing."""
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_kv_cache_reuse_stats: bool = True


def parse_request(
    fields: Mapping[str, object], parameters: Mapping[str, object], limits: DoorLimits | None = None
) -> DoorRequest:
    """Read a request's input tensors (`fields`: numpy arrays, Python values or lists) and its request parameters.

    Parameters may hold any input or sampling key, since that is where Triton's generate endpoint puts what config.pbtxt
    does not declare. `chat` is true (then `text_input` is the user's message, or a JSON list of messages), or is
    itself a JSON list of messages. The prompt is left out of the answer unless `exclude_input_in_output` is false,
    which as in vllm_backend does not go with `stream`. The parameter `priority` is a level, 0 the default one; the
    request's priority counts from that one. Raises InvalidRequest naming field, limit and value.
    """
    limits = limits or DoorLimits()
    named, loose = _sorted(fields, parameters, limits)
    prompt, echo = _prompt(named, limits)
    stream = _flag(named, "stream")
    if _flag(named, "exclude_input_in_output", default=True):
        echo = ""
    elif stream or not echo:
        raise InvalidRequest("exclude_input_in_output: false needs plain text_input, without stream, chat or input_ids")
    request = Request(prompt, _params(named, loose, limits), _priority(parameters, limits), **_cache(named))
    return DoorRequest(
        request=request,
        stream=stream,
        echo=echo,
        return_finish_reason=_flag(named, "return_finish_reason"),
        return_num_input_tokens=_flag(named, "return_num_input_tokens"),
        return_num_output_tokens=_flag(named, "return_num_output_tokens"),
        return_kv_cache_reuse_stats=_flag(named, "return_kv_cache_reuse_stats", default=True),
    )


def _sorted(
    fields: Mapping[str, object], parameters: Mapping[str, object], limits: DoorLimits
) -> tuple[dict[str, object], dict[str, object]]:
    """All inputs by name wherever they came from, and the sampling keys among the parameters that are no input."""
    named = {name: _plain(name, value, limits) for name, value in fields.items() if value is not None}
    loose: dict[str, object] = {}
    for name in named:
        if name not in INPUTS:
            raise InvalidRequest(f"input {values.shown(name)}: is unknown")
    for key, value in parameters.items():
        if key in _TRITON_KEYS or key.startswith(_TRITON_PREFIX):
            continue
        if key in INPUTS:
            if key in named:
                raise InvalidRequest(f"{key}: given twice, as an input and as a request parameter")
            if value is not None:
                named[key] = value
        elif known_sampling_key(key):
            loose[key] = value
        else:
            raise InvalidRequest(f"parameters: {values.unknown(key, (*INPUTS, *SAMPLING_KEYS))}")
    return named, loose


def _plain(name: str, value: object, limits: DoorLimits) -> object:
    """The items of an array of shape `[1, n]` or `[n]` as Python values."""
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim > 1 and value.shape[0] != 1:
        raise InvalidRequest(f"{name}: a request holds a batch of 1, got {value.shape[0]}")
    if value.size > limits.input_ids_max:
        raise InvalidRequest(f"{name}: at most {limits.input_ids_max} values, got {value.size}")
    return value.reshape(-1).tolist()


def _prompt(named: Mapping[str, object], limits: DoorLimits) -> tuple[str | list[int] | list[dict[str, object]], str]:
    """The prompt, and its text where it can be repeated before the answer."""
    chat, messages = _chat(named, limits)
    given = [name for name in ("text_input", "input_ids") if name in named]
    if messages is not None:
        if given:
            raise InvalidRequest(f"chat: holds the messages, so {given[0]} must not be given")
        return messages, ""
    if len(given) != 1:
        raise InvalidRequest(f"text_input, input_ids: exactly one must be given, got {' and '.join(given) or 'none'}")
    if given == ["input_ids"]:
        if chat:
            raise InvalidRequest("chat: needs text_input, got input_ids")
        return _input_ids(named["input_ids"], limits), ""
    text = values.text("text_input", named["text_input"], limits.text_bytes_max)
    if not text:
        raise InvalidRequest("text_input: must not be empty")
    if not chat:
        return text, text
    message: dict[str, object] = {"role": "user", "content": text}
    return _messages_in("text_input", text, limits) or [message], ""


def _chat(named: Mapping[str, object], limits: DoorLimits) -> tuple[bool, list[dict[str, object]] | None]:
    """`(wrap text_input, None)` or `(False, messages)`."""
    value = values.single("chat", named.get("chat", False))
    if isinstance(value, bool):
        return value, None
    text = values.text("chat", value, limits.text_bytes_max)
    if text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true", None
    parsed = values.parse_json("chat", text, limits.json_depth_max)
    if not isinstance(parsed, list) or not parsed or not all(isinstance(item, dict) for item in parsed):
        raise InvalidRequest("chat: must be true, false, or a JSON list of messages with role and content")
    return False, parsed


def _messages_in(name: str, text: str, limits: DoorLimits) -> list[dict[str, object]] | None:
    """The messages if `text` is a JSON list of objects with a role; None if it is a message's own text."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return None
    try:
        parsed = values.parse_json(name, text, limits.json_depth_max)
    except InvalidRequest:
        return None
    if isinstance(parsed, list) and all(isinstance(item, dict) and "role" in item for item in parsed):
        return parsed
    return None


def _input_ids(value: object, limits: DoorLimits) -> list[int]:
    ids = values.wholes("input_ids", value, limits.input_ids_max)
    if not ids:
        raise InvalidRequest("input_ids: must not be empty")
    if min(ids) < 0:
        raise InvalidRequest(f"input_ids: must be 0 or more, got {min(ids)} at position {ids.index(min(ids))}")
    return ids


def _params(named: Mapping[str, object], loose: Mapping[str, object], limits: DoorLimits) -> SamplingParams:
    given: list[tuple[str, str, object]] = []
    for name, value in named.items():
        if name == "stop":
            given.append(("", name, _stops(value, limits)))
        elif known_sampling_key(name):
            given.append(("", name, value))
    given += [("parameters", key, value) for key, value in loose.items()]
    if "sampling_parameters" in named:
        source = values.text("sampling_parameters", named["sampling_parameters"], limits.json_bytes_max)
        parsed = values.parse_json("sampling_parameters", source, limits.json_depth_max) if source.strip() else {}
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"sampling_parameters: must be a JSON object, got {values.shown(parsed)}")
        given += [("sampling_parameters", key, value) for key, value in parsed.items()]
    return sampling_params(given)


def _stops(value: object, limits: DoorLimits) -> object:
    """The `stop` input: a text, a list of texts, or one text that is a JSON list of texts."""
    stops = values.texts("stop", value, limits.json_bytes_max)
    if len(stops) == 1 and stops[0].startswith("["):
        try:
            parsed = values.parse_json("stop", stops[0], limits.json_depth_max)
        except InvalidRequest:
            return stops
        if isinstance(parsed, list) and parsed and all(isinstance(item, str) for item in parsed):
            return parsed
    return stops


def _priority(parameters: Mapping[str, object], limits: DoorLimits) -> int:
    level = values.whole("priority", parameters.get("priority", 0))
    if not 0 <= level <= limits.priority_levels:
        raise InvalidRequest(f"priority: must be from 0 to {limits.priority_levels}, got {values.shown(level)}")
    return level - limits.default_priority_level if level else 0


def _cache(named: Mapping[str, object]) -> dict[str, Any]:
    """What is given of the fields of `Request` that say what becomes of its blocks."""
    return {name: read(name, named[name]) for name, read in _CACHE_READERS.items() if name in named}


def _flag(named: Mapping[str, object], name: str, default: bool = False) -> bool:
    return values.flag(name, named[name]) if name in named else default
