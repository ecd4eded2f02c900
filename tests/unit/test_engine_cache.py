"""What a request asks for its blocks, over a whole engine: each input is honoured in each tier that it is meant for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import BLOCK, knows_shelves, opened, wait_for
from tiny import make_checkpoint

from kvtier import Engine, InvalidRequest, SamplingParams
from kvtier.block import Tier
from kvtier.engine import RequestOptions
from kvtier.io.uring import RingLane, UringEngine
from kvtier.record import NO_TENANT, tenant_digest
from tests.rows import directory_of, need_registered_memory

TIERS = ["hbm", "dram", "nvme"]
SLOT_BYTES = 4096 + 3 * 4096
"""Header and 3 layers: rows of the checkpoint are slices of 4 KiB."""
BLOCKS = 16
"""Of the tier under test."""
ONE = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@contextmanager
def small(checkpoint: Path, folder: Path, tier: str, sharing: bool = False) -> Iterator[Engine]:
    """An engine whose prefixes can only come from HBM, or only from one shelf once HBM has been pushed down."""
    nvme = "1MiB" if tier == "nvme" else 0
    with opened(
        checkpoint,
        tiers__hbm__bytes=(BLOCKS + 4) * 3 * 4096,
        tiers__dram__bytes=BLOCKS * SLOT_BYTES if tier == "dram" else 0,
        tiers__nvme__bytes=nvme,
        tiers__nvme__path=folder / "cache",
        tiers__pin_share=0.25,
        tiers__linger_s=0,
        sharing=sharing,
    ) as engine:
        yield engine


def prompt(number: int) -> list[int]:
    """Four blocks and a token that no other prompt has a block of."""
    return [(number * 37 + place * (number % 7 + 1)) % 290 + 3 for place in range(4 * BLOCK)] + [3 + number]


def ask(engine: Engine, number: int, tier: str, **options: object) -> dict[str, int]:
    """Where a prompt's tokens came from. Afterwards its blocks are in `tier` alone."""
    [answer] = engine.generate([prompt(number)], ONE, **options)  # type: ignore[arg-type]
    if tier != "hbm":
        engine.evict("hbm")
        wait_for(lambda: engine.stats()["waiting_writes"] == engine.stats()["writing_blocks"] == 0)
    return answer.origin


