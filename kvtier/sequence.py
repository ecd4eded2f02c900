"""A sequence: one request inside the engine, from admission to its last token.

Owns its tokens, their block hashes and its table of slots. Plain state, changed by the scheduler only; knows neither
store nor tensors. The engine hangs the request's caller-side state on `context`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.block import BlockHash, Tier
from kvtier.namespace import HashChain
from kvtier.record import Record
from kvtier.request import FinishReason, Origin
from kvtier.retention import PLAIN, Retention

Rank = tuple[int, int]
"""(priority level, arrival number): the smaller goes first and yields last."""


class SequenceState(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Has no slots: new, or preempted."""
    FETCHING = "fetching"
    """Waits for cold blocks of its prefix; of a streamed sequence, for any that it comes to."""
    RUNNING = "running"
    """Takes part in passes."""
    FINISHED = "finished"


class BlockTable:
    """Where each block of a sequence lies: in a slot of HBM, or in a row on a shelf; with addresses for the kernels."""

    def __init__(self) -> None:
        self.slots: list[int | None] = []
        """Slot of HBM of each block; None: its row lies on a shelf."""
        self.held_count = 0
        """Blocks in slots of HBM."""
        self.staged_count = 0
        """Blocks whose rows have no address: they are staged for each pass."""
        self._addresses: NDArray[np.int64] = np.zeros(16, np.int64)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def addresses(self) -> NDArray[np.int64]:
        """int64 [block]: base address of each row; 0 where it has none."""
        return self._addresses[: len(self.slots)]

    @property
    def held(self) -> list[int]:
        """The slots of HBM, in the order of their blocks."""
        return [slot for slot in self.slots if slot is not None]

    def extend(self, slots: list[int], addresses: list[int]) -> None:
        """Append blocks that lie in HBM."""
        self._append(slots, addresses)
        self.held_count += len(slots)

    def append_row(self, address: int) -> None:
        """Append a block whose row lies on a shelf, at an address or at none (0)."""
        self._append([None], [address])
        self.staged_count += address == 0

    def replace(self, index: int, slot: int, address: int) -> None:
        """The content of a block in HBM lies in another slot from now on."""
        assert self.slots[index] is not None
        self.slots[index] = slot
        self._addresses[index] = address

    def lower(self, index: int, address: int) -> int:
        """A block in HBM lies in a row on a shelf from now on; returns its slot."""
        slot = self.slots[index]
        assert slot is not None
        self.slots[index] = None
        self._addresses[index] = address
        self.held_count -= 1
        self.staged_count += address == 0
        return slot

    def cut(self, count: int) -> list[int]:
        """Keep the first `count` blocks; returns the slots of the others."""
        slots = [slot for slot in self.slots[count:] if slot is not None]
        self.staged_count -= int(np.count_nonzero(self.addresses[count:] == 0))
        self.held_count -= len(slots)
        del self.slots[count:]
        return slots

    def clear(self) -> list[int]:
        """Empty the table; returns the slots it held."""
        return self.cut(0)

    def _append(self, slots: Items[int | None], addresses: list[int]) -> None:
        needed = len(self.slots) + len(slots)
        if needed > len(self._addresses):
            grown = np.zeros(max(needed, 2 * len(self._addresses)), np.int64)
            grown[: len(self.slots)] = self.addresses
            self._addresses = grown
        self._addresses[len(self.slots) : needed] = addresses
        self.slots.extend(slots)


@dataclass(eq=False, slots=True)
class Sequence:
    """One running generation. `tokens` is prompt + output; KV exists for the first `computed_count` of them."""

    number: int
    """Unique and growing: the arrival number."""
    priority: int
    tokens: list[int]
    prompt_count: int
    output_max: int
    stop_ids: frozenset[int]
    chain: HashChain
    context: object
    """The engine's own: caller, text stream, sampler state."""
    retention: Retention = PLAIN
    """What it asks for its blocks; a pin is for those of the prompt."""
    cache_read: bool = True
    """Whether it may use blocks that are there already."""
    cache_write: bool = True
    """Whether its blocks are sealed, so that others find them."""
    streamed: bool = False
    """Its context is larger than the HBM that one sequence can count on."""
    pinned: bool = False
    """A suspended pass over it is under way: its blocks stay where they are, and it stays in its state."""
    state: SequenceState = SequenceState.WAITING
    table: BlockTable = field(default_factory=BlockTable)
    hashes: list[BlockHash] = field(default_factory=list)
    sealed_count: int = 0
    """Leading blocks that are sealed."""
    computed_count: int = 0
    finish_reason: FinishReason | None = None
    origin_counts: dict[str, int] = field(default_factory=lambda: {"hbm": 0, "dram": 0, "nvme": 0, "computed": 0})
    reused_blocks: int = 0
    allocated_blocks: int = 0
    preempted_count: int = 0
    stalled_since: float | None = None
    """When it was first refused slots that transfers still hold."""

    @property
    def rank(self) -> Rank:
        """Order of service."""
        return (self.priority, self.number)

    @property
    def output_count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_count

    @property
    def remaining_count(self) -> int:
        """Tokens that have no KV yet: 1 while decoding, more during prefill."""
        return len(self.tokens) - self.computed_count

    @property
    def origin(self) -> Origin:
        """Where the KV of the prompt came from."""
        return Origin(**self.origin_counts)

    def attribute(self, count: int, tier: Tier | None) -> None:
        """The next `count` tokens have KV now, from `tier` or computed (None). Each prompt token counts once only."""
        counted = sum(self.origin_counts.values())
        fresh = min(self.computed_count + count, self.prompt_count) - max(counted, self.computed_count)
        if fresh > 0:
            self.origin_counts[tier.value if tier else "computed"] += fresh
        self.computed_count += count


def rank_of(sequence: Sequence) -> Rank:
    """`Sequence.rank`, as a sort key."""
    return sequence.rank


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part in a pass: its tokens `start .. start + count`; the last one is sampled from if `samples`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StagedPart:
    """A part for a suspended pass: some blocks before it lie on NVMe and are staged, a few layers at a time."""

    part: ScheduledSequence
    records: list[Record]
    """The rows to stage, under lease: those of the blocks whose address in the sequence's table is 0, in order."""
    expected: list[Record]
    """The rows that the suspended pass after this one is likely to stage; none if that is not known."""
