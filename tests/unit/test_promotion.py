"""Promotion: shared arrivals, deadlines, falling back to the next tier, and every hold given back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fakes import SteppedTiers, chain_hashes, keystream

from kvtier.block import Tier
from kvtier.io.base import Operation
from kvtier.promotion import Fetch

HASHES = chain_hashes(range(80))
"""Ten blocks of one chain."""


@pytest.fixture
def tiers(tmp_path: Path) -> SteppedTiers:
    return SteppedTiers(tmp_path, hbm=12, dram=16, nvme=16)


def push_down(tiers: SteppedTiers, count: int, to: Tier) -> None:
    """Compute the first blocks of the chain, then leave them on `to` only."""
    tiers.store.release(tiers.compute(HASHES[:count]))
    tiers.drain(Tier.HBM)
    if to is Tier.NVME:
        tiers.drain(Tier.DRAM)


def fetch_of(tiers: SteppedTiers, count: int, now: float = 0.0) -> Fetch:
    fetch = tiers.store.fetch(HASHES[:count], count, now)
    assert fetch is not None
    return fetch


def test_a_run_over_three_tiers_comes_back_with_each_block_s_own_origin(tiers: SteppedTiers) -> None:
    push_down(tiers, 3, Tier.NVME)
    tiers.store.release(tiers.compute(HASHES[3:5], first=3))
    tiers.drain(Tier.HBM)
    tiers.store.release(tiers.compute(HASHES[5:7], first=5))
    slots, origins = tiers.take(HASHES)
    assert origins == [Tier.NVME] * 3 + [Tier.DRAM] * 2 + [Tier.HBM] * 2
    tiers.store.check(Counter(slots))


def test_two_fetches_share_one_read_of_each_block(tiers: SteppedTiers) -> None:
    push_down(tiers, 4, Tier.DRAM)
    first, second = fetch_of(tiers, 4), fetch_of(tiers, 3)
    assert second.slots == first.slots[:3] and tiers.io[Tier.DRAM].in_flight == 4
    tiers.settle(0.0)
    for fetch, count in ((first, 4), (second, 3)):
        slots, origins = tiers.store.settle(fetch)
        assert origins == [Tier.DRAM] * count
        tiers.store.release(slots)
    tiers.store.check(Counter())


def test_what_comes_after_the_deadline_is_a_miss_for_the_fetch_and_a_hit_for_the_next(tiers: SteppedTiers) -> None:
    push_down(tiers, 3, Tier.DRAM)
    tiers.io[Tier.DRAM].hanging = {Operation.READ}
    fetch = fetch_of(tiers, 3, now=10.0)
    assert not fetch.is_ready(14.9) and fetch.is_ready(15.0)
    slots, origins = tiers.store.settle(fetch)
    assert (slots, origins) == ([], [])
    tiers.store.check(Counter())
    tiers.store.publish_metrics()
    assert tiers.metrics.shelf_failures.value("dram", "late") == 3
    assert tiers.metrics.shelf_failures.value("nvme", "late") == 0
    assert tiers.store.available_count == 12 - 3, "the slots still belong to the reads"
    tiers.io[Tier.DRAM].hanging.clear()
    tiers.settle(20.0)
    assert tiers.store.available_count == 12
    assert tiers.take(HASHES[:3], 20.0)[1] == [Tier.HBM] * 3


def test_a_block_computed_while_its_late_read_is_under_way_is_taken_from_hbm(tiers: SteppedTiers) -> None:
    push_down(tiers, 1, Tier.DRAM)
    tiers.io[Tier.DRAM].hanging = {Operation.READ}
    tiers.store.settle(fetch_of(tiers, 1))
    computed = tiers.compute(HASHES[:1])
    fetch = fetch_of(tiers, 1)
    assert fetch.is_ready(0.0)
    slots, origins = tiers.store.settle(fetch)
    assert (slots, origins) == (computed, [Tier.HBM])
    tiers.io[Tier.DRAM].hanging.clear()
    tiers.settle(1.0)
    tiers.store.check(Counter(computed + slots))
    tiers.store.release(computed + slots)
    tiers.store.check(Counter())


def test_a_block_computed_by_another_before_its_read_ends_counts_once_and_leaks_nothing(tiers: SteppedTiers) -> None:
    push_down(tiers, 2, Tier.DRAM)
    fetch = fetch_of(tiers, 2)
    computed = tiers.compute(HASHES[:2])
    tiers.settle(0.0)
    slots, origins = tiers.store.settle(fetch)
    assert slots == computed and origins == [Tier.DRAM] * 2
    tiers.store.check(Counter(slots + computed))


@pytest.mark.parametrize("place", [100, 5000], ids=["header", "row"])
def test_a_row_corrupted_in_dram_is_read_from_nvme_instead(tiers: SteppedTiers, place: int) -> None:
    push_down(tiers, 3, Tier.DRAM)
    record = tiers.shelves[Tier.DRAM].find(HASHES[1:2])[0]
    tiers.corrupt(Tier.DRAM, record.slot, place)
    slots, origins = tiers.take(HASHES[:3])
    assert origins == [Tier.DRAM, Tier.NVME, Tier.DRAM]
    tiers.store.check(Counter(slots))
    tiers.store.publish_metrics()
    assert tiers.metrics.shelf_failures.value("dram", "bad_row") == 1


def test_a_row_bad_on_every_tier_shortens_the_run_to_what_came_before(tiers: SteppedTiers) -> None:
    push_down(tiers, 4, Tier.DRAM)
    for tier in (Tier.DRAM, Tier.NVME):
        tiers.corrupt(tier, tiers.shelves[tier].find(HASHES[2:3])[0].slot, 4096)
    slots, origins = tiers.take(HASHES[:4])
    assert origins == [Tier.DRAM] * 2
    tiers.store.check(Counter(slots))
    assert tiers.take(HASHES[:4])[1] == [Tier.HBM] * 2


def test_nothing_is_claimed_when_the_slots_are_not_there(tiers: SteppedTiers) -> None:
    push_down(tiers, 3, Tier.DRAM)
    held = tiers.store.allocate(8)
    assert held is not None
    assert tiers.store.fetch(HASHES[:3], 5, 0.0) is None
    assert tiers.io[Tier.DRAM].in_flight == 0
    tiers.store.check(Counter(held))
    assert tiers.store.fetch(HASHES[:3], 4, 0.0) is not None


def test_an_abandoned_read_ends_by_itself_and_leaves_its_block_in_hbm(tiers: SteppedTiers) -> None:
    push_down(tiers, 3, Tier.NVME)
    tiers.store.abandon(fetch_of(tiers, 3))
    tiers.store.check(Counter())
    tiers.settle(0.0)
    assert tiers.take(HASHES[:3])[1] == [Tier.HBM] * 3


def test_reads_that_no_shelf_takes_are_lost_at_once(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=0, nvme=8, late_s=1.0)
    push_down(tiers, 4, Tier.NVME)
    tiers.io[Tier.NVME].hanging = {Operation.READ}
    tiers.store.settle(fetch_of(tiers, 3, now=0.0))
    for now in (0.0, 2.0):  # three late reads in a row open the breaker
        tiers.store.poll(now)
    fetch = fetch_of(tiers, 4, now=2.0)
    assert 3 in range(len(fetch.slots)) and 3 not in fetch.pending and fetch.origins[3] is None
    assert tiers.store.settle(fetch) == ([], [])
    tiers.store.check(Counter())


def test_promoted_blocks_of_nvme_get_a_row_in_dram_again(tiers: SteppedTiers) -> None:
    push_down(tiers, 2, Tier.NVME)
    assert not tiers.shelves[Tier.DRAM].holds(HASHES[0])
    slots, _ = tiers.take(HASHES[:2])
    tiers.settle(0.0)
    assert all(tiers.shelves[Tier.DRAM].holds(block_hash) for block_hash in HASHES[:2])
    assert [bytes(tiers.arena.view(slot)) for slot in slots] == [keystream(block_hash) for block_hash in HASHES[:2]]


def test_a_read_later_than_anybody_would_wait_is_joined_by_nobody_and_ends_the_run(tiers: SteppedTiers) -> None:
    push_down(tiers, 4, Tier.DRAM)
    tiers.io[Tier.DRAM].hanging = {Operation.READ}
    tiers.store.abandon(fetch_of(tiers, 2, now=10.0))
    joined = fetch_of(tiers, 4, now=14.9)
    assert set(joined.pending) == {0, 1, 2, 3}
    tiers.store.abandon(joined)
    alone = fetch_of(tiers, 4, now=15.0)
    assert alone.slots == [] and alone.is_ready(15.0)
    tiers.store.check(Counter())


def test_lateness_is_counted_against_the_tier_that_was_read_last(tiers: SteppedTiers) -> None:
    push_down(tiers, 2, Tier.DRAM)
    tiers.io[Tier.NVME].hanging = {Operation.READ}
    tiers.corrupt(Tier.DRAM, tiers.shelves[Tier.DRAM].find(HASHES[:1])[0].slot, 4096)
    fetch = fetch_of(tiers, 2, now=10.0)
    tiers.settle_all_but_hung(10.0)
    assert set(fetch.pending) == {0}
    assert tiers.store.settle(fetch) == ([], [])
    tiers.store.publish_metrics()
    late = {tier: tiers.metrics.shelf_failures.value(tier, "late") for tier in ("dram", "nvme")}
    assert late == {"dram": 0, "nvme": 1}


def test_a_shelf_s_own_late_transfers_are_counted_with_it(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=12, dram=16, nvme=16, late_s=1.0)
    tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    tiers.compute(HASHES[:3])
    for now in (0.0, 0.0, 0.0, 2.0):
        tiers.store.poll(now)
        tiers.step()
    for _ in range(2):
        tiers.store.publish_metrics()
    late = {tier: tiers.metrics.shelf_failures.value(tier, "late") for tier in ("dram", "nvme")}
    assert late == {"dram": 0, "nvme": 3}