def churn(engine: Engine, tier: str) -> None:
    """Plain prompts, more than twice what the tier holds."""
    slots = engine.stats()["hbm_blocks_total" if tier == "hbm" else f"{tier}_slots_total"]
    for number in range(100, 100 + slots // 2):
        ask(engine, number, tier)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("wish", [{"cache_pin": True}, {"cache_priority": 1}], ids=str)
def test_what_is_asked_for_outlives_what_is_not(
    wish: dict[str, object], tier: str, checkpoint: Path, tmp_path: Path
) -> None:
    with small(checkpoint, tmp_path, tier) as engine:
        ask(engine, 1, tier, **wish)
        ask(engine, 2, tier)
        assert ask(engine, 2, tier)[tier] == 4 * BLOCK, "the plain one was there, too"
        churn(engine, tier)
        assert engine.stats()[f"{tier}_evictions"] > 0
        assert ask(engine, 1, tier) == {**dict.fromkeys(TIERS, 0), tier: 4 * BLOCK, "computed": 1}
        assert ask(engine, 2, tier)["computed"] == 4 * BLOCK + 1


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_plain_outlives_the_rest_once_it_is_asked_for(tier: str, checkpoint: Path, tmp_path: Path) -> None:
    with small(checkpoint, tmp_path, tier) as engine:
        ask(engine, 1, tier)
        assert ask(engine, 1, tier, cache_pin=True)[tier] == 4 * BLOCK
        churn(engine, tier)
        assert ask(engine, 1, tier)[tier] == 4 * BLOCK


@pytest.mark.parametrize("tier", TIERS)
def test_a_low_priority_goes_first(tier: str, checkpoint: Path, tmp_path: Path) -> None:
    with small(checkpoint, tmp_path, tier) as engine:
        prompts = BLOCKS // 4 if tier == "hbm" else engine.stats()[f"{tier}_slots_total"] // 4
        ask(engine, 1, tier)
        ask(engine, 2, tier, cache_priority=-1)
        for number in range(100, 100 + prompts - 1):  # one more than there is room for
            ask(engine, number, tier)
        assert engine.stats()[f"{tier}_evictions"] > 0
        assert ask(engine, 1, tier)[tier] == 4 * BLOCK
        assert ask(engine, 2, tier)[tier] < 4 * BLOCK


@pytest.mark.parametrize("tier", TIERS)
def test_what_has_expired_is_not_found_and_its_room_is_given_back(
    tier: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset_s, real = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset_s)
    with small(checkpoint, tmp_path, tier) as engine:
        ask(engine, 1, tier, cache_ttl_s=600)
        ask(engine, 2, tier)
        assert ask(engine, 1, tier)[tier] == ask(engine, 2, tier)[tier] == 4 * BLOCK
        offset_s = 602.0
        assert ask(engine, 2, tier)[tier] == 4 * BLOCK
        used = "hbm_blocks_used" if tier == "hbm" else f"{tier}_slots_used"
        assert engine.stats()[used] == 4
        assert ask(engine, 1, tier)["computed"] == 4 * BLOCK + 1


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_not_written_is_not_found_and_what_is_not_read_is_computed(
    tier: str, checkpoint: Path, tmp_path: Path
) -> None:
    with small(checkpoint, tmp_path, tier) as engine:
        for _ in range(2):
            assert ask(engine, 1, tier, cache_write=False)["computed"] == 4 * BLOCK + 1
        used = "hbm_blocks_used" if tier == "hbm" else f"{tier}_slots_used"
        assert engine.stats()[used] == engine.stats()["hbm_blocks_used"] == 0
        assert ask(engine, 1, tier, cache_read=False)["computed"] == 4 * BLOCK + 1
        assert ask(engine, 1, tier, cache_read=False)["computed"] == 4 * BLOCK + 1
        assert engine.stats()[used] == 4
        assert ask(engine, 1, tier, cache_write=False)[tier] == 4 * BLOCK
        both: RequestOptions = {"cache_read": False, "cache_write": False}
        assert ask(engine, 1, tier, **both)["computed"] == 4 * BLOCK + 1
        assert ask(engine, 1, tier)[tier] == 4 * BLOCK


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_tenants_of_one_salt_share_blocks_and_the_first_is_charged(tier: str, checkpoint: Path, tmp_path: Path) -> None:
    with small(checkpoint, tmp_path, tier) as engine:
        charged = directory_of(engine._store._shelves[Tier(tier)]).tenant_slots
        ask(engine, 1, tier, cache_salt="s", cache_tenant="first")
        assert ask(engine, 1, tier, cache_salt="s", cache_tenant="second")[tier] == 4 * BLOCK
        assert ask(engine, 1, tier, cache_salt="other")["computed"] == 4 * BLOCK + 1
        ask(engine, 2, tier)
        names = [tenant_digest(name) for name in ("first", "second", "s", "other")]
        assert [charged(name) for name in (*names, NO_TENANT)] == [4, 0, 0, 4, 4]


def test_it_holds_for_shelves_that_engines_share(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset_s, real = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset_s)
    tier = "dram"
    with small(checkpoint, tmp_path, tier, True) as first, small(checkpoint, tmp_path, tier, True) as second:
        for engine in (first, second):
            wait_for(lambda engine=engine: "dram_slots_total" in engine.stats())  # type: ignore[misc]
        ask(first, 1, tier)
        wait_for(lambda: ask(second, 1, tier, cache_pin=True, cache_ttl_s=600)[tier] == 4 * BLOCK)
        ask(first, 2, tier)
        churn(second, tier)
        assert ask(first, 1, tier)[tier] == ask(second, 1, tier)[tier] == 4 * BLOCK, "a pin by another engine"
        assert ask(second, 2, tier)[tier] < 4 * BLOCK
        offset_s = 1e9
        assert ask(first, 1, tier)[tier] == 4 * BLOCK, "it was plain before, and so never expires"
        assert ask(second, 3, tier, cache_ttl_s=600)["computed"] == 4 * BLOCK + 1
        wait_for(lambda: ask(first, 3, tier, cache_write=False)[tier] == 4 * BLOCK)
        offset_s += 602.0
        for engine in (first, second):
            assert ask(engine, 3, tier, cache_write=False)["computed"] == 4 * BLOCK + 1


def test_a_contradiction_is_refused_before_anything_runs(checkpoint: Path, tmp_path: Path) -> None:
    with (
        small(checkpoint, tmp_path, "hbm") as engine,
        pytest.raises(InvalidRequest, match="cache_pin: is for blocks that are kept"),
    ):
        engine.stream(prompt(1), ONE, cache_pin=True, cache_write=False)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("cache_read", [False, True])
def test_what_a_context_larger_than_dram_has_left_on_nvme_is_all_found(
    cache_read: bool, sharing: bool, tmp_path: Path
) -> None:
    row_bytes, blocks = 6 * 4096, 64
    model = make_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=blocks * BLOCK, num_hidden_layers=6)
    tokens = [place * place % 290 + 3 for place in range((blocks - 2) * BLOCK)]
    with opened(
        model,
        tiers__hbm__bytes=24 * row_bytes,
        tiers__dram__bytes=20 * (row_bytes + 4096) + 2 * blocks * 4096,
        tiers__dram__staging_bytes=2 * blocks * 4096,
        tiers__nvme__bytes=4 * blocks * (row_bytes + 4096),
        tiers__nvme__path=tmp_path / "cache",
        tiers__linger_s=0,
        sharing=sharing,
    ) as engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        [answer] = engine.generate([tokens], ONE, cache_read=cache_read)
        assert answer.origin["computed"] == len(tokens)
        wait_for(lambda: engine.stats()["waiting_writes"] == engine.stats()["writing_blocks"] == 0)
        [again] = engine.generate([tokens], ONE)
        assert again.token_ids == answer.token_ids
        assert again.origin["computed"] <= 6 * BLOCK, "of what had a home, something was computed again"


@pytest.mark.parametrize("sharing", [False, True])
def test_what_goes_from_dram_to_nvme_goes_from_registered_memory(
    checkpoint: Path, sharing: bool, tmp_path: Path
) -> None:
    need_registered_memory()
    from kvtier._native import Ring

    cache = {"tiers__nvme__path": tmp_path / "cache", "tiers__nvme__bytes": "1MiB", "tiers__linger_s": 0}
    with opened(checkpoint, io__engine="uring", sharing=sharing, **cache) as engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        [answer] = engine.generate([prompt(1)], ONE)
        wait_for(lambda: engine.stats()["nvme_writes"] == 4)
        moves = engine._store._shelves[Tier.NVME]._transfers._engine
        assert isinstance(moves, UringEngine) and isinstance(moves._writes, RingLane)
        ring = moves._writes._ring
        assert isinstance(ring, Ring) and ring.registered_moves == 4 and ring.refusal() == 0
        for tier in ("hbm", "dram"):
            engine.evict(tier)
        [again] = engine.generate([prompt(1)], ONE)
        assert again.token_ids == answer.token_ids and again.origin["nvme"] == 4 * BLOCK
