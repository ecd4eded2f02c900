"""Asking the shelves for leases on rows that have a block already, and judging those in DRAM before they count.

Owned by `HandDown`, which passes answers and ends of transfers on and hears what came of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from kvtier.block import Tier
from kvtier.homes import RETRY_S, Homes, Move, MoveStage, Question
from kvtier.record import Lease, Record
from kvtier.retention import PLAIN
from kvtier.shelf import Shelf, ShelfDone, ShelfOutcome
from kvtier.ticket import Reply


class LeaseAsking:
    """See the module."""

    def __init__(
        self,
        shelves: Mapping[Tier, Shelf],
        found: Callable[[Move, Tier, Lease], None],
        missed: Callable[[Move, float], None],
    ) -> None:
        """`found(move, tier, lease)`: the row may be used; `missed(move, at)`: it may not, try again from `at` on."""
        self._shelves = shelves
        self._found = found
        self._missed = missed
        self._questions: dict[Question, list[Move]] = {}
        self._unjudged: list[Move] = []
        """Leased for sequences that may have to give everything back, and know that before anything is read."""
        self._judging: dict[tuple[Tier, int], Move] = {}
        """By ticket."""

    @property
    def judging_count(self) -> int:
        """Rows being judged."""
        return len(self._judging)

    def awaits(self, tier: Tier) -> bool:
        """A question to a shelf is unanswered."""
        return any(where is tier for where, _ in self._questions)

    def held(self, tier: Tier) -> int:
        """Leases on rows that are being judged, or will be."""
        return sum(where is tier for where, _ in self._judging) + sum(move.tier is tier for move in self._unjudged)

    def begin(self, homes: Homes, tier: Tier, records: Mapping[int, Record]) -> None:
        """Ask for rows that are to become the homes of blocks, by the blocks' places in the sequence."""
        moves = [Move(homes, index, record.block_hash, None, PLAIN, 0.0) for index, record in records.items()]
        homes.moves |= {move.index: move for move in moves}
        self.ask(tier, moves, list(records.values()))

    def ask(self, tier: Tier, moves: list[Move], records: Sequence[Record]) -> None:
        """Ask for the row of each of these blocks."""
        self._questions[(tier, self._shelves[tier].holdings.ask_leases(records))] = moves
        for move in moves:
            move.stage, move.tier = MoveStage.ASKED, tier

    def take(self, tier: Tier, reply: Reply, now: float) -> bool:
        """An answer; False if it is to somebody else's question. Rows on NVMe are judged whenever they are staged."""
        moves = self._questions.pop((tier, reply.number), None)
        if moves is None:
            return False
        assert reply.leases is not None
        judged: list[tuple[Move, Lease]] = []
        for move, lease in zip(moves, reply.leases, strict=True):
            move.stage = MoveStage.WAITING
            if lease is None:
                self._missed(move, now)
            elif tier is Tier.NVME or move.homes.closed:
                self._found(move, tier, lease)
            elif move.slot is None and not move.homes.begun:
                move.stage, move.lease, move.lease_lost = MoveStage.LEASED, lease, False
                self._unjudged.append(move)
            else:
                judged.append((move, lease))
        self._judge(tier, judged, now)
        return True

    def judge(self, homes: Homes, now: float) -> None:
        """All rows that a sequence lacks are there: have those judged that it has leased."""
        judged = [(move, lease) for move, lease in self._parting(homes) if not self._was_lost(move, lease, now)]
        if judged:
            self._judge(Tier.DRAM, judged, now)

    def leave(self, homes: Homes) -> None:
        """They are not wanted any more."""
        leases = [lease for _, lease in self._parting(homes)]
        if leases:
            self._shelves[Tier.DRAM].holdings.end_leases(leases)

    def completed(self, tier: Tier, done: ShelfDone, now: float) -> bool:
        """A row has been judged; False if it was none that was asked for here."""
        move = self._judging.pop((tier, done.ticket), None)
        if move is None:
            return False
        lease, move.lease, move.stage = move.lease, None, MoveStage.WAITING
        assert lease is not None
        if done.outcome is ShelfOutcome.DONE and not move.lease_lost:
            self._found(move, tier, lease)
        else:
            self._shelves[tier].holdings.end_leases([lease])
            dropped = done.outcome in (ShelfOutcome.BAD_ROW, ShelfOutcome.STALE)
            self._missed(move, now if dropped or move.lease_lost else now + RETRY_S)
        return True

    def lose(self, tier: Tier, lost: Set[Lease]) -> None:
        """These leases keep their rows no longer: what is judged now does not count."""
        for move in [*self._judging.values(), *self._unjudged]:
            move.lease_lost |= move.tier is tier and move.lease in lost

    def _parting(self, homes: Homes) -> list[tuple[Move, Lease]]:
        """The moves of a sequence that have leases on rows nobody has judged, as they were before, and those leases."""
        parting: list[tuple[Move, Lease]] = []
        for move in [move for move in self._unjudged if move.homes is homes]:
            assert move.lease is not None
            parting.append((move, move.lease))
            move.stage, move.lease = MoveStage.WAITING, None
        self._unjudged = [move for move in self._unjudged if move.homes is not homes]
        return parting

    def _was_lost(self, move: Move, lease: Lease, now: float) -> bool:
        if move.lease_lost:
            self._shelves[Tier.DRAM].holdings.end_leases([lease])
            self._missed(move, now)
        return move.lease_lost

    def _judge(self, tier: Tier, judged: Sequence[tuple[Move, Lease]], now: float) -> None:
        tickets = self._shelves[tier].verify([lease for _, lease in judged])
        for (move, lease), ticket in zip(judged, tickets, strict=True):
            if ticket is None:
                self._shelves[tier].holdings.end_leases([lease])
                self._missed(move, now + RETRY_S)
            else:
                move.stage, move.lease, move.lease_lost = MoveStage.VERIFYING, lease, False
                self._judging[(tier, ticket)] = move
