"""Demotion: each NVMe policy writes when it should, not before; drains end; sources are held while they are read."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from fakes import SteppedTiers, chain_hashes
from loose import share

from kvtier.block import BlockHash, Tier
from kvtier.copy_leases import KEPT_S, STANDING_S
from kvtier.demotion import RETRY_MAX_S, RETRY_S, NvmePolicy
from kvtier.io.base import Operation
from kvtier.record import Record, tenant_digest
from kvtier.retention import PLAIN, Retention, retention_of
from kvtier.terms import SlotLimits
from kvtier.ticket import WriteItem
from kvtier.writing_back import BACK_ROWS, BACK_S
from tests.rows import directory_of

HASHES = chain_hashes(range(160))
"""Twenty blocks of one chain."""


def on(tiers: SteppedTiers, tier: Tier) -> int:
    """How many blocks of the chain a shelf holds."""
    return sum(tiers.shelves[tier].holds(block_hash) for block_hash in HASHES)


def test_through_writes_to_both_shelves_once_a_block_is_sealed(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, policy=NvmePolicy.THROUGH)
    tiers.compute(HASHES[:5])
    tiers.settle(0.0)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (5, 5)


def test_a_row_that_changed_while_it_was_copied_is_copied_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, policy=NvmePolicy.THROUGH)
    said = iter([False] * 3)
    monkeypatch.setattr(tiers.shelves[Tier.DRAM], "intact", lambda _: next(said, True))
    tiers.compute(HASHES[:5])
    tiers.settle(0.0)
    assert on(tiers, Tier.NVME) == 5 and tiers.shelves[Tier.NVME].stats()["stale"] == 3


def test_selective_writes_to_nvme_only_what_is_used_again(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, policy=NvmePolicy.SELECTIVE)
    tiers.store.release(tiers.compute(HASHES[:5]))
    tiers.settle(0.0)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (5, 0)
    tiers.take(HASHES[:3])
    tiers.settle(0.0)
    assert [tiers.shelves[Tier.NVME].holds(block_hash) for block_hash in HASHES[:5]] == [True] * 3 + [False] * 2


def test_back_writes_to_nvme_when_dram_is_nearly_full_the_coldest_first(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=24, dram=20, nvme=32, policy=NvmePolicy.BACK)
    tiers.compute(HASHES[:18], now=1.0)
    tiers.settle(1.0)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (18, 0)
    tiers.compute(HASHES[18:], now=2.0, first=18)
    tiers.settle(2.0)
    tiers.settle(2.0 + BACK_S)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (20, 2)
    assert tiers.shelves[Tier.NVME].holds(HASHES[17]) and tiers.shelves[Tier.NVME].holds(HASHES[16])
    assert tiers.metrics.demoted_blocks.value("dram", "nvme") == 2


def test_rows_that_dram_gives_up_under_back_come_back_from_nvme(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=4, dram=10, nvme=32, policy=NvmePolicy.BACK)
    for first in range(20):
        tiers.store.release(tiers.compute(HASHES[first : first + 1], now=float(first), first=first))
        tiers.settle(float(first))
        tiers.settle(float(first) + BACK_S)
    found = [tier for tier in (Tier.DRAM, Tier.NVME) for h in HASHES[:1] if tiers.shelves[tier].holds(h)]
    assert found == [Tier.NVME]
    assert on(tiers, Tier.DRAM) == 10 and all(
        tiers.shelves[Tier.DRAM].holds(h) or tiers.shelves[Tier.NVME].holds(h) for h in HASHES
    )


def test_wishes_beyond_what_a_shelf_takes_at_once_wait_for_their_turn(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=20, dram=24, nvme=24, queue_max=3)
    tiers.compute(HASHES)
    tiers.settle(0.0)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (20, 20)
    assert tiers.store.stats()["dropped_writes"] == 0


def test_a_write_in_flight_keeps_its_slot_from_being_given_away(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=4, dram=8, nvme=0)
    tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    tiers.store.release(tiers.compute(HASHES[:3]))
    tiers.store.poll(0.0)
    assert tiers.store.busy and tiers.store.available_count == 1
    assert tiers.store.allocate(2) is None
    tiers.io[Tier.DRAM].hanging.clear()
    tiers.settle(0.0)
    assert not tiers.store.busy and tiers.store.available_count == 4


def test_nvme_is_written_from_a_leased_dram_row_that_nothing_evicts_meanwhile(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=3, nvme=16, policy=NvmePolicy.SELECTIVE)
    tiers.store.release(tiers.compute(HASHES[:2]))
    tiers.settle(0.0)
    tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    fetch = tiers.store.fetch(HASHES[:2], 2, 0.0)
    assert fetch is not None
    tiers.store.release(tiers.store.settle(fetch)[0])
    tiers.store.poll(0.0)
    assert tiers.io[Tier.NVME].in_flight == 2 and tiers.store.stats()["hbm_blocks_used"] == 2
    tiers.store.release(tiers.compute(HASHES[2:8], now=1.0, first=2))
    for _ in range(10):
        tiers.store.poll(1.0)
        tiers.step()
    assert [tiers.shelves[Tier.DRAM].holds(block_hash) for block_hash in HASHES[:2]] == [True, True]
    tiers.io[Tier.NVME].hanging.clear()
    tiers.drain(Tier.HBM, 2.0)
    tiers.drain(Tier.DRAM, 2.0)
    assert tiers.metrics.demoted_blocks.value("dram", "nvme") >= 2
    assert tiers.take(HASHES[:2], 3.0)[1] == [Tier.NVME] * 2


def test_a_wish_whose_block_is_gone_is_dropped_and_counted(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=2, dram=8, nvme=0)
    tiers.store.release(tiers.compute(HASHES[:2]))
    slots = tiers.store.allocate(2)
    assert slots is not None
    tiers.settle(0.0)
    assert on(tiers, Tier.DRAM) == 0 and tiers.store.stats()["dropped_writes"] == 2


def test_draining_hbm_leaves_what_is_held_and_moves_the_rest(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8)
    held, idle = tiers.compute(HASHES[:2]), tiers.compute(HASHES[2:6], first=2)
    tiers.store.release(idle)
    tiers.drain(Tier.HBM)
    assert tiers.store.stats()["hbm_blocks_used"] == 2 and on(tiers, Tier.DRAM) == 6
    tiers.store.check(Counter(held))


def test_draining_dram_into_an_nvme_that_is_smaller_ends(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=24, dram=24, nvme=4, policy=NvmePolicy.SELECTIVE)
    tiers.store.release(tiers.compute(HASHES))
    tiers.settle(0.0)
    tiers.drain(Tier.DRAM)
    assert tiers.store.stats()["dram_slots_used"] == 0 and on(tiers, Tier.NVME) == 4


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
def test_a_drain_past_its_deadline_lets_go_even_if_a_write_hangs_for_good(tier: Tier, tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, policy=NvmePolicy.SELECTIVE)
    below = Tier.DRAM if tier is Tier.HBM else Tier.NVME
    if tier is Tier.HBM:
        tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    tiers.store.release(tiers.compute(HASHES[:4]))
    tiers.io[below].hanging = {Operation.WRITE}
    for _ in range(5):
        tiers.store.poll(0.0)
        tiers.step()
        assert not tiers.store.drain(tier)
    assert tiers.io[below].in_flight > 0
    assert tiers.store.drain(tier, give_up=True)


def test_draining_hbm_without_shelves_just_forgets(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=4, dram=0, nvme=0)
    tiers.store.release(tiers.compute(HASHES[:3]))
    assert tiers.store.drain(Tier.HBM) and tiers.store.drain(Tier.DRAM)
    assert tiers.store.stats()["hbm_blocks_used"] == 0


def test_writes_that_hang_in_the_disk_hold_rows_of_dram_and_no_slot_of_hbm(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=12, nvme=16)
    tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    for first in range(0, 16, 4):
        tiers.store.release(tiers.compute(HASHES[first : first + 4], float(first), first))
        tiers.settle_all_but_hung(float(first))
        assert tiers.store.available_count == 8 and not tiers.store.awaits_slots(float(first))
    assert tiers.io[Tier.NVME].in_flight == 12, "every row of DRAM waits for the disk"
    tiers.store.check(Counter())
    tiers.io[Tier.NVME].hanging.clear()
    tiers.settle(20.0)
    assert on(tiers, Tier.NVME) >= 12


def test_a_burst_larger_than_dram_reaches_nvme_through_it(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=20, dram=4, nvme=24)
    tiers.compute(HASHES)
    tiers.settle(0.0)
    assert on(tiers, Tier.NVME) == 20 and tiers.store.stats()["dropped_writes"] == 0
    assert tiers.metrics.demoted_blocks.value("hbm", "nvme") == 0


def test_a_row_of_dram_that_waits_for_nvme_goes_after_those_that_are_there(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=16, dram=8, nvme=24, queue_max=2)
    tiers.compute(HASHES[:4], 1.0)
    tiers.settle(1.0)
    tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    tiers.compute(HASHES[4:8], 1.0, 4)
    tiers.settle_all_but_hung(2.0)
    assert (on(tiers, Tier.DRAM), tiers.io[Tier.NVME].in_flight) == (8, 2), "the last two blocks wait for their turn"
    tiers.compute(HASHES[8:10], 2.0 + KEPT_S, 8)
    tiers.settle_all_but_hung(2.0 + KEPT_S)
    assert [tiers.shelves[Tier.DRAM].holds(one) for one in HASHES[:10]] == [True] * 2 + [False] * 2 + [True] * 6
    tiers.io[Tier.NVME].hanging.clear()
    tiers.settle(4.0 + KEPT_S)
    assert on(tiers, Tier.NVME) == 10
    uses = [directory_of(tiers.shelves[Tier.DRAM]).use_of(one).last_use for one in HASHES[4:8]]
    assert uses == [1.0] * 4, "it outlives its parents"


def test_without_dram_nvme_is_written_from_hbm(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=0, nvme=8)
    tiers.compute(HASHES[:5])
    tiers.settle(0.0)
    assert on(tiers, Tier.NVME) == 5 and tiers.metrics.demoted_blocks.value("hbm", "nvme") == 5


def test_a_block_used_again_that_dram_has_lost_goes_to_nvme_through_dram(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=4, nvme=8, policy=NvmePolicy.SELECTIVE)
    slots = tiers.compute(HASHES[:2], 1.0)
    tiers.settle(1.0)
    tiers.store.release(tiers.compute(chain_hashes([7] * 32, "other"), 2.0))
    tiers.settle(2.0)
    assert on(tiers, Tier.DRAM) == on(tiers, Tier.NVME) == 0
    tiers.take(HASHES[:2], 3.0)
    tiers.settle(3.0)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (2, 2)
    assert tiers.metrics.demoted_blocks.value("hbm", "nvme") == 0 and len(slots) == 2


def test_back_looks_at_a_bounded_number_of_rows_however_often_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.writing_back.BACK_ROWS", 3)
    tiers = SteppedTiers(tmp_path, hbm=24, dram=100, nvme=128, policy=NvmePolicy.BACK)
    chain = chain_hashes(range(100 * 8))
    for first in range(0, 100, 20):
        tiers.store.release(tiers.compute(chain[first : first + 20], 0.0, first))
        tiers.settle_all_but_hung(0.0)
    looked: list[int] = []
    inner = tiers.shelves[Tier.DRAM].coldest

    def coldest(count: int) -> list[Record]:
        looked.append(count)
        return inner(count)

    monkeypatch.setattr(tiers.shelves[Tier.DRAM], "coldest", coldest)
    for turn in range(100):  # a hundred steps in as many milliseconds
        tiers.store.poll(1.0 + turn / 1000)
        tiers.step()
    assert looked == [3]
    for turn in range(20):
        tiers.store.poll(2.0 + turn * BACK_S * 1.01)
        tiers.step()
    assert max(looked) == 3 and len(looked) == 21
    assert BACK_ROWS <= 256


def test_back_loses_nothing_at_a_rate_that_the_disk_keeps_up_with(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=100, nvme=400, policy=NvmePolicy.BACK)
    chain = chain_hashes(range(300 * 8))
    for depth, block_hash in enumerate(chain):  # fifty blocks a second, fifteen times what a look at the shelf takes
        now = depth / 50
        tiers.store.release(tiers.compute([block_hash], now, depth))
        for _ in range(2):
            tiers.store.poll(now)
            tiers.step()
    tiers.settle(10.0)
    dram, nvme = tiers.shelves[Tier.DRAM], tiers.shelves[Tier.NVME]
    lost = [depth for depth, item in enumerate(chain) if not dram.holds(item) and not nvme.holds(item)]
    assert not lost and dram.used_count == 100
    assert 200 <= nvme.used_count <= 215, "no more than what DRAM lets go of and a little ahead"


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
def test_a_drain_ends_though_new_blocks_keep_coming_and_leaves_those(tier: Tier, tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=40, dram=40, nvme=64, policy=NvmePolicy.SELECTIVE)
    tiers.store.release(tiers.compute(HASHES[:8]))
    if tier is Tier.DRAM:
        tiers.settle(0.0)
    traffic = iter(chain_hashes([5] * 8 * 60, "traffic"))
    ended, fresh = False, list[BlockHash]()
    for depth in range(20):
        tiers.store.poll(0.0)
        ended = tiers.store.drain(tier)
        if ended:
            break
        fresh.append(next(traffic))
        tiers.store.release(tiers.compute(fresh[-1:], 1.0, depth))
        tiers.step(2)  # what is fresh has always a write in flight when the drain looks again
    assert ended, "it waits for traffic to end"
    if tier is Tier.HBM:
        assert not any(tiers.store._resident.find(block_hash) for block_hash in HASHES[:8])
        assert all(tiers.store._resident.find(block_hash) is not None for block_hash in fresh)
    else:
        assert on(tiers, Tier.DRAM) == 0 and on(tiers, Tier.NVME) == 8


def test_a_drain_lets_what_is_taken_again_meanwhile_stay(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=0)
    tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    tiers.store.release(tiers.compute(HASHES[:3]))
    tiers.store.poll(0.0)
    assert not tiers.store.drain(Tier.HBM)
    fetch = tiers.store.fetch(HASHES[:1], 1, 0.0)
    assert fetch is not None
    tiers.io[Tier.DRAM].hanging.clear()
    tiers.drain(Tier.HBM)
    assert [tiers.store._resident.find(block_hash) is not None for block_hash in HASHES[:3]] == [True, False, False]


ASKED = Retention(9, 1 << 35, True, tenant_digest("somebody"))
RAISED = Retention(9, 0, True)
"""What a plain block is kept for once that is asked: it never expired."""


def rows(tiers: SteppedTiers, tier: Tier, count: int) -> list[Retention]:
    """What each of the first rows of the chain is kept for on a shelf."""
    return [retention_of(record) for record in tiers.shelves[tier].find(HASHES[:count])]


@pytest.mark.parametrize("policy", [NvmePolicy.THROUGH, NvmePolicy.SELECTIVE])
def test_rows_are_kept_on_both_shelves_for_what_was_asked(policy: NvmePolicy, tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=16, policy=policy)
    tiers.store.release(tiers.compute(HASHES[:2], retention=ASKED))
    tiers.store.release(tiers.compute(HASHES[2:3], first=2))
    tiers.settle(0.0)
    tiers.store.release(tiers.take(HASHES[:3])[0])
    tiers.settle(0.0)
    for tier in (Tier.DRAM, Tier.NVME):
        assert rows(tiers, tier, 3) == [ASKED, ASKED, PLAIN], tier


def test_a_copy_from_dram_to_nvme_of_what_hbm_has_forgotten_is_kept_for_the_same(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=16, policy=NvmePolicy.SELECTIVE)
    tiers.store.release(tiers.compute(HASHES[:2], retention=ASKED))
    tiers.drain(Tier.HBM)
    assert not tiers.store.is_resident(HASHES[0]) and on(tiers, Tier.NVME) == 0
    tiers.store._demoter.wish(Tier.NVME, HASHES[0], 0)
    tiers.settle(0.0)
    assert rows(tiers, Tier.NVME, 1) == [ASKED]
    assert tiers.metrics.demoted_blocks.value("dram", "nvme") == 1


def test_a_pin_that_dram_has_no_room_for_still_counts_on_nvme(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=16, policy=NvmePolicy.SELECTIVE, limits=SlotLimits(2, None))
    tiers.store.release(tiers.compute(HASHES[:3], retention=ASKED))
    tiers.settle(0.0)
    pins = [asked.pinned for asked in rows(tiers, Tier.DRAM, 3)]
    assert sorted(pins) == [False, True, True]
    refused = pins.index(False)
    tiers.store._demoter.wish(Tier.NVME, HASHES[refused], refused)
    tiers.settle(0.0)
    assert tiers.metrics.demoted_blocks.value("dram", "nvme") == 1
    assert [retention_of(record) for record in tiers.shelves[Tier.NVME].find(HASHES[refused:3])] == [ASKED]


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_what_is_asked_while_a_row_is_written_counts_when_it_is_there(tier: Tier, tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=16)
    tiers.store.release(tiers.compute(HASHES[:2]))
    while tiers.io[tier].in_flight == 0:
        tiers.store.poll(0.0)
        if tiers.io[tier].in_flight == 0:
            tiers.step()
    tiers.store.retain(HASHES[:2], ASKED)
    tiers.settle(0.0)
    assert rows(tiers, tier, 2) == [RAISED] * 2


def test_what_is_asked_while_a_row_waits_for_its_turn_is_written_with_it(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=0)
    tiers.store.release(tiers.compute(HASHES[:2]))
    tiers.store.retain(HASHES[:2], ASKED)
    tiers.settle(0.0)
    assert rows(tiers, Tier.DRAM, 2) == [RAISED] * 2


def test_a_wish_that_another_has_fulfilled_raises_what_that_row_is_kept_for(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=0)
    slots = tiers.compute(HASHES[:2], retention=ASKED)
    dram = tiers.shelves[Tier.DRAM]
    dram.write([WriteItem(HASHES[0], 0, tiers.arena.view(slots[0]), None)], 0.0)
    tiers.io[Tier.DRAM].step(1)
    assert [done.outcome.value for done in dram.poll(0.0)] == ["done"]
    tiers.settle(0.0)
    assert rows(tiers, Tier.DRAM, 2) == [RAISED, ASKED]


def test_a_write_that_another_was_sooner_with_raises_what_that_row_is_kept_for(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16, nvme=0)
    tiers.store.release(tiers.compute(HASHES[:1], retention=ASKED))
    tiers.store.poll(0.0)
    dram = tiers.shelves[Tier.DRAM]
    directory = directory_of(dram)
    [grant] = directory.reserve(1)
    directory.publish([Record(HASHES[0], *grant, 0, b"")], 0.0)
    tiers.settle(0.0)
    assert dram.stats()["duplicate"] == 1 and rows(tiers, Tier.DRAM, 1) == [RAISED]


def test_a_tenant_whose_quota_is_full_of_pins_keeps_nobody_else_from_the_shelf(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=100, dram=100, nvme=0, limits=SlotLimits(50, 2))
    greedy = chain_hashes(range(800), "greedy")[:90]
    tiers.store.release(tiers.compute(greedy, retention=ASKED))
    tiers.store.release(tiers.compute(HASHES[:3]))
    now = 0.0
    while on(tiers, Tier.DRAM) < 3:
        tiers.settle(now)
        now += RETRY_S
        assert now < 1.0
    held = [block_hash for block_hash in greedy if tiers.shelves[Tier.DRAM].holds(block_hash)]
    assert held == greedy[:2]
    tiers.store.check()


def test_a_tenant_whose_quota_is_full_does_not_slow_others_down(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=40, dram=40, nvme=0, limits=SlotLimits(20, 2), queue_max=16)
    tiers.store.release(tiers.compute(chain_hashes(range(800), "greedy")[:17], retention=ASKED))
    tiers.store.release(tiers.compute(HASHES[:10]))
    now = 0.0
    while on(tiers, Tier.DRAM) < 10:
        tiers.settle(now)
        now += RETRY_S
        assert now < 4 * RETRY_S
    for _ in range(10):
        tiers.settle(now)
        now += RETRY_S
    tiers.store.publish_metrics()
    metrics = tiers.metrics
    assert metrics.quota_refused.value("dram") == 15, "each is counted once, however often it asks"
    assert metrics.pinned_blocks.value("dram") == 2


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_a_block_that_expires_while_it_is_written_is_never_found_there(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unix_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: unix_s)
    tiers = SteppedTiers(tmp_path, hbm=8, dram=16 * (tier is Tier.DRAM), nvme=16 * (tier is Tier.NVME))
    tiers.store.release(tiers.compute(HASHES[:2], retention=Retention(expiry_s=1060)))
    tiers.store.poll(0.0)
    assert tiers.io[tier].in_flight == 2
    unix_s = 1060.0
    tiers.step()
    tiers.store.poll(0.0)
    assert on(tiers, tier) == 0 and tiers.store.available_count == 8
    assert tiers.shelves[tier].stats()["writes"] == 2 and tiers.shelves[tier].used_count == 0


def test_the_end_waits_for_what_gets_on_and_not_for_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.demotion.STUCK_S", 0.02)
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, queue_max=1)
    tiers.compute(HASHES[:5])

    def poll(now: float) -> None:
        tiers.step(1)
        tiers.store.poll(now)

    tiers.store._demoter.finish(poll, time.monotonic() + 60)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (5, 5)
    tiers.compute(HASHES[5:8], first=5)
    tiers.store.write_down(1e9)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (5, 5) and tiers.store.stats()["waiting_writes"] >= 2


def test_a_shelf_that_takes_nothing_is_asked_ever_less_often_and_at_once_when_room_came(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=4, nvme=0)
    dram, demoter = tiers.shelves[Tier.DRAM], tiers.store._demoter
    dram.holdings.ask_rows(4, bytes(16))
    [reply] = dram.holdings.replies()
    assert reply.grants is not None
    tiers.store.release(tiers.compute(HASHES[:3]))
    now, tries = 10.0, 0
    while now < 610.0:
        tiers.store.poll(now)
        assert now < demoter.retry_at <= now + RETRY_MAX_S
        now, tries = demoter.retry_at, tries + 1
    assert 120 < tries < 180, "ten a second at first, one in five seconds in the end"
    dram.holdings.give_rows(reply.grants)
    demoter.room_came()
    tiers.settle(now - 0.01)
    assert on(tiers, Tier.DRAM) == 3 and demoter.retry_at == float("inf")


def test_rows_of_a_shared_dram_that_wait_for_nvme_are_not_evicted_for_those_behind_them(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=20, dram=4, nvme=24)
    share(tiers.shelves[Tier.DRAM])
    tiers.compute(HASHES)
    for _ in range(200):
        tiers.store.poll(0.0)
        tiers.io[Tier.DRAM].step()
        tiers.io[Tier.NVME].step(1)  # the slower one
    tiers.settle(0.0)
    nvme, demoted = tiers.shelves[Tier.NVME], tiers.metrics.demoted_blocks.value
    assert on(tiers, Tier.NVME) == 20 and tiers.store.stats()["dropped_writes"] == 0
    assert nvme.stats()["stale"] == 0 and demoted("hbm", "dram") == 20, "a block was copied more than once"
    assert len(tiers.shelves[Tier.DRAM].holdings) == 0


def test_a_row_of_dram_that_went_before_its_copy_is_copied_anew_from_hbm(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=8, dram=8, nvme=8, queue_max=2)
    share(tiers.shelves[Tier.DRAM])
    tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    tiers.compute(HASHES[:5])
    tiers.settle_all_but_hung(0.0)
    dram = tiers.shelves[Tier.DRAM]
    [record] = dram.find(HASHES[3:4])
    dram.drop([record], "evicted")
    tiers.io[Tier.NVME].hanging.clear()
    tiers.settle(0.1)
    assert (on(tiers, Tier.DRAM), on(tiers, Tier.NVME)) == (5, 5)
    assert tiers.store.stats()["dropped_writes"] == 0 and len(dram.holdings) == 0


def test_rows_are_kept_for_a_disk_that_hangs_no_longer_than_it_says(tmp_path: Path) -> None:
    tiers = SteppedTiers(tmp_path, hbm=40, dram=8, nvme=24, late_s=60.0)
    share(tiers.shelves[Tier.DRAM])
    dram = tiers.shelves[Tier.DRAM]
    tiers.io[Tier.NVME].hanging = {Operation.WRITE}
    tiers.compute(HASHES[:8])
    tiers.settle_all_but_hung(1.0)
    assert len(dram.holdings) == 4 and on(tiers, Tier.DRAM) == 4, "half of the rows, and nothing evicts them"
    tiers.settle_all_but_hung(1.0 + STANDING_S + RETRY_S)
    assert len(dram.holdings) == 4 and on(tiers, Tier.DRAM) == 8, "what stands holds nothing up"
    tiers.settle_all_but_hung(1.0 + KEPT_S)
    assert len(dram.holdings) == 0
    tiers.compute(HASHES[8:16], first=8)
    tiers.settle_all_but_hung(1.0 + KEPT_S)
    assert len(dram.holdings) == 0
    assert [dram.holds(one) for one in HASHES[:16]] == [False] * 8 + [True] * 8, "a row that nobody holds stays"
    tiers.io[Tier.NVME].hanging.clear()
    tiers.settle(7.0)
    assert on(tiers, Tier.NVME) == 16 and len(dram.holdings) == 0, "what had gone from DRAM is still in HBM"
