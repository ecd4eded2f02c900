"""Homes of one streamed sequence: the rows on shelves in which its blocks lie, or will.

Books only: what was found or written and is leased, what is on its way, which rows were asked for and are unused. Knows
neither shelf nor sequence; `HandDown` changes it, the streams ask it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.block import BlockHash, Tier
from kvtier.record import Grant, Lease
from kvtier.retention import Retention

RETRY_S = 0.05
"""What could not be had is asked for again after this long."""

Question = tuple[Tier, int]
"""A shelf and the number that it gave."""


class Home(NamedTuple):
    """The leased row of a block."""

    tier: Tier
    lease: Lease
    address: int
    """In DRAM: where it is attended in place. 0 on NVMe, from where it is staged."""
    private: bool
    """Nobody else finds it, and it is dropped with the last use."""


class MoveStage(enum.Enum):
    """How far a block is on its way to its home."""

    WAITING = "waiting"
    """For a row, for room, or for somebody else who writes the same block."""
    ASKED = "asked"
    """For a lease on a row that is there already."""
    LEASED = "leased"
    """That row is to be judged once the sequence has all the rows that it lacks."""
    VERIFYING = "verifying"
    """It is judged in place."""
    WRITING = "writing"


COMING = (MoveStage.ASKED, MoveStage.WRITING)
"""A row is about to be its home."""


@dataclass(eq=False, slots=True)
class Move:
    """A block on its way to its home."""

    homes: Homes
    index: int
    block_hash: BlockHash
    slot: int | None
    """Where its bytes are, held; None: it lies on a shelf already, or will be computed."""
    retention: Retention
    started_at: float
    stage: MoveStage = MoveStage.WAITING
    tier: Tier | None = None
    """Of the row that is asked for, verified or written."""
    lease: Lease | None = None
    """Until that has been judged."""
    lease_lost: bool = False
    retry_at: float = 0.0
    private_hash: BlockHash | None = None
    """What its row is called if a block of its name is there already, which its sequence does not use."""

    @property
    def private(self) -> bool:
        """Nobody else is to find its row."""
        return self.homes.private and self.slot is not None and self.private_hash is None

    def hide(self) -> None:
        """A block of its name is there already."""
        assert self.private_hash is not None
        self.block_hash, self.private_hash = self.private_hash, None


@dataclass(eq=False, slots=True)
class Homes:
    """See the module."""

    needed: int
    """So many leading blocks must find a home; the others stay in HBM."""
    tenant: bytes
    private: bool
    """Its blocks go down into rows of its own, whatever others have."""
    found: dict[int, Home] = field(default_factory=dict)
    """By the block's place in the sequence."""
    moves: dict[int, Move] = field(default_factory=dict)
    rows: dict[Tier, list[Grant]] = field(default_factory=lambda: {Tier.DRAM: [], Tier.NVME: []})
    """Asked for and unused."""
    prefix: Sequence[BlockHash] = ()
    """Of its leading blocks, of which NVMe may have some, until those are leased."""
    begun: bool = False
    """It keeps what it has when it cannot have more."""
    refused: bool = False
    """The rows that it lacks could not be had when they were asked for last."""
    asking: bool = False
    """A question for rows is under way."""
    dram_asked: bool = False
    """DRAM has given what it has; the rest is NVMe's."""
    retry_at: float = 0.0
    lost: set[int] = field(default_factory=set)
    """Blocks whose leases are lost; they are to be given up."""
    unreadable: list[Home] = field(default_factory=list)
    """Rows that could not be read; held so that nobody is given their places while there are others."""
    closed: bool = False
    covered: int = 0
    """Homes of leading blocks."""
    writing: int = 0
    """Rows that were asked for and are being written."""

    @property
    def lacking(self) -> int:
        """Rows to ask for; negative: to give back. What is leased counts before it is judged, if it is judged last."""
        leased = sum(move.stage is MoveStage.LEASED and move.index < self.needed for move in self.moves.values())
        return self.needed - self.covered - leased - self.writing - sum(map(len, self.rows.values()))

    @property
    def is_leasing(self) -> bool:
        """It is not known yet which of the blocks that are on a shelf already can be had."""
        return any(move.slot is None and move.stage is not MoveStage.LEASED for move in self.moves.values())

    @property
    def is_looking(self) -> bool:
        """Blocks that are on a shelf already are being leased, or judged."""
        return any(move.slot is None for move in self.moves.values())

    def next_known(self, index: int) -> int:
        """The first block from `index` on that has a home or is on its way to one."""
        return min((known for known in (*self.found, *self.moves) if known >= index), default=sys.maxsize)

    def put(self, index: int, home: Home) -> None:
        """A block has found its home."""
        assert index not in self.found
        self.found[index] = home
        self.covered += index < self.needed

    def take(self, index: int) -> Home:
        """A block has no home any more."""
        self.covered -= index < self.needed
        self.lost.discard(index)
        return self.found.pop(index)

    def count_of(self, tier: Tier) -> int:
        """Rows of a tier that it has, writes or asks to lease."""
        coming = sum(move.stage in COMING and move.tier is tier for move in self.moves.values())
        return sum(home.tier is tier for home in self.found.values()) + len(self.rows[tier]) + coming

    def held(self, tier: Tier) -> int:
        """Rows of a tier that are asked for and unused, or leased."""
        leased = sum(home.tier is tier for home in {*self.found.values(), *self.unreadable})
        return leased + len(self.rows[tier])

    def awaited(self) -> list[Tier]:
        """Tiers that have rows for blocks in HBM, and into which these have yet to be written."""
        moves = [move for move in self.moves.values() if move.slot is not None]
        writing = {move.tier for move in moves if move.stage is MoveStage.WRITING}
        kept = any(move.stage is MoveStage.WAITING for move in moves)
        return [tier for tier, grants in self.rows.items() if tier in writing or (kept and grants)]

    def waiting(self) -> Iterator[Move]:
        """Moves that have yet to begin, the oldest block first."""
        waiting = [move for move in self.moves.values() if move.stage is MoveStage.WAITING]
        return iter(sorted(waiting, key=lambda move: move.index))

    def check(self) -> None:
        """Assert the books."""
        assert self.covered == sum(index < self.needed for index in self.found)
        assert self.writing == sum(move.stage is MoveStage.WRITING for move in self.moves.values())
        assert not self.found.keys() & self.moves.keys() and self.lost <= self.found.keys()
        assert all(move.index == index and move.homes is self for index, move in self.moves.items())
        unjudged = (MoveStage.LEASED, MoveStage.VERIFYING)
        assert all((move.lease is not None) == (move.stage in unjudged) for move in self.moves.values())
