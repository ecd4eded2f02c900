"""A sequence: one request inside the engine, from admission to its last token.

Owns its tokens, their block hashes and its table of slots. Plain state, changed by the scheduler only; knows neither
store nor tensors. The engine hangs the request's caller-side state on `context`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.block import BlockHash, Tier
from kvtier.namespace import HashChain
from kvtier.request import FinishReason, Origin

Rank = tuple[int, int]
"""(priority level, arrival number): the smaller goes first and yields last."""


class SequenceState(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Has no slots: new, or preempted."""
    FETCHING = "fetching"
    """Waits for cold blocks of its prefix."""
    RUNNING = "running"
    """Takes part in passes."""
    FINISHED = "finished"


class BlockTable:
    """Slots of a sequence's blocks, with their row addresses ready for the kernels."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self._addresses: NDArray[np.int64] = np.zeros(16, np.int64)

    @property
    def addresses(self) -> NDArray[np.int64]:
        """int64 [block]: base address of each row."""
        return self._addresses[: len(self.slots)]

    def extend(self, slots: list[int], addresses: list[int]) -> None:
        """Append blocks."""
        needed = len(self.slots) + len(slots)
        if needed > len(self._addresses):
            grown = np.zeros(max(needed, 2 * len(self._addresses)), np.int64)
            grown[: len(self.slots)] = self.addresses
            self._addresses = grown
        self._addresses[len(self.slots) : needed] = addresses
        self.slots.extend(slots)

    def replace(self, index: int, slot: int, address: int) -> None:
        """The content of a block lies in another slot from now on."""
        self.slots[index] = slot
        self._addresses[index] = address

    def clear(self) -> list[int]:
        """Empty the table; returns the slots it held."""
        slots, self.slots = self.slots, []
        return slots


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


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part in a pass: its tokens `start .. start + count`; the last one is sampled from if `samples`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
