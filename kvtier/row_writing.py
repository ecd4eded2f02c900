"""Writing the blocks of streamed sequences from HBM into the rows that were asked for.

Knows which moves are under way and what their ends say of the rows; what becomes of a block then is the hand-down's.
Owned by `HandDown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.block import Tier
from kvtier.homes import RETRY_S, Homes, Move, MoveStage
from kvtier.metrics import Metrics
from kvtier.shelf import Shelf, ShelfDone, ShelfOutcome, WriteItem
from kvtier.tiers.arena import Arena


class RowWriting:
    """See the module. Its length is that of the blocks under way."""

    def __init__(self, shelves: Mapping[Tier, Shelf], arena: Arena, metrics: Metrics) -> None:
        self._shelves = shelves
        self._arena = arena
        self._metrics = metrics
        self._moves: dict[tuple[Tier, int], Move] = {}
        """By ticket."""

    def __len__(self) -> int:
        return len(self._moves)

    def slots(self, since: float) -> list[int]:
        """Slots of HBM of the blocks that set out after `since`."""
        return [move.slot for move in self._moves.values() if move.slot is not None and move.started_at > since]

    def start(self, homes: Homes, tier: Tier, moves: Sequence[Move], now: float) -> None:
        """Write blocks into rows that were asked for; those that the shelf does not take now are tried again."""
        shelf, grants = self._shelves[tier], homes.rows[tier]
        items = [
            WriteItem(move.block_hash, move.index, self._arena.view(move.slot), None, move.retention, grant=grant)
            for move, grant in zip(moves, grants, strict=False)
            if move.slot is not None
        ]
        assert len(items) == len(moves)
        tickets = shelf.write(items, now)
        homes.rows[tier] = grants[len(items) :]
        for move, item, ticket in zip(moves, items, tickets, strict=True):
            if ticket is None:
                assert item.grant is not None
                homes.rows[tier].append(item.grant)
                move.retry_at = now + RETRY_S
            else:
                move.stage, move.tier = MoveStage.WRITING, tier
                homes.writing += 1
                self._moves[(tier, ticket)] = move

    def completed(self, tier: Tier, done: ShelfDone) -> Move | None:
        """The block whose write has ended, leased if it is there; None if it was none of these writes."""
        move = self._moves.pop((tier, done.ticket), None)
        if move is None:
            return None
        move.stage = MoveStage.WAITING
        move.homes.writing -= 1
        assert (done.lease is not None) == (done.outcome is ShelfOutcome.DONE)
        if done.lease is not None:
            self._metrics.moved(Tier.HBM, tier, 1, done.moved_bytes)
            self._metrics.transfer_seconds.observe(done.duration_ns / 1e9, Tier.HBM.value, tier.value)
        return move
