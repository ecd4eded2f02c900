"""Metrics: closed label sets, snapshots, and observations on their way to a publisher."""

from __future__ import annotations

import threading

import pytest

from kvtier.block import Tier
from kvtier.metrics import Kind, Metrics, Sample


def sample(metrics: Metrics, name: str, *labels: str) -> Sample:
    return next(item for item in metrics.snapshot() if item.family.name == name and item.labels == labels)


def test_every_family_is_named_for_us_and_carries_its_unit() -> None:
    families = Metrics().families
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("kvtier_")
        assert family.help
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
        units = ("_total", "_blocks", "_bytes", "_requests", "_seconds", "_up", "_ratio", "_per_second")
        assert family.name.endswith(units), family.name
        assert (family.kind is Kind.HISTOGRAM) == bool(family.buckets)
        assert list(family.buckets) == sorted(set(family.buckets))


def test_every_series_is_there_from_the_start_at_zero() -> None:
    samples = Metrics().snapshot()
    assert all(item.value == 0 for item in samples)
    origins = {item.labels for item in samples if item.family.name == "kvtier_prompt_tokens_total"}
    assert origins == {("hbm",), ("dram",), ("nvme",), ("computed",)}


def test_counters_add_and_gauges_hold() -> None:
    metrics = Metrics()
    metrics.prompt_tokens.add(5, "hbm")
    metrics.prompt_tokens.add(2, "hbm")
    metrics.tier_used_bytes.set(4096, "dram")
    assert sample(metrics, "kvtier_prompt_tokens_total", "hbm").value == metrics.prompt_tokens.value("hbm") == 7
    assert sample(metrics, "kvtier_prompt_tokens_total", "nvme").value == 0
    assert sample(metrics, "kvtier_tier_used_bytes", "dram").value == 4096
    metrics.clear_gauges()
    assert sample(metrics, "kvtier_tier_used_bytes", "dram").value == 0
    assert metrics.prompt_tokens.value("hbm") == 7


def test_a_label_outside_the_closed_set_is_a_bug() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.prompt_tokens.add(1, "disk")
    with pytest.raises(AssertionError):
        metrics.tier_used_bytes.set(1, "disk")
    with pytest.raises(AssertionError):
        metrics.generated_tokens.add(-1)


def test_a_move_is_a_promotion_or_a_demotion_by_its_direction() -> None:
    metrics = Metrics()
    metrics.moved(Tier.NVME, Tier.HBM, 3, 300)
    metrics.moved(Tier.HBM, Tier.DRAM, 2, 200)
    assert metrics.promoted_blocks.value("nvme", "hbm") == 3
    assert metrics.promoted_bytes.value("nvme", "hbm") == 300
    assert metrics.demoted_blocks.value("hbm", "dram") == 2
    assert metrics.demoted_bytes.value("hbm", "dram") == 200


def test_a_histogram_counts_into_the_bucket_whose_bound_is_not_below() -> None:
    metrics = Metrics()
    bounds = metrics.ttft_seconds.family.buckets
    for value in (0.0, bounds[0], bounds[0] * 1.5, bounds[-1] + 1):
        metrics.ttft_seconds.observe(value)
    taken = sample(metrics, "kvtier_ttft_seconds")
    assert taken.bucket_counts[:2] == (2, 1)
    assert taken.bucket_counts[-1] == 1
    assert len(taken.bucket_counts) == len(bounds) + 1
    assert taken.value == pytest.approx(2.5 * bounds[0] + bounds[-1] + 1)


def test_observations_are_kept_only_for_a_publisher_and_within_its_limit() -> None:
    metrics = Metrics()
    metrics.ttft_seconds.observe(1.0)
    assert metrics.take_observations() == []
    metrics.keep_observations(2)
    for value in (1.0, 2.0, 3.0):
        metrics.ttft_seconds.observe(value)
    assert [item.value for item in metrics.take_observations()] == [2.0, 3.0]
    assert metrics.dropped_observations.value() == 1
    assert metrics.take_observations() == []
    assert metrics.ttft_seconds.count() == 4


def test_updates_from_several_threads_are_all_counted() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2000):
            metrics.generated_tokens.add()
            metrics.tpot_seconds.observe(0.01)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.generated_tokens.value() == metrics.tpot_seconds.count() == 8000
