"""Readers of single values: from what the wire brings to the type a field has, or a refusal that names the field.

Numbers and booleans may be written as text, since clients such as genai-perf send them so. Used by the door alone.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Sequence

from kvtier.errors import InvalidRequest

SHOWN_CHARACTERS_MAX = 80
_WHOLE_TEXT = re.compile(r"[+-]?[0-9]{1,32}")
_NUMBER_TEXT = re.compile(r"[+-]?([0-9]{1,32}(\.[0-9]{0,32})?|\.[0-9]{1,32})([eE][+-]?[0-9]{1,4})?")


def shown(value: object) -> str:
    """`value` for an error text, cut to a bearable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[:SHOWN_CHARACTERS_MAX] + "..."


def unknown(key: str, known: Iterable[str]) -> str:
    """What to say of a key that is none of `known`: the one that is written alike, else all of them."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(key, names, 1)
    return f"unknown key {shown(key)}; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}")


def single(name: str, value: object) -> object:
    """The one value of a field that may come as a list of one."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise InvalidRequest(f"{name}: must be one value, got {len(value)}")
        return value[0]
    return value


def text(name: str, value: object, bytes_max: int) -> str:
    """Text of at most `bytes_max` bytes of UTF-8."""
    value = single(name, value)
    if not isinstance(value, (str, bytes)):
        raise InvalidRequest(f"{name}: must be text, got {shown(value)}")
    try:
        encoded = value.encode() if isinstance(value, str) else value
        decoded = encoded.decode()
    except UnicodeError as error:
        raise InvalidRequest(f"{name}: is not valid UTF-8: {error.reason}") from None  # type: ignore[attr-defined]
    if len(encoded) > bytes_max:
        raise InvalidRequest(f"{name}: at most {bytes_max:,} bytes, got {len(encoded):,}")
    return decoded


def flag(name: str, value: object) -> bool:
    """A boolean, or the text true or false."""
    value = _word(single(name, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidRequest(f"{name}: must be true or false, got {shown(value)}")


def whole(name: str, value: object) -> int:
    """A whole number, perhaps as text or as a float without fraction."""
    value = _word(single(name, value))
    written = isinstance(value, str) and _WHOLE_TEXT.fullmatch(value)
    if isinstance(value, (str, float)) and (written or (isinstance(value, float) and value.is_integer())):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}: must be a whole number, got {shown(value)}")
    return value


def number(name: str, value: object) -> float:
    """A number, perhaps as text. An infinite one passes: the field's own range refuses it."""
    value = _word(single(name, value))
    if isinstance(value, str) and _NUMBER_TEXT.fullmatch(value):
        value = float(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else math.inf
    if not isinstance(value, float):
        raise InvalidRequest(f"{name}: must be a number, got {shown(value)}")
    return value


def texts(name: str, value: object, bytes_max: int) -> list[str]:
    """A text or a list of texts; empty ones are left out."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in (text(name, item, bytes_max) for item in items) if item]


def wholes(name: str, value: object, count_max: int) -> list[int]:
    """A list of whole numbers, not longer than `count_max`; text and floats are refused here."""
    items: Sequence[object] = value if isinstance(value, (list, tuple)) else [value]
    if len(items) > count_max:
        raise InvalidRequest(f"{name}: at most {count_max} ids, got {len(items)}")
    result: list[int] = []
    for position, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidRequest(f"{name}: must be whole numbers, got {shown(item)} at position {position}")
        result.append(item)
    return result


def parse_json(name: str, source: str, depth_max: int) -> object:
    """The value of a JSON text. NaN, Infinity, repeated keys and nesting beyond `depth_max` are refused."""
    try:
        value: object = json.loads(source, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidRequest(f"{name}: nested deeper than {depth_max}") from None
    except ValueError as error:
        raise InvalidRequest(f"{name}: is not valid JSON: {error}") from None
    _check_depth(name, value, depth_max, depth_max)
    return value


def _word(value: object) -> object:
    """Text that may stand for a number or boolean, stripped; anything else as it is."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return value.strip() if isinstance(value, str) else value


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is no number")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {shown(next(key for key in keys if keys.count(key) > 1))} is given twice")
    return result


def _check_depth(name: str, value: object, left: int, depth_max: int) -> None:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        if isinstance(item, (dict, list)):
            if left == 1:
                raise InvalidRequest(f"{name}: nested deeper than {depth_max}")
            _check_depth(name, item, left - 1, depth_max)
