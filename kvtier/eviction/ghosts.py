"""What is remembered of blocks that are gone, in a fixed number of bytes.

Each hash has one place in a table, and the last block to go takes it: forgetting is by chance, slower the larger the
table. A mark is 64 bits of a hash, never 0; two blocks of one mark cost a wrong guess, nothing else. Used by the queue.
"""

from __future__ import annotations

from array import array

from kvtier.block import BlockHash

USES_MAX = 65535


class Ghosts:
    """Last use and number of uses of at most `limit` blocks: 18 bytes each, allocated at once."""

    def __init__(self, limit: int) -> None:
        """With `limit` 0 nothing is remembered."""
        self._limit = limit
        self._marks = array("Q", bytes(8 * limit))
        self._last_uses = array("d", bytes(8 * limit))
        self._uses = array("H", bytes(2 * limit))

    def __len__(self) -> int:
        return sum(mark != 0 for mark in self._marks)

    def put(self, block_hash: BlockHash, last_use: float, uses: int) -> None:
        """Remember a block."""
        if self._limit:
            mark = int.from_bytes(block_hash[:8], "little") or 1
            place = mark % self._limit
            self._marks[place] = mark
            self._last_uses[place] = last_use
            self._uses[place] = uses if uses < USES_MAX else USES_MAX

    def take(self, block_hash: BlockHash) -> tuple[float, int] | None:
        """(last use, uses) of a block if it is remembered; it is no ghost any more."""
        if not self._limit:
            return None
        mark = int.from_bytes(block_hash[:8], "little") or 1
        place = mark % self._limit
        if self._marks[place] != mark:
            return None
        self._marks[place] = 0
        return self._last_uses[place], self._uses[place]
