"""Uses of blocks that an engine has yet to tell the keeper of: noted one by one, sent in batches.

Bounded, and the first thing to wait when the line is busy: a use that is not told costs a rank in eviction. Owned by
shared.py, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.keeper.fields import pieces
from kvtier.keeper.link import Link
from kvtier.keeper.wire import Touch

TOUCH_S = 0.1
"""Uses are sent in batches that far apart."""
USES_MAX = 65536
"""Blocks whose uses wait to be told; those of more are forgotten."""
CHAINS_MAX = 1024
"""And chains, each of which is a message: so many at once leave room in the line's queue."""
BUSY_BACKLOG = 16
"""Uses are not told while so many messages wait already."""


class Uses:
    """See the module."""

    def __init__(self, tier_index: int, link: Link) -> None:
        self._tier_index = tier_index
        self._link = link
        self._uses: list[tuple[Sequence[BlockHash], float, bool]] = []
        self._count = 0
        self._told_at = 0.0

    def __len__(self) -> int:
        return len(self._uses)

    def note(self, hashes: Sequence[BlockHash], at: float, counts: bool) -> None:
        """Blocks of a chain were last used at `at`; `counts`: it was one more use of them."""
        if hashes and len(self._uses) < CHAINS_MAX and self._count + len(hashes) <= USES_MAX:
            self._uses.append((list(hashes), at, counts))
            self._count += len(hashes)

    def tell(self, now: float) -> None:
        """Send what was noted, unless that was done just now or the line is busy."""
        if not self._uses or now - self._told_at < TOUCH_S or self._link.client.backlog > BUSY_BACKLOG:
            return
        self._told_at = now
        uses, self._uses, self._count = self._uses, [], 0
        for hashes, at, counts in uses:
            for piece in pieces(hashes):
                self._link.send(Touch(self._tier_index, at, counts, piece))
