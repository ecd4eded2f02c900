"""The index of sealed blocks in HBM: hash -> slot, with the idle ones in eviction order.

Pure books, single-threaded, owned by the store, time is an argument. Knows nothing of holds or bytes: the store says
when a slot becomes idle (nobody holds it) and busy again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.block import BlockHash
from kvtier.eviction import BlockUse, EvictionPolicy, EvictionQueue


@dataclass(slots=True)
class _Entry:
    block_hash: BlockHash
    use: BlockUse
    idle: bool = False


class PrefixIndex:
    """Sealed blocks by content. Each hash has one slot and each slot one hash."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._slots: dict[BlockHash, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._queue: EvictionQueue[int] = EvictionQueue(policy)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def idle_count(self) -> int:
        """Sealed blocks that nobody holds."""
        return len(self._queue)

    def find(self, block_hash: BlockHash) -> int | None:
        """Slot of a sealed block."""
        return self._slots.get(block_hash)

    def hash_of(self, slot: int) -> BlockHash | None:
        """Hash of a slot's block, None if it is not sealed."""
        entry = self._entries.get(slot)
        return entry.block_hash if entry else None

    def depth_of(self, slot: int) -> int:
        """Place of a sealed block in its chain."""
        return self._entries[slot].use.depth

    def last_use(self, slot: int) -> float:
        """When a sealed block was last used, in monotonic seconds."""
        return self._entries[slot].use.last_use

    def insert(self, block_hash: BlockHash, slot: int, depth: int, now: float) -> None:
        """Index a sealed block that somebody holds. The hash must be new: see `find`."""
        assert block_hash not in self._slots and slot not in self._entries
        self._slots[block_hash] = slot
        self._entries[slot] = _Entry(block_hash, BlockUse(depth, now))

    def touch(self, slots: Sequence[int], now: float) -> None:
        """Note a use of sealed blocks; returns nothing, re-ranks idle ones."""
        for slot in slots:
            entry = self._entries[slot]
            entry.use.last_use = now
            entry.use.uses += 1
            if entry.idle:
                self._queue.add(slot, entry.use)

    def set_idle(self, slots: Sequence[int]) -> None:
        """These sealed blocks may be evicted from now on."""
        for slot in slots:
            entry = self._entries[slot]
            entry.idle = True
            self._queue.add(slot, entry.use)

    def set_busy(self, slots: Sequence[int]) -> None:
        """These sealed blocks are held again. Unsealed slots are passed over."""
        for slot in slots:
            entry = self._entries.get(slot)
            if entry is not None and entry.idle:
                entry.idle = False
                self._queue.discard(slot)

    def coldest(self, count: int) -> list[int]:
        """The first idle slots in eviction order."""
        return self._queue.coldest(count)

    def remove(self, slot: int) -> BlockHash:
        """Forget a sealed block; its slot is the caller's to free."""
        entry = self._entries.pop(slot)
        del self._slots[entry.block_hash]
        self._queue.discard(slot)
        return entry.block_hash

    def evict(self) -> int | None:
        """Forget the coldest idle block and return its slot; None if there is none."""
        slot = self._queue.pop()
        if slot is not None:
            del self._slots[self._entries.pop(slot).block_hash]
        return slot

    def check(self) -> None:
        """Assert that both directions agree and that exactly the idle blocks are candidates."""
        assert len(self._slots) == len(self._entries)
        for slot, entry in self._entries.items():
            assert self._slots[entry.block_hash] == slot
            assert entry.idle == (slot in self._queue), slot
