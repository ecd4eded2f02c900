"""Leases for copies: how many rows are kept and for how long, and for whose sake they are let go of."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import SteppedTiers, chain_hashes

from kvtier.block import Tier
from kvtier.copy_leases import KEPT_S, LACKING_GAP_S, LACKING_S, STANDING_S, CopyLeases

HASHES = chain_hashes(range(8 * 8))


class Kept:
    """Leases on rows of a DRAM of eight, all of them written."""

    def __init__(self, folder: Path) -> None:
        self.tiers = SteppedTiers(folder, hbm=8, dram=8, nvme=0)
        self.tiers.compute(HASHES)
        self.tiers.settle(0.0)
        self.tiers.shelves[Tier.NVME] = SteppedTiers(folder, 1, 0, 8).shelves[Tier.NVME]
        self.dram = self.tiers.shelves[Tier.DRAM]
        self.leases = CopyLeases(self.tiers.shelves)

    def keep(self, block: int, now: float) -> None:
        self.dram.holdings.ask_leases(self.dram.find(HASHES[block : block + 1]))
        [reply] = self.dram.holdings.replies()
        assert reply.leases is not None and reply.leases[0] is not None
        self.leases.keep(reply.leases[0], now)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_half_of_the_rows_are_kept_at_once_those_on_their_way_included(kept: Kept) -> None:
    for block in range(3):
        kept.keep(block, 1.0)
    assert not kept.leases.is_full
    kept.leases.expect(HASHES[3])
    assert kept.leases.is_full and kept.leases.may_keep(1.0)
    kept.leases.arrived(HASHES[3], None, 1.0)
    assert not kept.leases.is_full and len(kept.leases) == len(kept.dram.holdings) == 3


def test_a_row_is_kept_until_its_copy_is_there_or_its_time_is_over(kept: Kept) -> None:
    kept.keep(0, 1.0)
    kept.keep(1, 2.0)
    kept.keep(2, 2.0)
    kept.leases.copied(HASHES[1], 2.5)
    kept.leases.settle(1.0 + KEPT_S)
    assert kept.leases.blocks() == {HASHES[2]} and len(kept.dram.holdings) == 1
    kept.leases.settle(2.0 + KEPT_S)
    assert len(kept.leases) == len(kept.dram.holdings) == 0


def test_no_more_rows_are_kept_once_nvme_stands_until_it_gets_on(kept: Kept) -> None:
    kept.keep(0, 1.0)
    kept.keep(1, 1.5)
    assert kept.leases.may_keep(1.0 + STANDING_S) and not kept.leases.may_keep(1.1 + STANDING_S)
    kept.leases.settle(2.0 + KEPT_S)
    assert len(kept.leases) == 0 and not kept.leases.may_keep(100.0), "it begins anew though nothing was written"
    kept.leases.copied(HASHES[5], 100.0)
    assert kept.leases.may_keep(200.0)


def test_a_streamed_sequence_that_lacks_rows_for_long_gets_those_that_are_kept(kept: Kept) -> None:
    kept.keep(0, 10.0)
    kept.leases.lacking(10.0)
    kept.leases.lacking(10.0 + LACKING_S)
    assert len(kept.leases) == 1, "their copies may be there in a moment"
    kept.leases.lacking(10.1 + LACKING_S)
    assert len(kept.leases) == len(kept.dram.holdings) == 0 and not kept.leases.may_keep(10.2 + LACKING_S)
    later = 10.2 + LACKING_S + LACKING_GAP_S
    kept.leases.copied(HASHES[0], later)
    assert kept.leases.may_keep(later)
    kept.leases.lacking(later)
    assert kept.leases.may_keep(later), "that was another one"


def test_no_row_is_kept_of_a_shelf_that_is_lost_or_for_one_that_is_not_there(kept: Kept) -> None:
    kept.keep(0, 1.0)
    nvme = kept.tiers.shelves.pop(Tier.NVME)
    assert not kept.leases.may_keep(1.0)
    kept.leases.settle(1.0)
    assert len(kept.dram.holdings) == 0
    kept.tiers.shelves[Tier.NVME] = nvme
    kept.keep(1, 1.0)
    kept.dram.is_lost = True
    assert not kept.leases.may_keep(1.0)
    kept.leases.settle(1.0)
    assert len(kept.leases) == len(kept.dram.holdings) == 0
