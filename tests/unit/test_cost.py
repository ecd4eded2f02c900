"""The cost model: estimates that follow the machine, choices span by span, and regret over simulated disks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.block import KVLayout, Tier
from kvtier.cost import NO_WORK, WAIT_MIN_S, CostModel, LoadPolicy, Prices, Span, Work
from kvtier.lane import HUNG_PROBE_S, PROBE_S, Lane

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=64, block_tokens=32, dtype="bfloat16")
ROW_BYTES = LAYOUT.row_bytes
IDLE = {Tier.DRAM: 0, Tier.NVME: 0}


def model(policy: LoadPolicy = LoadPolicy.AUTO, deadline_s: float = 5.0) -> CostModel:
    return CostModel(LAYOUT, deadline_s, policy, step_tokens=512)


def trained(nvme_row_s: float, token_s: float = 0.0005, pair_s: float = 2.5e-7, dram_row_s: float = 1e-4) -> CostModel:
    """A model that has seen a machine of these speeds."""
    costs, chance = model(), random.Random(0)
    for _ in range(60):
        rows = chance.randint(1, 60)
        costs.learn_read(Tier.NVME, rows, 0.001 + rows * nvme_row_s)
        costs.learn_read(Tier.DRAM, rows, 0.0005 + rows * dram_row_s)
        work = Work.of([(chance.randint(0, 4000), chance.randint(30, 512))])
        costs.learn_pass(work, 0.01 + work.tokens * token_s + work.pairs * pair_s)
    return costs


def nvme(blocks: int) -> list[Span]:
    return [Span(Tier.NVME, blocks, blocks)]


# ---- estimates -------------------------------------------------------------------------------------------------------


def test_work_counts_tokens_and_the_pairs_they_look_at() -> None:
    assert Work.of([]) == NO_WORK
    assert Work.of([(0, 4), (10, 2)]) == (6, 8 + 22)


@pytest.mark.parametrize("factor", [1e-4, 0.01, 1.0, 100.0, 1e4])
def test_prices_find_the_truth_from_any_guess_in_spite_of_noise(factor: float) -> None:
    truth, chance = (0.002, 0.0007), random.Random(1)
    prices = Prices(truth[0] * factor, truth[1] * factor)
    for _ in range(80):
        rows = chance.randint(1, 100)
        prices.learn((truth[0] + truth[1] * rows) * chance.lognormvariate(0, 0.2), 1, rows)
    for rows in (1, 10, 100):
        assert prices.seconds(1, rows) == pytest.approx(truth[0] + truth[1] * rows, rel=0.4)


def test_an_outlier_moves_a_price_little_and_three_in_a_row_are_news() -> None:
    prices = Prices(1.0)
    for _ in range(10):
        prices.learn(1.0, 1)
    prices.learn(1000.0, 1)
    assert prices.seconds(1) < 1.5
    for _ in range(4):
        prices.learn(1000.0, 1)
    assert prices.seconds(1) > 20
    for _ in range(6):
        prices.learn(1.0, 1)
    assert prices.seconds(1) < 3


def test_passes_teach_the_price_of_a_token_and_of_its_context() -> None:
    costs = trained(0.001, token_s=0.003, pair_s=2e-6)
    for before in (0, 1000, 3000):
        work = Work.of([(before, 512)])
        assert costs.compute_s(work) == pytest.approx(0.01 + 512 * 0.003 + work.pairs * 2e-6, rel=0.15)
    assert costs.prefill_tokens_per_second() == pytest.approx(512 / (0.01 + 512 * 0.003 + 512 * 256 * 2e-6), rel=0.15)


def test_bandwidth_is_that_of_many_rows_at_once_not_of_one() -> None:
    costs = trained(0.001)
    assert costs.read_bytes_per_second(Tier.NVME) == pytest.approx(ROW_BYTES / 0.001, rel=0.1)
    assert costs.read_bytes_per_second(Tier.DRAM) == pytest.approx(ROW_BYTES / 1e-4, rel=0.2)


# ---- choices ---------------------------------------------------------------------------------------------------------


def test_a_price_that_nothing_speaks_for_stays_one_that_a_machine_can_have() -> None:
    costs, chance = model(), random.Random(1)
    for turn in range(400):  # a row takes no longer than many: all is said to be the start's, again and again anew
        costs.learn_read(Tier.NVME, chance.choice((1, 60)), 0.001 * 8 ** (turn // 40 % 2))
        costs.learn_read(Tier.DRAM, chance.choice((1, 60)), 0.0005 * 8 ** (turn // 40 % 2))
    assert costs.read_bytes_per_second(Tier.NVME) <= 1e12 and costs.read_bytes_per_second(Tier.DRAM) <= 4e12
    for _ in range(60):
        rows = chance.randint(1, 60)
        costs.learn_read(Tier.NVME, rows, rows * 0.002)
    assert costs.read_s(Tier.NVME, 60) == pytest.approx(60 * 0.002, rel=0.25)


def test_what_nobody_has_measured_is_read_and_waited_for_as_long_as_that_pays() -> None:
    choice = model().choose(nvme(20), IDLE)
    assert choice.blocks == 20 and choice.limit_s == choice.patience_s > 0.2


def test_a_slow_disk_loses_a_short_prefix_and_wins_a_long_one() -> None:
    costs = trained(nvme_row_s=0.04, token_s=0.001, pair_s=2e-6)  # a block: 40 ms to read, 32 ms and more to compute
    assert costs.choose(nvme(2), IDLE).blocks == 0
    assert costs.choose(nvme(100), IDLE).blocks == 100


def test_a_fast_span_is_read_and_the_slow_one_behind_it_computed() -> None:
    costs = trained(nvme_row_s=0.1)
    spans = [Span(Tier.DRAM, 10, 10), Span(Tier.NVME, 5, 5)]
    assert costs.choose(spans, IDLE).blocks == 10
    assert costs.choose(spans[1:], IDLE).blocks == 0


def test_blocks_of_hbm_behind_a_slow_span_make_it_worth_reading() -> None:
    costs = trained(nvme_row_s=0.1)
    assert costs.choose([Span(Tier.HBM, 3, 0), Span(Tier.NVME, 2, 2)], IDLE).blocks == 3
    assert costs.choose([Span(Tier.NVME, 2, 2), Span(Tier.HBM, 50, 0)], IDLE).blocks == 52


def test_rows_already_in_the_queue_count() -> None:
    costs = trained(nvme_row_s=0.005)
    assert costs.choose(nvme(4), IDLE).blocks == 4
    assert costs.choose(nvme(4), IDLE | {Tier.NVME: 200}).blocks == 0
    assert costs.choose([Span(Tier.NVME, 4, 0)], IDLE | {Tier.NVME: 4}).blocks == 4, "others read them already"


def test_a_queue_of_prompts_makes_reading_free() -> None:
    costs = trained(nvme_row_s=0.04)
    assert costs.choose(nvme(4), IDLE).blocks == 0
    choice = costs.choose(nvme(4), IDLE, Work.of([(0, 2000)]))
    assert choice.blocks == 4
    assert choice.limit_s > costs.compute_s(Work.of([(0, 2000)])), "until the others are done nothing is lost"


def test_always_means_always() -> None:
    costs = model(LoadPolicy.ALWAYS, deadline_s=3.0)
    for _ in range(20):
        costs.learn_read(Tier.NVME, 1, 60.0)
    assert costs.choose(nvme(4), IDLE) == (4, 3.0, 3.0)


def test_nobody_waits_longer_than_computing_takes_and_in_silence_a_tenth_of_it() -> None:
    costs = trained(nvme_row_s=0.001)
    compute_s = costs.compute_s(Work.of([(0, 100 * 32)]))
    choice = costs.choose(nvme(100), IDLE)
    assert choice.limit_s == pytest.approx(compute_s) and choice.patience_s == pytest.approx(0.1 * compute_s)
    assert model(deadline_s=0.1).choose(nvme(100), IDLE).limit_s == 0.1
    slow = trained(nvme_row_s=0.08, token_s=0.01)
    assert slow.choose(nvme(1), IDLE).patience_s > 0.2, "the first row takes 80 ms"
    tiny = trained(nvme_row_s=1e-5, token_s=2e-5)
    assert tiny.choose(nvme(1), IDLE).limit_s == WAIT_MIN_S


def test_what_lies_in_hbm_is_no_reason_to_wait() -> None:
    costs = trained(nvme_row_s=0.001)
    alone = costs.choose(nvme(2), IDLE).limit_s
    behind = costs.choose([Span(Tier.HBM, 2, 0), *nvme(2)], IDLE).limit_s
    assert alone < behind < 2 * alone, "computing the same tokens with more before them"


# ---- simulated disks -------------------------------------------------------------------------------------------------

DiskSpeed = Callable[[float], float]
"""Seconds of a row at a time."""


def simulate(row_s_at: DiskSpeed, seed: int, seconds: float = 150.0) -> tuple[float, float, float, list[bool]]:
    """Requests one after another on one disk: seconds that the model's choices took, always reading, never reading."""
    costs, lane, chance = model(deadline_s=60.0), Lane(Tier.NVME), random.Random(seed)
    now, ours, reading, computing = 0.0, 0.0, 0.0, 0.0
    read: list[bool] = []
    while now < seconds:
        blocks = chance.choice([2, 8, 30, 100])
        work = Work.of([(0, blocks * 32)])
        noise = chance.lognormvariate(0, 0.3)
        row_s = row_s_at(now)
        read_s = (0.001 + row_s * blocks) * noise
        compute_s = (0.01 + work.tokens * 0.0005 + work.pairs * 2.5e-7) * chance.lognormvariate(0, 0.1)
        choice = costs.choose(nvme(blocks), IDLE)
        read.append(choice.blocks > 0)
        if choice.blocks:
            batch = lane.start(blocks, costs.read_s(Tier.NVME, blocks), now)
            patience_s = choice.patience_s if row_s > choice.patience_s else choice.limit_s
            took_s = read_s if read_s <= patience_s else patience_s + compute_s
            for _ in range(blocks):
                lane.end(batch, False, True, now + read_s, now + read_s)
            costs.learn_read(Tier.NVME, blocks, read_s)
        else:
            took_s = compute_s
            if lane.probe_due(now):
                lane.end(lane.start(1, 0.0, now), False, True, now + row_s, now + row_s)
                costs.learn_read(Tier.NVME, 1, 0.001 + row_s * noise)
        if took_s >= compute_s:
            costs.learn_pass(work, compute_s)
        ours, reading, computing = ours + took_s, reading + read_s, computing + compute_s
        now += took_s + 0.5
    return ours, reading, computing, read


