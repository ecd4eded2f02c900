"""The reuse policy: LRU before it knows anything, then it keeps what earns its space, and follows a changing load."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.eviction import POLICIES, EvictionQueue, ExpectedReuse, LeastRecentlyUsed
from kvtier.eviction.ages import BUCKET_COUNT, EDGES_S, WIDTHS_S, bucket_of, reuse_index
from kvtier.eviction.ghosts import Ghosts
from tests.rows import block_hashes


def test_every_age_has_the_bucket_whose_edges_hold_it() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        age_s = rng.choice([0.0, 10 ** rng.uniform(-3, 8)])
        assert bucket_of(age_s) == min(int(np.searchsorted(EDGES_S, age_s, side="right")), BUCKET_COUNT - 1), age_s
    assert WIDTHS_S.sum() == pytest.approx(EDGES_S[-1])


def naive_index(reuses: list[float], entries: float, start: int) -> float:
    """By the definition: the best, over when to give up, of expected reuses over expected seconds."""
    best, used, spent_s = 0.0, 0.0, 0.0
    left = entries - sum(reuses[:start])
    for bucket in range(start, BUCKET_COUNT):
        used += reuses[bucket]
        spent_s += (left + left - reuses[bucket]) / 2 * WIDTHS_S[bucket]
        left -= reuses[bucket]
        best = max(best, used / spent_s)
    return best


def test_the_index_is_the_best_rate_over_all_times_to_give_up() -> None:
    rng = np.random.default_rng(5)
    reuses = rng.uniform(0, 4, (3, BUCKET_COUNT))
    entries = reuses.sum(axis=1) + np.array([1.0, 50.0, 2000.0])
    index = reuse_index(reuses, entries)
    for group in range(3):
        for start in range(BUCKET_COUNT):
            expected = naive_index(reuses[group].tolist(), float(entries[group]), start)
            assert index[group, start] == pytest.approx(expected, rel=1e-9)


def test_before_it_has_learned_it_is_lru() -> None:
    rng = random.Random(2)
    queues = [EvictionQueue(policy, 60) for policy in (ExpectedReuse, LeastRecentlyUsed)]
    hashes = block_hashes(60)
    for queue in queues:
        for depth, block_hash in enumerate(hashes):
            queue.insert(block_hash, depth, 0.0)
            queue.set_idle([block_hash])
    now = 0.0
    for _ in range(200):
        now += rng.choice([0.01, 0.5, 20.0])
        chain = rng.sample(hashes, 3)
        for queue in queues:
            queue.touch(chain, now)
    assert queues[0].pop(60) == queues[1].pop(60)


def teach(policy: ExpectedReuse, group: int, ages_s: list[float], others: int) -> None:
    """Blocks of a group of which some came back at these ages and the others never."""
    for age_s in ages_s:
        policy.learn(None, 0.0, group)
        policy.learn(group, age_s, min(group + 1, 4))
    for _ in range(others):
        policy.learn(None, 0.0, group)


def test_what_comes_back_soon_is_worth_more_than_what_seldom_does() -> None:
    policy = ExpectedReuse(1000)
    teach(policy, 0, [30.0] * 50, others=2000)
    teach(policy, 2, [30.0] * 1000, others=100)
    assert policy.value(2, 1.0, 0.0) > 3 * policy.value(0, 1.0, 0.0)
    assert policy.value(2, 200.0, 0.0) < policy.value(0, 20.0, 0.0), "overdue"


def test_neither_more_uses_nor_youth_make_a_block_worth_less() -> None:
    rng = random.Random(4)
    policy = ExpectedReuse(1000)
    for _ in range(30):
        teach(policy, rng.randrange(5), [10 ** rng.uniform(-1, 4)] * rng.randrange(200), rng.randrange(200))
    table = np.array([[policy.value(group, float(age_s), 0.0) for age_s in EDGES_S] for group in range(5)])
    assert (np.diff(table, axis=0) >= 0).all() and (np.diff(table, axis=1) <= 0).all()
    assert (np.diff(table, axis=0) > 0).any()


def test_old_lessons_fade() -> None:
    policy = ExpectedReuse(1024)
    teach(policy, 0, [10.0] * 8000, others=0)
    before = policy.value(0, 5.0, 0.0)
    for _ in range(12):
        teach(policy, 0, [], others=16 * 1024)
    assert policy.value(0, 5.0, 0.0) < before / 1000


def replay(name: str, seed: int) -> int:
    """Leading hits of 150 conversations of some turns each, among prompts that never come back."""
    rng = random.Random(seed)
    queue = EvictionQueue(POLICIES[name], 400)
    here: set[bytes] = set()
    turns: list[tuple[float, int, int]] = []  # (when, conversation, turn)
    for conversation in range(150):
        when = rng.uniform(0, 3000)
        for turn in range(1 + rng.randrange(8)):
            turns.append((when, conversation, turn))
            when += rng.uniform(20, 90)
    turns += [(rng.uniform(0, 3000), 1000 + number, 9) for number in range(1500)]
    hits = 0
    for now, conversation, turn in sorted(turns):
        chain = block_hashes(4 + 2 * turn, conversation)
        found = [block_hash in here for block_hash in chain]
        hits += (*found, False).index(False)
        queue.touch(chain, now)
        gone = queue.pop(found.count(False) - (400 - len(here)))
        here -= set(gone)
        for depth, block_hash in enumerate(chain):
            if not found[depth]:
                queue.insert(block_hash, depth, now)
                queue.set_idle([block_hash])
        here.update(chain)
        queue.stamp(chain, now)
    return hits


def test_conversations_among_prompts_that_never_come_back_hit_more_than_under_lru() -> None:
    reuse, lru = (replay(name, seed=1) for name in ("reuse", "lru"))
    assert reuse > 1.25 * lru > 0


def test_ghosts_remember_until_a_later_block_takes_their_place() -> None:
    ghosts = Ghosts(64)
    hashes = block_hashes(200)
    for number, block_hash in enumerate(hashes):
        ghosts.put(block_hash, float(number), number)
    found = {number: ghosts.take(block_hash) for number, block_hash in enumerate(hashes)}
    known = {number: ghost for number, ghost in found.items() if ghost is not None}
    assert 40 < len(known) <= 64 and all(ghost == (float(number), number) for number, ghost in known.items())
    assert 199 in known and len(ghosts) == 0
    assert ghosts.take(hashes[199]) is None, "taken once"


def test_no_ghosts_where_a_policy_wants_none() -> None:
    ghosts = Ghosts(0)
    ghosts.put(b"a", 0.0, 1)
    assert ghosts.take(b"a") is None and len(ghosts) == 0
