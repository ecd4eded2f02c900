"""HBM as store and shelves see it, whatever its device: rows by slot, their addresses, and ways to reach them.

`HbmArena` (hbm.py) is the CPU's, whose rows shelves read and write as they lie. Rows of another device are reached by
way of landing places in host memory, through a `Ferry`. Called from the engine thread.
"""

from __future__ import annotations

from typing import Protocol

from kvtier.block import KVLayout, Row


class Window(Protocol):
    """Host memory that passes reach in place, until `close`."""

    @property
    def address(self) -> int:
        """Where passes find its first byte; the rest lies behind it as in host memory."""

    def close(self) -> None:
        """No pass uses it any more, and the memory may go."""


class Ferry(Protocol):
    """Copies rows between slots and landing places in host memory. Nobody waits: a copy is started, then polled.

    MUST NOT name a copy as ended before its bytes are there and its source is needed no more. Copies may end in any
    order, and each begins after the passes that were started before it.
    """

    @property
    def memory(self) -> memoryview:
        """The landing places, 4 KiB aligned, a row each, at least two."""

    def start(self, place: int, slot: int, upward: bool) -> None:
        """Copy a landing place to a slot, or the slot to the place. Both are the copy's until it has ended."""

    def ended(self) -> list[int]:
        """Places of copies that have ended since the last call. Rings the engine's bell when there is more to come."""

    def close(self, deadline_s: float) -> bool:
        """Wait for the copies up to the deadline and give the memory back; False: some hang, and keep it."""


class Arena(Protocol):
    """`slot_count` rows of a layout."""

    @property
    def layout(self) -> KVLayout:
        """Of its rows."""

    @property
    def slot_count(self) -> int:
        """Rows."""

    @property
    def bytes_total(self) -> int:
        """Bytes of all rows."""

    def address(self, slot: int) -> int:
        """Where passes find a slot's row; valid until `close`."""

    def view(self, slot: int) -> Row:
        """What a shelf is given to read a row into, or to write it from."""

    def window(self, address: int, length: int) -> Window:
        """Let passes reach host memory, whose pages are all there and which outlives the window."""

    def ferry(self) -> Ferry | None:
        """A ferry of its own for a shelf; None: `view` gives the rows themselves."""

    def close(self) -> None:
        """Give the memory back; no pass and no transfer uses it any more."""