def steady(row_s: float) -> DiskSpeed:
    return lambda _: row_s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("row_s", [0.0001, 0.001, 0.01, 0.02, 0.05, 0.2, 2.0])
def test_regret_against_the_better_fixed_choice_is_small_on_a_steady_disk(row_s: float, seed: int) -> None:
    ours, reading, computing, _ = simulate(steady(row_s), seed)
    assert ours <= 1.1 * min(reading, computing), (ours, reading, computing)


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_is_slow_for_a_while_is_left_alone_then_and_used_again(seed: int) -> None:
    ours, reading, computing, read = simulate(lambda now: 1.0 if 60 <= now < 160 else 0.001, seed, 400.0)
    assert ours <= 0.9 * min(reading, computing), "better than any fixed choice"
    assert all(read[-50:]) and not all(read), "used at the end, not all the time"


@pytest.mark.parametrize("seed", range(3))
def test_regret_stays_small_on_a_disk_that_changes_all_the_time(seed: int) -> None:
    ours, reading, computing, _ = simulate(lambda now: 0.3 if int(now / 20) % 2 else 0.002, seed, 600.0)
    assert ours <= 1.1 * min(reading, computing), (ours, reading, computing)


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_a_lane_counts_what_is_live_and_says_when_a_batch_is_whole() -> None:
    lane = Lane(Tier.NVME)
    first, second = lane.start(2, 0.1, 1.0), lane.start(1, 0.1, 2.0)
    assert (first.rows, second.rows, lane.live, lane.moved_at) == (2, 3, 3, 1.0)
    assert not lane.end(first, False, True, 3.0, 3.1)
    assert lane.end(first, False, True, 2.9, 3.2) and first.ended_at == 3.0
    assert not lane.end(second, False, False, 4.0, 4.0), "a row has failed"
    assert (lane.live, lane.moved_at) == (0, 3.2)


def test_a_silent_lane_is_probed_at_times_and_speaks_again_with_a_good_row() -> None:
    lane = Lane(Tier.NVME)
    hung = lane.start(1, 0.1, 0.0)
    assert not lane.probe_due(9.0), "a read is under way and tells as much"
    lane.give_up(1)
    assert lane.silent and lane.live == 0
    assert lane.probe_due(10.0) and not lane.probe_due(10.0 + PROBE_S)
    probe = lane.start(1, 0.1, 10.0)
    assert lane.probe_due(10.0 + HUNG_PROBE_S), "that one hangs, too"
    assert lane.end(probe, False, True, 16.0, 16.0) and not lane.silent
    assert lane.end(hung, True, True, 20.0, 20.0) and lane.live == 0
