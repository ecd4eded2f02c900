"""The books of HBM as one thing: slots with holds (`SlotPool`) and sealed blocks by content (`PrefixIndex`).

Owned by the store, single-threaded. A slot is held by sequences, arrivals and writes in flight; when the last hold
goes, a sealed block stays as an eviction candidate and an unsealed one is freed. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.eviction import PolicyMaker
from kvtier.pool import SlotPool
from kvtier.prefix import PrefixIndex
from kvtier.retention import PLAIN, Retention


class ResidentBlocks:
    """Allocation, holds, sealing and eviction of HBM slots."""

    def __init__(self, slot_count: int, policy: PolicyMaker) -> None:
        self._pool = SlotPool(slot_count)
        self._prefix = PrefixIndex(policy, slot_count)
        self.evicted_count = 0
        self.expired_count = 0

    @property
    def slot_count(self) -> int:
        """Slots of the arena."""
        return self._pool.slot_count

    @property
    def available_count(self) -> int:
        """Slots that `allocate` could give now: free ones and idle blocks."""
        return self._pool.free_count + self._prefix.idle_count

    @property
    def used_count(self) -> int:
        """Slots that hold a block, idle ones included."""
        return self._pool.slot_count - self._pool.free_count

    @property
    def sealed_count(self) -> int:
        """Blocks in the prefix index."""
        return len(self._prefix)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots with one hold each, evicting idle blocks as needed; None if there are not as many."""
        if count > self.available_count:
            return None
        evicted = self._prefix.evict(count - self._pool.free_count)
        self._pool.free(evicted)
        self.evicted_count += len(evicted)
        return self._pool.allocate(count)

    def find(self, block_hash: BlockHash) -> int | None:
        """Slot of a sealed block, held or idle."""
        return self._prefix.find(block_hash)

    def hash_of(self, slot: int) -> BlockHash | None:
        """Hash of a slot's sealed block."""
        return self._prefix.hash_of(slot)

    def depth_of(self, slot: int) -> int:
        """Place of a slot's sealed block in its chain."""
        return self._prefix.depth_of(slot)

    def last_use(self, slot: int) -> float:
        """When a slot's sealed block was last used."""
        return self._prefix.last_use(slot)

    def retention_of(self, slot: int) -> Retention:
        """What is asked for a slot's sealed block."""
        return self._prefix.retention_of(slot)

    def holds(self, slot: int) -> int:
        """How many hold a slot."""
        return self._pool.holds(slot)

    def hold(self, slots: Sequence[int]) -> None:
        """One more hold on each slot (held or idle, never free)."""
        self._pool.retain(slots)
        self._prefix.set_busy(slots)

    def touch(self, slots: Sequence[int], now: float) -> None:
        """Note a use of sealed blocks."""
        self._prefix.touch(slots, now)

    def stamp(self, slots: Sequence[int], now: float) -> None:
        """Note when sealed blocks were last used; no further use of them."""
        self._prefix.stamp(slots, now)

    def release(self, slots: Sequence[int]) -> None:
        """One hold less on each; the last one makes a sealed block idle and frees an unsealed slot."""
        idle = self._pool.release(slots)
        sealed = [slot for slot in idle if self._prefix.hash_of(slot) is not None]
        self._prefix.set_idle(sealed)
        if len(sealed) < len(idle):
            self._pool.free([slot for slot in idle if self._prefix.hash_of(slot) is None])

    def retain(self, hashes: Sequence[BlockHash], retention: Retention) -> None:
        """Raise what is asked for those of these blocks that are here."""
        self._prefix.retain(hashes, retention)

    def expire(self, unix_s: float) -> None:
        """What must not be found any more is not: a slot is freed with its last hold."""
        slots = self._prefix.expire(unix_s)
        self.expired_count += len(slots)
        self._pool.free([slot for slot in slots if self._pool.holds(slot) == 0])

    def seal(self, slot: int, block_hash: BlockHash, depth: int, now: float, retention: Retention = PLAIN) -> int:
        """Give a held, full block its hash. If the content is there already, the hold moves to that slot, returned."""
        existing = self._prefix.find(block_hash)
        if existing is None:
            self._prefix.insert(block_hash, slot, depth, now, retention)
            return slot
        self._prefix.retain([block_hash], retention)
        if existing != slot:
            self.hold([existing])
            self.release([slot])
        return existing

    def coldest(self, count: int) -> list[int]:
        """The first idle slots in eviction order."""
        return self._prefix.coldest(count)

    def evict(self, slots: Sequence[int]) -> None:
        """Forget these idle blocks and free their slots."""
        for slot in slots:
            assert self._pool.holds(slot) == 0
            self._prefix.remove(slot)
            self.evicted_count += 1
        self._pool.free(slots)

    def check(self, held: dict[int, int] | None = None) -> None:
        """Assert the books; with `held` (slot -> holds of everyone) also that no hold is lost or forgotten."""
        self._pool.check()
        self._prefix.check()
        assert self._pool.free_count + self._prefix.idle_count <= self._pool.slot_count
        if held is not None:
            for slot in range(self._pool.slot_count):
                assert self._pool.holds(slot) == held.get(slot, 0), (slot, self._pool.holds(slot), held.get(slot, 0))
