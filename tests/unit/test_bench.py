"""The arithmetic and the reports of scripts/bench_serving.py. Nothing here measures: no clock decides a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


def make_results(with_grpc: bool = False):  # type: ignore[no-untyped-def]
    from bench.results import API, GRPC, TIERED, TRANSFORMERS, UNTIERED, Decode, Machine, Results, Ttft

    machine = Machine("a processor", 2, 2, 0.1, 20e9, 5e9, 2e9, 1e12)
    seconds = {"computed": (3.0, 2.0, 4.0), "hbm": (0.02,), "dram": (0.05,), "nvme": (0.2, 0.1, 0.15)}
    ways = (API, GRPC) if with_grpc else (API,)
    ttft = tuple(
        Ttft(way, origin, 3000, times, {"computed": 24, origin: 2976}, 0.01)
        for way in ways
        for origin, times in seconds.items()
    )
    rates = {TIERED: (95.0, 190.0, 99.0), UNTIERED: (100.0, 200.0, 90.0), TRANSFORMERS: (50.0, 80.0, 49.5)}
    decode = tuple(Decode(system, 8, 1024, samples, 300.0) for system, samples in rates.items())
    return Results(machine, {"model": "tiny"}, ttft, decode)


def test_a_decode_rate_counts_only_while_all_streams_decode() -> None:
    from bench.results import decode_rate

    early = [(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]
    late = [(2.0, 1), (3.0, 2), (4.0, 1), (9.0, 100)]
    assert decode_rate([early, late]) == (2 + 3) / 2.0
    assert decode_rate([[(0.0, 1), (0.5, 3)]]) == 6.0


def test_a_decode_rate_of_streams_that_never_met_is_refused() -> None:
    from bench.results import decode_rate

    with pytest.raises(ValueError, match="did not overlap"):
        decode_rate([[(0.0, 1), (1.0, 1)], [(1.0, 1), (2.0, 1)]])


def test_a_decode_limit_reads_the_weights_once_for_the_whole_batch() -> None:
    from bench.results import decode_limit

    assert decode_limit(100, 10, 1, 1100.0) == 10.0
    assert decode_limit(100, 10, 10, 1000.0) == 50.0
    assert decode_limit(100, 10, 1, 0.0) == 0.0


def test_a_prefill_limit_counts_every_product_and_attention_twice(tmp_path: Path) -> None:
    from bench.workload import prefill_limit
    from tiny import make_checkpoint

    from kvtier.models.config import ModelConfig

    config = ModelConfig.from_folder(make_checkpoint(tmp_path / "model"))
    width, kv, tokens = config.heads * config.head_dim, config.kv_heads * config.head_dim, 100
    layer = 2 * tokens * config.hidden * (width + kv + kv) + 2 * tokens * width * config.hidden
    layer += 3 * 2 * tokens * config.hidden * config.intermediate
    scores = sum(2 * config.head_dim * (place + 0.5) for place in range(tokens))  # and as many for the weighted sum
    seconds = config.layers * (layer / 1e9 + 2 * config.heads * scores / 0.5e9)
    assert prefill_limit(config, tokens, 1e9) == pytest.approx(tokens / seconds)


def test_ratios_are_those_of_the_rounds_not_of_the_medians() -> None:
    from bench.results import TIERED, TRANSFORMERS, UNTIERED, compare, cost_percent

    results = make_results()
    (against,) = compare(results.decode, TIERED, TRANSFORMERS)
    assert (against.batch, against.context) == (8, 1024)
    assert (against.ratio, against.low, against.high) == (2.0, 1.9, 2.375)
    (cost,) = compare(results.decode, TIERED, UNTIERED)
    assert cost_percent(cost) == pytest.approx(5.0)
    assert compare(results.decode, TIERED, "another system") == []


def test_speedups_compare_medians_of_one_way_in() -> None:
    from bench.results import API, GRPC, speedup

    results = make_results()
    assert speedup(results.ttft, API, "nvme") == pytest.approx(20.0)
    assert speedup(results.ttft, GRPC, "nvme") is None


@pytest.mark.parametrize("with_grpc", [False, True])
def test_the_reports_say_the_same_numbers(tmp_path: Path, with_grpc: bool) -> None:
    from bench.report import plot, print_report, to_json

    results = make_results(with_grpc)
    with (tmp_path / "text").open("w") as file:
        print_report(results, Console(file=file, width=140))
    text = (tmp_path / "text").read_text()
    assert "20.0 times sooner from nvme" in text
    assert "2.00 times transformers" in text and "costs 5.0 % of decode" in text
    content = json.loads(to_json(results))
    assert [item["ratio"] for item in content["comparisons"]] == [2.0, 0.95]
    assert [item["samples_s"] for item in content["ttft"]][3] == [0.2, 0.1, 0.15]
    plot(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_half_a_run_is_no_error(tmp_path: Path) -> None:
    from dataclasses import replace

    from bench.report import plot, print_report, to_json

    results = make_results()
    for half in (replace(results, ttft=()), replace(results, decode=())):
        print_report(half, Console(quiet=True))
        json.loads(to_json(half))
        plot(half, tmp_path / "half.png")


def test_quick_means_short_contexts_of_peers_whatever_else_is_asked_for() -> None:
    import bench_peers

    assert bench_peers.parse(["--contexts", "8192", "--quick"]).contexts == (1024,)
    assert bench_peers.parse([]).contexts == (1024, 8192)


def test_the_command_line_fills_in_what_quick_means() -> None:
    import bench_serving

    quick, whole = bench_serving.parse(["--quick", "--rounds", "9"]), bench_serving.parse([])
    assert (quick.samples, quick.contexts, quick.rounds) == (2, (1024,), 9)
    assert (whole.batches, whole.contexts, whole.prefix) == ((1, 8), (1024, 4096), 3000)
    with pytest.raises(SystemExit):
        bench_serving.parse(["--batches", "1,0"])


def test_a_missing_model_is_one_line_not_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import bench_serving

    arguments = ["--model", str(tmp_path / "none"), "--cache-directory", str(tmp_path)]
    assert bench_serving.main(arguments) == 1
    assert capfd.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
