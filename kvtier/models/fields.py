"""Typed access to the JSON files of a checkpoint.

Owns the wording of "this field is wrong": file, field, value and what was expected, as `CheckpointError`. A null counts
as absent, as it does in Transformers. Knows no model; called by `config` and `rope`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from kvtier.errors import CheckpointError


class Fields:
    """One JSON object and the name it goes by in errors. Every getter raises CheckpointError for a wrong type.

    Without a default a field is required.
    """

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        self._name = name
        self._values = values

    @classmethod
    def from_file(cls, path: Path) -> Fields:
        """Read a JSON object. Raises CheckpointError if the file is missing, unreadable, or not a JSON object."""
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); is this a Hugging Face folder?"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{path}: is not JSON ({error}); was it written to the end?") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: holds a JSON {type(values).__name__}, expected an object")
        return cls(str(path), values)

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise CheckpointError: the value of `key` is not what is `expected`."""
        value = repr(self._values[key]) if key in self._values else "missing"
        raise CheckpointError(f"{self._name}: {key} is {value}, {expected}")

    def has(self, key: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the field is present and null."""
        return key in self._values and self._values[key] is None

    def keys(self) -> set[str]:
        """Names of the fields that are not null."""
        return {key for key in self._values if self.has(key)}

    def whole(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least `low`."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self.refuse(key, f"expected a whole number of at least {low}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0) -> float:
        """A finite number of at least `low`."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= sys.float_info.max:
            self.refuse(key, f"expected a number of at least {low:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            self.refuse(key, "expected a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings, or None if absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(key, "expected a list of strings")
        return value

    def token_ids(self, key: str) -> frozenset[int]:
        """One token id or a list of them; empty if absent."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            self.refuse(key, "expected a token id or a list of them")
        return frozenset(ids)

    def inner(self, key: str) -> Mapping[str, object]:
        """A JSON object; empty if absent."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.refuse(key, "expected an object")
        return value
