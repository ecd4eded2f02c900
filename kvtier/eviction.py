"""Eviction policies as sort keys, and the queue that keeps candidates in their order.

A policy maps the use record of a block to a key: the smallest goes first. Used by the HBM prefix index and by the
directory of every shelf; single-threaded, reads no clock (time is an argument).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

SortKey = tuple[float, ...]
Item = TypeVar("Item")


@dataclass(slots=True)
class BlockUse:
    """What policies may know of a block."""

    depth: int
    """Place in its chain: 0 for the block that holds the first tokens."""
    last_use: float
    """Monotonic seconds."""
    uses: int = 0
    priority: int = 0
    """Higher stays longer."""


class EvictionPolicy(Protocol):
    """Ranks blocks. MUST rank a block before its parent when both were last used together: only leading runs count."""

    name: str

    def key(self, use: BlockUse) -> SortKey:
        """Sort key of a block; the smallest is evicted first."""


class LeastRecentlyUsed:
    """Oldest use first; within one use (a whole chain is touched at once) the deepest block first."""

    name = "lru"

    def key(self, use: BlockUse) -> SortKey:
        """(priority, last use, -depth)."""
        return (use.priority, use.last_use, -use.depth)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed}


class EvictionQueue(Generic[Item]):
    """Candidates for eviction in policy order. Add, discard and pop cost O(log n); stale heap entries are skipped."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries: dict[Item, int] = {}
        self._heap: list[tuple[SortKey, int, Item]] = []
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def add(self, item: Item, use: BlockUse) -> None:
        """Make `item` a candidate, or re-rank it."""
        self._stamp += 1
        self._entries[item] = self._stamp
        heapq.heappush(self._heap, (self._policy.key(use), self._stamp, item))
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """`item` is no candidate any more (in use, pinned or gone)."""
        self._entries.pop(item, None)

    def pop(self) -> Item | None:
        """Take the first candidate out, None if there is none."""
        while self._heap:
            _, stamp, item = heapq.heappop(self._heap)
            if self._entries.get(item) == stamp:
                del self._entries[item]
                return item
        return None

    def coldest(self, count: int) -> list[Item]:
        """The first `count` candidates in order, left in place."""
        live = (entry for entry in self._heap if self._entries.get(entry[2]) == entry[1])
        return [entry[2] for entry in heapq.nsmallest(count, live)]
