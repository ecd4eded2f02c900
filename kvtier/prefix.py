"""The index of sealed blocks in HBM: hash -> slot, with the idle ones in eviction order.

Pure books, single-threaded, owned by the store, time is an argument. Knows nothing of holds or bytes: the store says
when a slot becomes idle (nobody holds it) and busy again.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.eviction import EvictionQueue, PolicyMaker


class PrefixIndex:
    """Sealed blocks by content. Each hash has one slot and each slot one hash."""

    def __init__(self, policy: PolicyMaker, slot_count: int) -> None:
        self._slots: dict[BlockHash, int] = {}
        self._hashes: dict[int, BlockHash] = {}
        self._queue = EvictionQueue(policy, slot_count)

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
        return self._hashes.get(slot)

    def depth_of(self, slot: int) -> int:
        """Place of a sealed block in its chain."""
        return self._queue.use_of(self._hashes[slot]).depth

    def last_use(self, slot: int) -> float:
        """When a sealed block was last used, in monotonic seconds."""
        return self._queue.use_of(self._hashes[slot]).last_use

    def insert(self, block_hash: BlockHash, slot: int, depth: int, now: float) -> None:
        """Index a sealed block that somebody holds. The hash must be new: see `find`."""
        assert block_hash not in self._slots and slot not in self._hashes
        self._slots[block_hash] = slot
        self._hashes[slot] = block_hash
        self._queue.insert(block_hash, depth, now)

    def touch(self, slots: Sequence[int], now: float) -> None:
        """Note a use of sealed blocks: a chain, or its first blocks."""
        self._queue.touch([self._hashes[slot] for slot in slots], now)

    def stamp(self, slots: Sequence[int], now: float) -> None:
        """Note when a chain was last used; no further use of it."""
        self._queue.stamp([self._hashes[slot] for slot in slots], now)

    def set_idle(self, slots: Sequence[int]) -> None:
        """These sealed blocks may be evicted from now on."""
        self._queue.set_idle([self._hashes[slot] for slot in slots])

    def set_busy(self, slots: Sequence[int]) -> None:
        """These sealed blocks are held again. Unsealed slots are passed over."""
        self._queue.set_busy([self._hashes[slot] for slot in slots if slot in self._hashes])

    def coldest(self, count: int) -> list[int]:
        """The first idle slots in eviction order."""
        return [self._slots[block_hash] for block_hash in self._queue.coldest(count)]

    def remove(self, slot: int) -> BlockHash:
        """Forget a sealed block; its slot is the caller's to free."""
        block_hash = self._hashes.pop(slot)
        del self._slots[block_hash]
        self._queue.remove(block_hash)
        return block_hash

    def evict(self, count: int) -> list[int]:
        """Forget the coldest idle blocks and return their slots; fewer if there are not as many."""
        slots = [self._slots.pop(block_hash) for block_hash in self._queue.pop(count)]
        for slot in slots:
            del self._hashes[slot]
        return slots

    def check(self) -> None:
        """Assert that both directions agree, and the order of eviction."""
        assert len(self._slots) == len(self._hashes)
        for slot, block_hash in self._hashes.items():
            assert self._slots[block_hash] == slot
            self._queue.use_of(block_hash)
        self._queue.check()
