"""Promotion with a cost model that decides: what is left to be computed, how waits end, and how a tier comes back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fakes import LAYOUT, SteppedTiers, chain_hashes

from kvtier.block import BlockHash, Tier
from kvtier.cost import LoadPolicy, Work
from kvtier.fetch import Fetch
from kvtier.io.base import Operation
from kvtier.lane import PROBE_S
from kvtier.record import Record
from kvtier.shelf import Shelf

HASHES = chain_hashes(range(320))
"""Forty blocks of one chain."""
TOKEN_S = 0.01
"""A token to compute, so a block takes 80 ms, in the machine that the model has seen."""


def make(folder: Path, hbm: int = 48, dram: int = 0, nvme: int = 64, row_s: float = 0.001) -> SteppedTiers:
    """Tiers whose model has seen rows come every `row_s` seconds, and passes."""
    tiers = SteppedTiers(folder, hbm, dram, nvme, queue_max=64, load=LoadPolicy.AUTO, fetch_deadline_s=5.0)
    for count in range(1, 40):
        for tier in tiers.shelves:
            tiers.store.costs.learn_read(tier, count, row_s * count)
        tiers.store.costs.learn_pass(Work.of([(count, 8 * count)]), TOKEN_S * 8 * count)
    return tiers


def push_down(tiers: SteppedTiers, hashes: list[BlockHash], to: Tier, first: int = 0) -> None:
    tiers.store.release(tiers.compute(hashes, first=first))
    tiers.drain(Tier.HBM)
    if to is Tier.NVME and Tier.DRAM in tiers.shelves:
        tiers.drain(Tier.DRAM)


def fetch_of(tiers: SteppedTiers, count: int, now: float) -> Fetch:
    fetch = tiers.store.fetch(HASHES[:count], count, now)
    assert fetch is not None
    return fetch


def decisions(tiers: SteppedTiers, tier: str = "nvme") -> tuple[int, int]:
    counted = tiers.metrics.load_decisions
    return int(counted.value(tier, "load")), int(counted.value(tier, "recompute"))


def reads(tiers: SteppedTiers, tier: Tier = Tier.NVME) -> int:
    return sum(request.operation is Operation.READ for request in tiers.io[tier]._waiting)


def test_a_fast_disk_is_read_and_its_speed_and_foresight_are_published(tmp_path: Path) -> None:
    tiers = make(tmp_path)
    push_down(tiers, HASHES[:6], Tier.NVME)
    fetch = fetch_of(tiers, 6, 10.0)
    tiers.settle(10.006)
    assert tiers.store.settle(fetch)[1] == [Tier.NVME] * 6
    tiers.store.publish_metrics()
    assert decisions(tiers) == (6, 0)
    assert tiers.metrics.tier_read_speed.value("nvme") == pytest.approx(LAYOUT.row_bytes / 0.001, rel=0.2)
    assert tiers.metrics.prefill_speed.value() == pytest.approx(1 / TOKEN_S, rel=0.2)
    assert tiers.store.stats()["prefill_tokens_per_second"] == int(tiers.metrics.prefill_speed.value())
    [ratio] = [s for s in tiers.metrics.snapshot() if s.family is tiers.metrics.load_time_ratio.family and s.value]
    assert ratio.labels == ("nvme",) and ratio.value == pytest.approx(1.0, rel=0.2) and sum(ratio.bucket_counts) == 1


def test_a_slow_disk_is_left_alone_but_for_one_row_a_second_and_used_again_once_it_is_fast(tmp_path: Path) -> None:
    tiers = make(tmp_path, row_s=0.2)
    push_down(tiers, HASHES[:6], Tier.NVME)
    now = 10.0
    tries = 0
    while True:
        tries += 1
        assert tries < 10, "it never comes back"
        fetch = fetch_of(tiers, 6, now)
        if fetch.slots:
            break
        assert fetch.is_ready(now) and reads(tiers) == 1
        assert tiers.store.settle(fetch_of(tiers, 6, now)) == ([], [])
        assert reads(tiers) == 1, "one probe at a time"
        tiers.settle(now + 0.001)
        tiers.store.drain(Tier.HBM)  # so that the probed row is cold again
        tiers.store.check(Counter())
        now += 2 * PROBE_S
    assert 2 <= tries <= 5 and decisions(tiers) == (6, 11 * (tries - 1))
    tiers.settle(now)
    assert tiers.store.settle(fetch)[1] == [Tier.NVME] * 6


def test_a_probed_block_that_is_computed_meanwhile_counts_once(tmp_path: Path) -> None:
    tiers = make(tmp_path, row_s=0.2)
    push_down(tiers, HASHES[:2], Tier.NVME)
    tiers.store.settle(fetch_of(tiers, 2, 10.0))
    assert reads(tiers) == 1
    slots = tiers.compute(HASHES[:2], 10.1)
    tiers.settle(10.2)
    tiers.store.check(Counter(slots))


def test_nothing_is_probed_with_slots_that_the_sequence_needs(tmp_path: Path) -> None:
    tiers = make(tmp_path, hbm=6, row_s=0.2)
    push_down(tiers, HASHES[:2], Tier.NVME)
    assert tiers.store.fetch(HASHES[:2], 6, 10.0) is not None
    assert reads(tiers) == 0 and tiers.store.available_count == 6


def test_a_silent_disk_costs_a_tenth_of_computing_once_and_then_nothing(tmp_path: Path) -> None:
    tiers = make(tmp_path)
    push_down(tiers, HASHES[:40], Tier.NVME)
    fetch = fetch_of(tiers, 40, 10.0)
    tiers.io[Tier.NVME].hang(4)
    compute_s = 40 * 8 * TOKEN_S
    waited_s = fetch.deadline - 10.0
    assert 0.09 * compute_s < waited_s < 0.11 * compute_s
    assert not fetch.is_ready(fetch.deadline - 0.001)
    assert tiers.store.settle(fetch) == ([], [])
    tiers.store.poll(fetch.deadline)
    tiers.store.check(Counter())
    assert tiers.store.available_count == 48 - 4, "rows that only waited in the queue give their slots back"
    again = fetch_of(tiers, 40, 10.5)
    assert again.is_ready(10.5) and not again.slots, "nobody waits for it any more"
    assert reads(tiers) == 5 and decisions(tiers) == (40, 36), "but for a probe that nobody waits for"


def test_who_has_little_patience_does_not_take_the_queued_reads_of_others_along(tmp_path: Path) -> None:
    tiers = make(tmp_path, hbm=96)
    push_down(tiers, HASHES[:40], Tier.NVME)
    other = chain_hashes(range(1000, 1016))
    push_down(tiers, other, Tier.NVME)
    patient = fetch_of(tiers, 40, 10.0)
    hasty = tiers.store.fetch(other, 2, 10.0)
    assert hasty is not None and hasty.deadline < 10.1 < patient.deadline
    tiers.store.settle(hasty)
    tiers.settle(10.1)
    assert tiers.store.settle(patient)[1] == [Tier.NVME] * 40


def test_a_hung_disk_that_wakes_up_is_used_again(tmp_path: Path) -> None:
    tiers = make(tmp_path)
    push_down(tiers, HASHES[:4], Tier.NVME)
    tiers.io[Tier.NVME].hanging = {Operation.READ}
    tiers.store.settle(fetch_of(tiers, 4, 10.0))
    tiers.store.settle(fetch_of(tiers, 4, 11.0))
    tiers.io[Tier.NVME].hanging.clear()
    tiers.settle(70.0)
    tiers.drain(Tier.HBM)
    fetch = fetch_of(tiers, 4, 71.0)
    assert len(fetch.pending) == 4
    tiers.settle(71.002)
    assert tiers.store.settle(fetch)[1] == [Tier.NVME] * 4


def test_one_row_that_hangs_for_good_does_not_take_the_disk_away(tmp_path: Path) -> None:
    tiers = make(tmp_path)
    push_down(tiers, HASHES[:40], Tier.NVME)
    tiers.store.abandon(fetch_of(tiers, 1, 10.0))
    tiers.io[Tier.NVME].freeze()
    tiers.store.settle(fetch_of(tiers, 1, 10.0))
    now = 12.0
    assert not fetch_of(tiers, 40, now).slots and reads(tiers) == 2, "a probe of another row"
    tiers.settle_all_but_hung(now + 0.001)
    other = chain_hashes(range(1000, 1080))
    push_down_others(tiers, other)
    fetch = tiers.store.fetch(other, 10, now + 1)
    assert fetch is not None and len(fetch.pending) == 10 and fetch.deadline > now + 1.05
    tiers.settle_all_but_hung(now + 1.01)
    assert tiers.store.settle(fetch)[1] == [Tier.NVME] * 10


def push_down_others(tiers: SteppedTiers, hashes: list[BlockHash]) -> None:
    """As `push_down`, though a read hangs."""
    tiers.store.release(tiers.compute(hashes))
    for _ in range(4):
        tiers.settle_all_but_hung(12.0)
        if tiers.store.drain(Tier.HBM):
            return
    raise AssertionError("the drain never ends")


def test_as_long_as_rows_come_they_are_waited_for_up_to_what_computing_takes(tmp_path: Path) -> None:
    tiers = make(tmp_path)
    push_down(tiers, HASHES[:40], Tier.NVME)
    fetch = fetch_of(tiers, 40, 10.0)
    now, compute_s = 10.0, 40 * 8 * TOKEN_S
    while not fetch.is_ready(now):
        now += 0.2
        tiers.io[Tier.NVME].step(1)
        tiers.store.poll(now)
    assert now - 10.0 == pytest.approx(compute_s, rel=0.15)
    slots, origins = tiers.store.settle(fetch)
    assert len(fetch.pending) > 20 and set(origins) <= {Tier.NVME}
    tiers.store.check(Counter(slots))


def test_rows_of_another_tier_do_not_break_the_silence(tmp_path: Path) -> None:
    tiers = make(tmp_path, hbm=96, dram=64)
    push_down(tiers, HASHES[:20], Tier.NVME)
    push_down(tiers, HASHES[20:40], Tier.DRAM, first=20)
    tiers.io[Tier.NVME].hanging = {Operation.READ}
    fetch = fetch_of(tiers, 40, 10.0)
    silent_at = fetch.deadline
    tiers.settle_all_but_hung(10.1)
    assert len(fetch.pending) == 20 and fetch.deadline == silent_at
    tiers.store.settle(fetch)
    assert fetch_of(tiers, 40, 10.5).slots == []
    assert tiers.store._promoter.late_counts == {Tier.HBM: 0, Tier.DRAM: 0, Tier.NVME: 20}


def test_a_prompt_behind_others_waits_longer_since_that_costs_it_nothing(tmp_path: Path) -> None:
    tiers = make(tmp_path)
    push_down(tiers, HASHES[:4], Tier.NVME)
    fetch = tiers.store.fetch(HASHES[:4], 4, 10.0, Work.of([(0, 400)]))
    assert fetch is not None and fetch.limit > 10.0 + 400 * TOKEN_S * 0.9


def test_an_expected_wait_is_for_rows_ahead_in_the_queue_and_not_for_those_given_up(tmp_path: Path) -> None:
    tiers = make(tmp_path, hbm=96, row_s=0.05)
    push_down(tiers, HASHES[:40], Tier.NVME)
    other = chain_hashes(range(1000, 1016))
    push_down(tiers, other, Tier.NVME)
    long = fetch_of(tiers, 40, 10.0)
    assert len(long.pending) == 40
    short = tiers.store.fetch(other, 2, 10.0)
    assert short is not None and not short.slots, "two seconds in the queue for what takes 160 ms to compute"
    tiers.store.settle(long)
    assert tiers.store._promoter._lanes[Tier.NVME].live == 0


def test_a_chain_that_alternates_between_tiers_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = make(tmp_path, dram=64)
    push_down(tiers, HASHES[:40], Tier.NVME)
    dram, records, inner = tiers.shelves[Tier.DRAM], 0, Shelf.find
    for depth in range(0, 40, 2):
        tiers.store.release(tiers.compute(HASHES[depth : depth + 1], first=depth))
        tiers.drain(Tier.HBM)
    assert [dram.holds(block_hash) for block_hash in HASHES[:4]] == [True, False, True, False]

    def find(shelf: Shelf, hashes: list[BlockHash]) -> list[Record]:
        nonlocal records
        found = inner(shelf, hashes)
        records += len(found)
        return found

    monkeypatch.setattr(Shelf, "find", find)
    slots, origins = tiers.take(HASHES[:40], 10.0)
    assert origins == [Tier.DRAM, Tier.NVME] * 20 and records <= 80
    tiers.store.check(Counter(slots))


def test_what_a_silent_dram_has_is_read_from_nvme_until_it_speaks_again(tmp_path: Path) -> None:
    tiers = make(tmp_path, dram=64)
    tiers.store.release(tiers.compute(HASHES[:8]))
    tiers.settle(1.0)
    tiers.drain(Tier.HBM)
    assert all(shelf.holds(block_hash) for shelf in tiers.shelves.values() for block_hash in HASHES[:8])
    fetch = fetch_of(tiers, 8, 10.0)
    assert tiers.io[Tier.DRAM].hang(2) == 2
    assert tiers.store.settle(fetch) == ([], [])
    tiers.store.poll(10.1)
    again = fetch_of(tiers, 8, 10.2)
    for _ in range(4):
        tiers.step()
        tiers.store.poll(10.201)
    slots, origins = tiers.store.settle(again)
    assert origins == [Tier.NVME] * 8
    tiers.store.check(Counter(slots))
    third = fetch_of(tiers, 8, 20.0)
    assert reads(tiers, Tier.DRAM) == 3, "two that hang, and a probe"
    tiers.io[Tier.DRAM]._frozen.clear()
    tiers.settle(20.001)
    more, origins = tiers.store.settle(third)
    assert origins == [Tier.HBM] * 8
    tiers.store.release(slots + more)
    tiers.store.check(Counter())
    tiers.drain(Tier.HBM)
    last = fetch_of(tiers, 8, 30.0)
    assert reads(tiers, Tier.DRAM) == 8
    tiers.settle(30.0)
    tiers.store.release(tiers.store.settle(last)[0])
