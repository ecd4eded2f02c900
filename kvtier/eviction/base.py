"""The contract of eviction policies, and what they may know of a block.

A policy puts blocks into a few groups and says what keeping a group's longest unused block is worth. It reads no clock,
knows no slot and keeps no block: the queue asks it, and tells it of each use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class BlockUse:
    """What policies may know of a block."""

    depth: int
    """Place in its chain: 0 for the block that holds the first tokens."""
    last_use: float
    """Monotonic seconds."""
    uses: int = 1
    """Requests that used it, the one that made it included; never fewer than those of a block behind it."""
    priority: int = 0
    """Higher stays longer, whatever the policy says."""
    group: int = 0
    """As the policy said at the last use."""


class EvictionPolicy(Protocol):
    """Ranks the blocks of one tier: the lowest value goes first; of equal ones the longest unused, then the deepest.

    Two rules bind every policy. A value MUST NOT grow with age, so that a group's first is its longest unused. And a
    block MUST NOT be worth less than one behind it in its chain that was last used together with it, since only leading
    runs count; a policy may rely on the former having at least as many uses.
    """

    name: str
    ghost_share: float
    """How many blocks that are gone shall be remembered, as a multiple of the tier's capacity."""

    def group(self, use: BlockUse) -> int:
        """The group of a block that was used like this."""

    def value(self, group: int, age_s: float, share: float) -> float:
        """Worth of keeping a candidate of a group, unused for `age_s` and one of `share` x capacity."""

    def learn(self, left: int | None, idle_s: float, entered: int) -> None:
        """A block was used and `entered` a group, after `idle_s` in group `left`, kept till then or not (None: new)."""


PolicyMaker = Callable[[int], EvictionPolicy]
"""Makes the policy of one tier from its capacity in blocks. Tiers never share one: each learns from its own blocks."""
