"""Bytes as people write and read them: `512MiB` in a configuration, `1.4 GiB` in a message.

What is needed is rounded up and what is free is rounded down, so that a message never says that 16.0 GiB do not fit
16.0 GiB, and a number that it gives as enough is. Used by whoever reads or tells bytes.
"""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: object) -> int | float:
    """A size: whole bytes, text such as `512MiB`, or a share of what is free (a float above 0 and below 1)."""
    if isinstance(value, bool):
        raise ValueError("is a size such as 512MiB, or a share of what is free such as 0.5")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                "is a size such as 512MiB (B, KiB .. TiB, KB .. TB) or a share of what is free such as 0.5"
            )
        number = float(match[1])
        value = number if match[2] == "" and "." in match[1] else int(number * _UNITS[match[2].upper()])
    if isinstance(value, float):
        if 0 < value < 1:
            return value
        if not value.is_integer():
            raise ValueError("a share of what is free lies above 0 and below 1; a size needs a unit, such as 512MiB")
        value = int(value)
    if not isinstance(value, int) or not 0 <= value <= 2**50:
        raise ValueError("is a size from 0 to 1024TiB, such as 512MiB")
    return value


def parse_whole_bytes(value: object) -> int:
    """A size that is no share of anything."""
    parsed = parse_bytes(value)
    if isinstance(parsed, float):
        raise ValueError("is a size such as 512MiB, not a share")
    return parsed


_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: int) -> str:
    """The nearest number of two digits or more, with its unit."""
    unit, tenths = _unit_of(count)
    return _text(round(count * tenths / 1024**unit), unit, tenths)


def needed_text(count: int) -> str:
    """The same, rounded up: so much is enough."""
    unit, tenths = _unit_of(count)
    return _text(-(-count * tenths // 1024**unit), unit, tenths)


def free_text(count: int) -> str:
    """The same, rounded down: so much is there."""
    unit, tenths = _unit_of(count)
    return _text(count * tenths // 1024**unit, unit, tenths)


def _unit_of(count: int) -> tuple[int, int]:
    """Index of the unit, and 10 where a decimal is shown, else 1."""
    unit = min((max(count, 1).bit_length() - 1) // 10, len(_NAMES) - 1)
    return unit, 10 if unit and count < 100 * 1024**unit else 1


def _text(count: int, unit: int, tenths: int) -> str:
    return f"{count / tenths:.{1 if tenths > 1 else 0}f} {_NAMES[unit]}"
