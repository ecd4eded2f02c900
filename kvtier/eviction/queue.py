"""The order of eviction of one tier: uses of the blocks that are here, and those of them that may go.

Keyed by block hash; knows no slot and no bytes. Single-threaded, reads no clock: its time is the latest it was told.
Used by the HBM prefix index and by the directory of every shelf.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.block import BlockHash
from kvtier.eviction.base import BlockUse, EvictionPolicy, PolicyMaker
from kvtier.eviction.ghosts import Ghosts
from kvtier.eviction.order import SLACK, Order


class EvictionQueue:
    """Blocks of a tier in the order of its policy, those of a lower priority always first.

    A use costs O(log n) and O(1) when noted, an eviction O(log n), a call that evicts O(groups) besides. Blocks may
    have an owner, whose own can be asked for in the same order at the same price.
    """

    def __init__(self, policy: PolicyMaker, capacity: int, owner_capacity: int = 0) -> None:
        """Capacities in blocks, of the tier and of an owner in it: more are never here at once."""
        self._policy: EvictionPolicy = policy(capacity)
        self._capacity = capacity
        self._owner_capacity = owner_capacity or capacity
        self._ghosts = Ghosts(int(self._policy.ghost_share * capacity))
        self._uses: dict[BlockHash, BlockUse] = {}
        self._stamps: dict[BlockHash, int] = {}
        """Of the candidates: the stamp of the entry that holds."""
        self._order = Order(self._policy, capacity, self._stamps)
        self._unowned = (self._order,)
        self._owners: dict[BlockHash, bytes] = {}
        self._orders: dict[bytes, tuple[Order, set[BlockHash]]] = {}
        """Of each owner: the order of its candidates, and all its blocks."""
        self._stamp = 0
        self._notes: list[tuple[tuple[BlockHash, ...], float, int]] = []
        """(chain, when, uses to count) not applied yet."""
        self._noted_count = 0
        self._now = 0.0

    def __len__(self) -> int:
        """Candidates."""
        return len(self._stamps)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether a block is a candidate."""
        return block_hash in self._stamps

    def candidate_count(self, owner: bytes) -> int:
        """Candidates of an owner; 0 if nothing here has that owner."""
        _, blocks = self._orders.get(owner, (None, ()))
        return sum(block_hash in self._stamps for block_hash in blocks)

    def insert(
        self, block_hash: BlockHash, depth: int, now: float, priority: int = 0, owner: bytes | None = None
    ) -> None:
        """A block is here from now on, used once more than was known; no candidate yet."""
        assert block_hash not in self._uses and len(self._uses) < self._capacity
        if self._notes:
            self._apply_notes()
        if now > self._now:
            self._now = now
        ghost = self._ghosts.take(block_hash) if self._policy.ghost_share else None
        if ghost is None:
            use = BlockUse(depth, now, 1, priority)
            use.group = self._policy.group(use)
            self._policy.learn(None, 0.0, use.group)
        else:
            use = BlockUse(depth, *ghost, priority)
            use.group = self._policy.group(use)
            self._count(use, use.uses + 1, now)
            use.last_use = now
        self._uses[block_hash] = use
        if owner is not None:
            self._owners[block_hash] = owner
            if owner not in self._orders:
                self._orders[owner] = Order(self._policy, self._owner_capacity, self._stamps), set()
            self._orders[owner][1].add(block_hash)

    def touch(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note a use of a chain, or of its first blocks; those that are not here are passed over."""
        self._note(hashes, now, 1)

    def stamp(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Note when a chain was last used, which is no further use of it: when it is let go, or written late."""
        self._note(hashes, now, 0)

    def use_of(self, block_hash: BlockHash) -> BlockUse:
        """The record of a block that is here; not to be changed."""
        self._apply_notes()
        return self._uses[block_hash]

    def set_idle(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks are candidates from now on."""
        stamps = self._stamps
        self._add([block_hash for block_hash in dict.fromkeys(hashes) if block_hash not in stamps])

    def set_busy(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks are no candidates any more."""
        for block_hash in hashes:
            self._discard(block_hash, self._uses[block_hash])

    def prioritize(self, block_hash: BlockHash, priority: int) -> None:
        """Give a block that is here another priority; nothing else about it changes."""
        self._apply_notes()
        use = self._uses[block_hash]
        candidate = block_hash in self._stamps
        self._discard(block_hash, use)
        use.priority = priority
        if candidate:
            self._add([block_hash])

    def remove(self, block_hash: BlockHash) -> None:
        """A block is gone, candidate or not. What is known of it is remembered for a while."""
        self._apply_notes()
        use = self._uses.pop(block_hash)
        self._discard(block_hash, use)
        self._forget(block_hash, use)

    def pop(self, count: int, owner: bytes | None = None) -> list[BlockHash]:
        """Remove up to `count` candidates, or those of an owner, first to go first; fewer if there are not as many."""
        order = self._order if owner is None else self._order_of(owner)
        if count <= 0 or order is None:
            return []
        self._apply_notes()
        taken = order.take(count, self._now)
        stamps, uses, owners, remember = self._stamps, self._uses, self._owners, self._ghosts.put
        remembers = self._policy.ghost_share > 0
        for _, (_, _, _, block_hash) in taken:
            del stamps[block_hash]
            use = uses.pop(block_hash)
            if block_hash in owners:
                for other in self._orders_of(block_hash):
                    if other is not order:
                        other.discard(use)
                self._forget(block_hash, use)
            elif remembers:
                remember(block_hash, use.last_use, use.uses)
        order.taken_out(taken)
        return [entry[3] for _, entry in taken]

    def coldest(self, count: int) -> list[BlockHash]:
        """What `pop` would remove now, left in place."""
        if count <= 0:
            return []
        self._apply_notes()
        taken = self._order.take(count, self._now)
        self._order.put_back(taken)
        return [entry[3] for _, entry in taken]

    def check(self) -> None:
        """Assert every invariant; costs a walk over all entries."""
        assert self._stamps.keys() <= self._uses.keys() and len(self._uses) <= self._capacity
        assert self._noted_count == sum(len(chain) for chain, _, _ in self._notes) <= self._capacity + SLACK
        live = self._order.check(self._uses)
        assert len(live) == len(self._stamps) and set(live) == self._stamps.keys()
        owned: dict[BlockHash, bytes] = {}
        for owner, (order, blocks) in self._orders.items():
            mine = order.check(self._uses)
            assert len(mine) == len(set(mine)) and set(mine) == blocks & self._stamps.keys(), owner
            assert blocks, "an owner of nothing is kept"
            owned |= dict.fromkeys(blocks, owner)
        assert owned == self._owners and owned.keys() <= self._uses.keys()

    def _note(self, hashes: Sequence[BlockHash], now: float, uses: int) -> None:
        if self._noted_count + len(hashes) > self._capacity:
            self._apply_notes()
        self._notes.append((tuple(hashes), now, uses))
        self._noted_count += len(hashes)
        self._now = max(self._now, now)

    def _apply_notes(self) -> None:
        """Bring uses and order up to date. A block has at least the uses and the priority of those behind it.

        Used it was, and only forgetting can have hidden it; a low priority may be from before others built on it.
        Without these rules one such block would go early, and with it all that stand on it.
        """
        if not self._notes:
            return
        find, stamps = self._uses.get, self._stamps
        for chain, now, uses in self._notes:
            most, highest = 0, None
            for block_hash in reversed(chain):
                use = find(block_hash)
                if use is None:
                    continue
                candidate = block_hash in stamps
                if candidate:
                    for order in self._orders_of(block_hash):
                        order.loosen(use)
                most = max(most, use.uses + uses)
                if most != use.uses:
                    self._count(use, most, now if uses else use.last_use)
                use.last_use = now
                if highest is None or use.priority > highest:
                    highest = use.priority
                else:
                    use.priority = highest
                if candidate:
                    self._add([block_hash])
        self._notes.clear()
        self._order.clean()
        for order, _ in self._orders.values():
            order.clean()
        self._noted_count = 0

    def _count(self, use: BlockUse, uses: int, now: float) -> None:
        """A use at `now` after which a block has `uses`."""
        left = use.group
        use.uses = uses
        use.group = self._policy.group(use)
        self._policy.learn(left, max(now - use.last_use, 0.0), use.group)

    def _add(self, hashes: Sequence[BlockHash]) -> None:
        """New entries for blocks that have none that holds."""
        stamp, stamps, uses, owners, add = self._stamp, self._stamps, self._uses, self._owners, self._order.add
        for block_hash in hashes:
            use = uses[block_hash]
            stamp += 1
            stamps[block_hash] = stamp
            entry = (use.last_use, -use.depth, stamp, block_hash)
            add(use, entry)
            if block_hash in owners:
                self._orders[owners[block_hash]][0].add(use, entry)
        self._stamp = stamp

    def _discard(self, block_hash: BlockHash, use: BlockUse) -> None:
        if self._stamps.pop(block_hash, None) is not None:
            for order in self._orders_of(block_hash):
                order.discard(use)

    def _forget(self, block_hash: BlockHash, use: BlockUse) -> None:
        """A block is no candidate and gone."""
        self._ghosts.put(block_hash, use.last_use, use.uses)
        owner = self._owners.pop(block_hash, None) if self._owners else None
        if owner is not None:
            blocks = self._orders[owner][1]
            blocks.remove(block_hash)
            if not blocks:
                del self._orders[owner]

    def _order_of(self, owner: bytes) -> Order | None:
        found = self._orders.get(owner)
        return None if found is None else found[0]

    def _orders_of(self, block_hash: BlockHash) -> tuple[Order, ...]:
        """Every order that a block stands in."""
        owner = self._owners.get(block_hash)
        return self._unowned if owner is None else (self._order, self._orders[owner][0])
