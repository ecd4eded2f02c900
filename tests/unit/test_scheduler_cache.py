"""Scheduler: sequences that read nothing or write nothing, and what the blocks of others are kept for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import LAYOUT, SteppedEngine, SteppedTiers, chain_hashes, make_sequence

from kvtier.block import Tier
from kvtier.record import tenant_digest
from kvtier.request import Origin
from kvtier.retention import PLAIN, Retention, retention_of
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.sequence import Sequence, SequenceState

BLOCK = LAYOUT.block_tokens
PROMPT = [position % 50 for position in range(4 * BLOCK + 3)]
HASHES = chain_hashes(PROMPT)
NEITHER = {"cache_read": False, "cache_write": False}


def make_engine(folder: Path, hbm: int = 16, dram: int = 32, nvme: int = 0) -> SteppedEngine:
    tiers = SteppedTiers(folder, hbm, dram, nvme, queue_max=64)
    return SteppedEngine(tiers, Scheduler(tiers.store, SchedulerLimits(64, 8)))


def start(
    engine: SteppedEngine, number: int, prompt: list[int] = PROMPT, output_max: int = 2, **cache: Any
) -> Sequence:
    sequence = make_sequence(number, prompt, output_max, **cache)
    engine.scheduler.add(sequence)
    return sequence


def run(engine: SteppedEngine, now: float = 0.0) -> None:
    """Until all have ended and nothing is under way; every token and every prefix is judged by the model."""
    while engine.scheduler.sequences:
        engine.step(now, lambda _: None)
        engine.scheduler.check()
        engine.tiers.step()
    engine.tiers.settle(now)
    engine.scheduler.check()


def ask(engine: SteppedEngine, number: int, prompt: list[int] = PROMPT, **cache: Any) -> Origin:
    sequence = start(engine, number, prompt, **cache)
    run(engine)
    assert sequence.tokens[len(prompt) :] == engine.model.expected(prompt, 2)
    return sequence.origin


def kept(engine: SteppedEngine, tier: Tier, tokens: list[int]) -> list[Retention | None]:
    """What each block of a chain is kept for in a tier; None where it is not there."""
    found: list[Retention | None] = []
    for block_hash in chain_hashes(tokens):
        if tier is Tier.HBM:
            slot = engine.tiers.store._resident.find(block_hash)
            found.append(None if slot is None else engine.tiers.store._resident.retention_of(slot))
        else:
            records = engine.tiers.shelves[tier].find([block_hash])
            found.append(retention_of(records[0]) if records else None)
    return found


def test_what_a_sequence_does_not_write_nobody_finds_in_any_tier(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, nvme=32)
    assert ask(engine, 0, cache_write=False) == Origin(computed=len(PROMPT))
    stats = engine.tiers.store.stats()
    assert (stats["hbm_blocks_used"], stats["dram_slots_used"], stats["nvme_slots_used"]) == (0, 0, 0)
    assert ask(engine, 1) == Origin(computed=len(PROMPT))
    assert engine.tiers.store.stats()["nvme_slots_used"] == 4


def test_a_sequence_that_writes_nothing_reads_what_others_wrote(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    ask(engine, 0, PROMPT[: 2 * BLOCK + 1])
    assert ask(engine, 1, cache_write=False) == Origin(hbm=2 * BLOCK, computed=len(PROMPT) - 2 * BLOCK)
    assert kept(engine, Tier.HBM, PROMPT) == [PLAIN, PLAIN, None, None]


@pytest.mark.parametrize("cache_write", [False, True])
def test_a_sequence_that_reads_nothing_computes_all_and_keeps_its_own_rows(cache_write: bool, tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    first = start(engine, 0, output_max=20)
    engine.step(0.0, lambda _: None)
    private = start(engine, 1, output_max=20, cache_read=False, cache_write=cache_write)
    for _ in range(5):
        engine.step(0.0, lambda _: None)
        engine.scheduler.check()
    assert private.computed_count > len(PROMPT)
    assert not set(private.table.slots) & set(first.table.slots)
    run(engine)
    assert private.origin == Origin(computed=len(PROMPT)) and private.reused_blocks == 0
    assert engine.tiers.store.available_count == 16
    assert engine.tiers.store.stats()["hbm_blocks_used"] == 6
    assert ask(engine, 2) == Origin(hbm=4 * BLOCK, computed=3)


def test_what_a_sequence_that_reads_nothing_computes_first_is_found_by_others(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    ask(engine, 0, cache_read=False)
    assert ask(engine, 1) == Origin(hbm=4 * BLOCK, computed=3)
    engine.tiers.drain(Tier.HBM)
    assert ask(engine, 2, cache_read=False) == Origin(computed=len(PROMPT))
    assert engine.tiers.io[Tier.DRAM].in_flight == 0


@pytest.mark.parametrize("cache", [{"cache_read": False}, {"cache_write": False}, NEITHER], ids=str)
def test_after_a_preemption_it_computes_again_and_leaks_nothing(cache: dict[str, bool], tmp_path: Path) -> None:
    engine = make_engine(tmp_path, hbm=8)
    oldest = start(engine, 0, PROMPT[:BLOCK], output_max=6 * BLOCK)
    private = start(engine, 1, PROMPT[1 : 4 * BLOCK], output_max=20, **cache)
    while private.state is not SequenceState.WAITING or private.preempted_count == 0:
        engine.step(0.0, lambda _: None)
        engine.scheduler.check()
        engine.tiers.step()
    run(engine)
    assert oldest.preempted_count == 0 < private.preempted_count
    assert private.tokens[private.prompt_count :] == engine.model.expected(PROMPT[1 : 4 * BLOCK], 20)
    assert private.origin == Origin(computed=private.prompt_count)
    assert engine.tiers.store.available_count == 8


def test_a_pin_is_for_the_blocks_of_the_prompt_and_the_rest_for_all(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, nvme=32)
    asked = Retention(7, 1 << 35, True, tenant_digest("t"))
    sequence = start(engine, 0, PROMPT[: 2 * BLOCK + 3], output_max=2 * BLOCK, retention=asked)
    run(engine)
    answer = asked._replace(pinned=False)
    for tier in Tier:
        assert kept(engine, tier, sequence.tokens) == [asked, asked, answer, answer], tier


def test_a_reuse_raises_what_blocks_are_kept_for_in_every_tier_and_a_plain_one_changes_nothing(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, nvme=32)
    first = Retention(-3, 1 << 33, False, tenant_digest("first"))
    ask(engine, 0, retention=first)
    ask(engine, 1)
    for tier in Tier:
        assert kept(engine, tier, PROMPT) == [first] * 4
    assert ask(engine, 2, PROMPT[: 3 * BLOCK + 1], retention=Retention(2, 1 << 34, True)).hbm == 3 * BLOCK
    raised = Retention(2, 1 << 34, True, tenant_digest("first"))
    for tier in Tier:
        assert kept(engine, tier, PROMPT) == [raised] * 3 + [first], tier


def test_what_lies_on_a_shelf_behind_a_gap_is_raised_when_it_is_computed_again(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    ask(engine, 0)
    engine.tiers.drain(Tier.HBM)
    dram = engine.tiers.shelves[Tier.DRAM]
    dram.drop(dram.find(HASHES[:1]), "evicted")
    assert ask(engine, 1, retention=Retention(5)) == Origin(computed=len(PROMPT))
    assert kept(engine, Tier.DRAM, PROMPT) == [Retention(5)] * 4


def test_a_sequence_that_reads_nothing_raises_what_was_there_before_it(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    ask(engine, 0)
    ask(engine, 1, cache_read=False, retention=Retention(5))
    assert kept(engine, Tier.HBM, PROMPT) == kept(engine, Tier.DRAM, PROMPT) == [Retention(5)] * 4


@pytest.mark.parametrize("to", [Tier.DRAM, Tier.NVME])
def test_what_blocks_are_kept_for_comes_back_with_them(to: Tier, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, dram=32 if to is Tier.DRAM else 0, nvme=32)
    asked = Retention(7, 1 << 35, True, tenant_digest("t"))
    ask(engine, 0, retention=asked)
    engine.tiers.drain(Tier.HBM)
    assert kept(engine, Tier.HBM, PROMPT) == [None] * 4
    assert ask(engine, 1).as_dict()[to.value] == 4 * BLOCK
    assert kept(engine, Tier.HBM, PROMPT) == [asked] * 4
