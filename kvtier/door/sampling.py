"""Sampling parameters as clients write them: our names, those of vLLM and of TensorRT-LLM, in three places.

Owns which keys exist, what each is called elsewhere, and which foreign keys are accepted because they ask for nothing.
Makes the `SamplingParams` of a request; used by the door alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.door import values
from kvtier.errors import InvalidRequest
from kvtier.request import STOP_CHARACTERS_MAX, STOPS_MAX, SamplingParams

_WHOLE = ("max_tokens", "top_k", "seed", "min_tokens")
_NUMBER = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_FLAG = ("ignore_eos",)
_LIST = ("stop", "stop_token_ids")
SAMPLING_KEYS = (*_WHOLE, *_NUMBER, *_FLAG, *_LIST)
"""Keys that do something."""

_ALIASES = {"random_seed": "seed", "stop_words": "stop", "end_id": "stop_token_ids", "min_length": "min_tokens"}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "beam_width": (0, 1),
    "use_beam_search": (False,),
    "length_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "logprobs": (),
    "prompt_logprobs": (),
    "return_log_probs": (False,),
    "return_logprobs": (False,),
    "return_cumulative_logprob": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "bad_words": ([], "", [""]),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "guided_decoding": (),
    "structured_outputs": (),
    "extra_args": ({},),
    "lora_name": ("",),
}
"""Keys of other servers, with the values that ask for nothing (null always does); anything else is refused."""

_IGNORED = ("pad_id",)
"""Keys that cannot change anything here: nothing is padded."""


def known_sampling_key(key: str) -> bool:
    """True if `key` is read or accepted as a sampling parameter."""
    return key in SAMPLING_KEYS or key in _ALIASES or key in _NEUTRAL or key in _IGNORED


def sampling_params(given: Iterable[tuple[str, str, object]]) -> SamplingParams:
    """Merge `(place, key, value)` triples, `place` being "" for an input of its own or such as "sampling_parameters".

    None means not given. Lists from several places are joined; other values given twice must agree. Raises
    InvalidRequest for keys that are unknown or ask for something unsupported, and for values out of range.
    """
    merged: dict[str, object] = {}
    lists: dict[str, list[object]] = {key: [] for key in _LIST}
    for place, key, value in given:
        if value is None or key in _IGNORED:
            continue
        if not known_sampling_key(key):
            raise InvalidRequest(f"{place}: {values.unknown(key, SAMPLING_KEYS)}")
        if key in _NEUTRAL:
            _check_neutral(key, value)
            continue
        field = _ALIASES.get(key, key)
        if field in lists:
            lists[field] += _read_list(key, field, value)
            continue
        read = _read(key, field, value)
        if merged.setdefault(field, read) != read:
            raise InvalidRequest(f"{key}: given twice, as {values.shown(merged[field])} and as {values.shown(read)}")
    _resolve_min_tokens(merged, bool(lists["stop_token_ids"]))
    unique = {key: tuple(dict.fromkeys(items)) for key, items in lists.items()}
    return SamplingParams(**merged, **unique)  # type: ignore[arg-type]


def _read(key: str, field: str, value: object) -> object:
    if field in _WHOLE:
        return values.whole(key, value)
    if field in _FLAG:
        return values.flag(key, value)
    return values.number(key, value)


def _read_list(key: str, field: str, value: object) -> list[object]:
    if field == "stop":
        return list(values.texts(key, value, 4 * STOP_CHARACTERS_MAX))
    # TensorRT-LLM's clients send end_id -1 for "none"
    return [token for token in values.wholes(key, value, STOPS_MAX) if not (key == "end_id" and token == -1)]


def _check_neutral(key: str, value: object) -> None:
    """Refuse a foreign key unless its value is one of those that ask for nothing, however written."""
    plain = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    plain = plain.decode(errors="replace") if isinstance(plain, bytes) else plain
    for neutral in _NEUTRAL[key]:
        if isinstance(neutral, bool):
            accepted = plain is neutral or (isinstance(plain, str) and plain.lower() == str(neutral).lower())
        elif isinstance(neutral, (int, float)):
            accepted = not isinstance(plain, bool) and _as_number(plain) == neutral
        else:
            accepted = plain == neutral or value == neutral
        if accepted:
            return
    accepted_text = " or ".join(repr(value) for value in _NEUTRAL[key]) or "null"
    raise InvalidRequest(f"{key}: is not supported beyond {accepted_text}, got {values.shown(value)}")


def _as_number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def _resolve_min_tokens(merged: dict[str, object], has_stop_tokens: bool) -> None:
    """`min_tokens` equal to `max_tokens` asks for an answer of that length: the end of the sequence is ignored."""
    least = merged.pop("min_tokens", 0)
    if least in (0, 1):  # every answer has a token
        return
    if least != merged.get("max_tokens") or has_stop_tokens:
        raise InvalidRequest(
            f"min_tokens: is not supported beyond 0, 1, or max_tokens without stop_token_ids, got {values.shown(least)}"
        )
    merged["ignore_eos"] = True
