"""What a step of check_gpu finds: a check that is right or not, or a speed; and how it is told to another process.

Knows no device and imports no torch.
"""

from __future__ import annotations

import json
from typing import NamedTuple


class Line(NamedTuple):
    """What came of one check."""

    name: str
    right: bool
    says: str

    def __str__(self) -> str:
        return f"{'ok   ' if self.right else 'WRONG'} {self.name}: {self.says}"


class Speed(NamedTuple):
    """One line of the table."""

    what: str
    gb_s: float
    limit: str = ""
    """Of what bounds it: another speed of the same run, by its `what`."""


class Mark(NamedTuple):
    """A step begins, has ended, or has failed and says why."""

    kind: str
    """`begin`, `end` or `failed`."""
    says: str


Message = Line | Speed | Mark


def to_text(message: Message) -> str:
    """One line of text."""
    return json.dumps([type(message).__name__, *message])


def of_text(text: str) -> Message | None:
    """What `to_text` has made into this line; None if it is something else that a library has printed."""
    try:
        name, *values = json.loads(text)
        return {kind.__name__: kind for kind in (Line, Speed, Mark)}[name](*values)
    except (ValueError, KeyError, TypeError):
        return None


def table(speeds: list[Speed]) -> list[str]:
    """Each speed beside its limit, where that was measured."""
    known = {speed.what: speed.gb_s for speed in speeds}
    rows = [f"{'what':<86} {'GB/s':>8} {'limit':>8} {'share':>6}  of"]
    for speed in speeds:
        limit = known.get(speed.limit, 0.0)
        beside = (
            f"{limit:>8.1f} {speed.gb_s / limit:>6.2f}  {speed.limit}" if limit else f"{'':>8} {'':>6}  {speed.limit}"
        )
        rows.append(f"{speed.what:<86} {speed.gb_s:>8.1f} {beside}".rstrip())
    return rows
