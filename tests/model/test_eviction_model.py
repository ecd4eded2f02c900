"""Random operations on the queue of every policy against an oracle that compares all candidates; `check()` each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvtier.eviction import POLICIES, BlockUse, EvictionPolicy, EvictionQueue
from tests.rows import block_hashes

CHAINS = [block_hashes(6, chain) for chain in range(8)]
OWNERS = (None, b"a", b"b")
OWNER_OF = {block_hash: OWNERS[number % 3] for number, chain in enumerate(CHAINS) for block_hash in chain}
OWNER_CAPACITY = 5


@dataclass
class Oracle:
    """The same rules, kept the slow and obvious way: all candidates are compared at each eviction."""

    policy: EvictionPolicy
    capacity: int
    uses: dict[bytes, BlockUse] = field(default_factory=dict)
    idle: set[bytes] = field(default_factory=set)
    ghosts: dict[int, tuple[bytes, float, int]] = field(default_factory=dict)
    now: float = 0.0

    def insert(self, block_hash: bytes, depth: int, now: float, priority: int) -> None:
        self.now = max(self.now, now)
        mark, last_use, uses = self.ghosts.get(self.place(block_hash), (b"", now, 0))
        if mark == block_hash:
            del self.ghosts[self.place(block_hash)]
            use = self.uses[block_hash] = BlockUse(depth, last_use, uses, priority)
            use.group = self.policy.group(use)
            self.count(use, uses + 1, now)
            use.last_use = now
        else:
            use = self.uses[block_hash] = BlockUse(depth, now, 1, priority)
            use.group = self.policy.group(use)
            self.policy.learn(None, 0.0, use.group)

    def note(self, chain: list[bytes], now: float, uses: int) -> None:
        self.now = max(self.now, now)
        most, highest = 0, -1000
        for block_hash in reversed(chain):
            if block_hash in self.uses:
                use = self.uses[block_hash]
                use.priority = highest = max(use.priority, highest)
                most = max(most, use.uses + uses)
                if most > use.uses:
                    self.count(use, most, now if uses else use.last_use)
                use.last_use = now

    def count(self, use: BlockUse, uses: int, now: float) -> None:
        left, use.uses = use.group, uses
        use.group = self.policy.group(use)
        self.policy.learn(left, max(now - use.last_use, 0.0), use.group)

    def place(self, block_hash: bytes) -> int:
        return int.from_bytes(block_hash[:8], "little") % max(int(self.policy.ghost_share * self.capacity), 1)

    def remove(self, block_hash: bytes) -> None:
        use = self.uses.pop(block_hash)
        self.idle.discard(block_hash)
        if self.policy.ghost_share:
            self.ghosts[self.place(block_hash)] = (block_hash, use.last_use, use.uses)

    def candidates(self, owner: bytes | None) -> set[bytes]:
        return {one for one in self.idle if owner is None or OWNER_OF[one] == owner}

    def key(self, block_hash: bytes, owner: bytes | None = None) -> tuple[float, ...]:
        use = self.uses[block_hash]
        peers = [self.uses[other] for other in self.candidates(owner)]
        members = sum((other.priority, other.group) == (use.priority, use.group) for other in peers)
        share = members / (self.capacity if owner is None else OWNER_CAPACITY)
        value = self.policy.value(use.group, max(self.now - use.last_use, 0.0), share)
        return (use.priority, value, use.last_use, -use.depth)

    def coldest(self, owner: bytes | None) -> tuple[float, ...] | None:
        return min((self.key(block_hash, owner) for block_hash in self.candidates(owner)), default=None)


class Machine:
    """One run: the same random operation on both."""

    def __init__(self, name: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.capacity = self.chance.randint(4, 24)
        self.queue = EvictionQueue(POLICIES[name], self.capacity, OWNER_CAPACITY)
        self.oracle = Oracle(POLICIES[name](self.capacity), self.capacity)
        self.chains = CHAINS
        self.now = 0.0
        self.evicted = self.returned = self.evicted_for_owners = 0

    def step(self) -> None:
        self.now += self.chance.choice([0.0, 0.0, 0.1, 3.0, 40.0])
        self.chance.choice(
            [self.insert, self.insert, self.use, self.use, self.hold, self.let_go, self.pop, self.drop, self.prefer]
        )()
        assert len(self.queue) == len(self.oracle.idle)
        self.queue.check()

    def chain(self) -> list[bytes]:
        return self.chance.choice(self.chains)[: self.chance.randint(1, 6)]

    def insert(self) -> None:
        for depth, block_hash in enumerate(self.chain()):
            if block_hash in self.oracle.uses:
                continue
            if len(self.oracle.uses) == self.capacity:
                self.pop()
            if len(self.oracle.uses) < self.capacity:
                self.returned += self.oracle.ghosts.get(self.oracle.place(block_hash), (b"",))[0] == block_hash
                priority = int(self.chance.random() < 0.1)
                self.queue.insert(block_hash, depth, self.now, priority, OWNER_OF[block_hash])
                self.oracle.insert(block_hash, depth, self.now, priority)
                self.queue.set_idle([block_hash])
                self.oracle.idle.add(block_hash)

    def use(self) -> None:
        chain, back_s = self.chain(), self.chance.choice([0.0, 0.0, 5.0])
        if self.chance.random() < 0.6:
            self.queue.touch(chain, self.now)
            self.oracle.note(chain, self.now, 1)
        else:
            self.queue.stamp(chain, self.now - back_s)
            self.oracle.note(chain, self.now - back_s, 0)
        for block_hash in chain:
            if block_hash in self.oracle.uses and self.chance.random() < 0.2:
                assert self.queue.use_of(block_hash) == self.oracle.uses[block_hash]

    def hold(self) -> None:
        here = [block_hash for block_hash in self.chain() if block_hash in self.oracle.uses]
        self.queue.set_busy(here)
        self.oracle.idle -= set(here)

    def let_go(self) -> None:
        here = [block_hash for block_hash in self.chain() if block_hash in self.oracle.uses]
        self.queue.set_idle(here)
        self.oracle.idle |= set(here)

    def prefer(self) -> None:
        for block_hash in self.chain():
            if block_hash in self.oracle.uses and self.chance.random() < 0.1:
                priority = self.chance.randrange(-1, 3)
                self.queue.prioritize(block_hash, priority)
                self.oracle.uses[block_hash].priority = priority

    def drop(self) -> None:
        if self.oracle.uses and self.chance.random() < 0.3:
            block_hash = self.chance.choice(sorted(self.oracle.uses))
            self.queue.remove(block_hash)
            self.oracle.remove(block_hash)

    def pop(self) -> None:
        count = self.chance.choice([0, 1, 1, 2, 5])
        owner = self.chance.choice([None, None, b"a", b"b"])
        foreseen = self.queue.coldest(count)
        gone = self.queue.pop(count, owner)
        assert len(gone) == min(count, len(self.oracle.candidates(owner)))
        assert owner is not None or gone == foreseen
        for block_hash in gone:
            assert block_hash in self.oracle.candidates(owner), "evicted what was in use, or another's"
            assert self.oracle.key(block_hash, owner) == self.oracle.coldest(owner), "not the coldest"
            self.oracle.remove(block_hash)
        self.evicted += len(gone)
        self.evicted_for_owners += len(gone) if owner is not None else 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_queue_agrees_with_the_oracle_whatever_happens(name: str) -> None:
    evicted = returned = evicted_for_owners = 0
    for seed in range(12):
        machine = Machine(name, seed)
        for _ in range(700):
            machine.step()
        evicted += machine.evicted
        returned += machine.returned
        evicted_for_owners += machine.evicted_for_owners
    assert evicted > 1000 and evicted_for_owners > 300, "the runs must evict, or they prove nothing"
    assert (returned > 300) == (POLICIES[name](1).ghost_share > 0), "and meet ghosts again"
