"""The arithmetic of a plan, and the command that shows it, over config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from engines import LEAVE_S, end_keepers, wait_for
from late import LateDevice
from tiny import make_checkpoint
from typer.testing import CliRunner

from kvtier import Engine, EngineConfig, InvalidRequest, SamplingParams
from kvtier.block import KVLayout, Tier
from kvtier.cli.main import app
from kvtier.cli.plan_view import shown_time
from kvtier.models.config import ModelConfig
from kvtier.models.ops import make_ops
from kvtier.planning import Capacities, Served, Shape, Speeds, longest, plan, shape_of
from kvtier.record import NO_TENANT

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
SHAPE = Shape(LAYOUT, parameters=1000, embedding_parameters=100, heads=4, windows=(None,) * 4)
SPEEDS = Speeds(hbm_bytes_s=1e9, dram_bytes_s=1e8, nvme_bytes_s=1e7, flops_s=1e9)
TIERS = Capacities(hbm=10, dram=20, nvme=100, working_set=4, staged=50)
ROW = LAYOUT.row_bytes


@pytest.mark.parametrize(
    ("blocks", "served", "homes", "lacking"),
    [
        (10, Served.RESIDENT, (10, 0, 0), 0),
        (11, Served.FROM_DRAM, (4, 7, 0), 0),
        (24, Served.FROM_DRAM, (4, 20, 0), 0),
        (25, Served.FROM_NVME, (4, 20, 1), 0),
        (74, Served.FROM_NVME, (4, 20, 50), 0),
        (75, Served.NOWHERE, (4, 20, 50), 1),
    ],
)
def test_a_context_lies_in_the_nearest_tiers_that_hold_it(
    blocks: int, served: Served, homes: tuple[int, int, int], lacking: int
) -> None:
    for tokens in (blocks * 16, blocks * 16 - 15):
        found = plan(SHAPE, TIERS, SPEEDS, tokens)
        assert found.served is served and tuple(found.blocks[tier] for tier in Tier) == homes
        assert found.lacking == lacking and (found.step_s == 0) == (served is Served.NOWHERE)


def test_without_a_working_set_nothing_is_streamed() -> None:
    small = Capacities(hbm=10, dram=20, nvme=100, working_set=0, staged=50)
    found = plan(SHAPE, small, SPEEDS, 11 * 16)
    assert found.served is Served.NOWHERE and found.lacking == 1
    assert longest(SHAPE, small) == {Served.RESIDENT: 160, Served.FROM_DRAM: 0, Served.FROM_NVME: 0}


def test_the_longest_context_of_each_way_is_served_so_and_no_longer_one_is() -> None:
    for served, tokens in longest(SHAPE, TIERS).items():
        assert plan(SHAPE, TIERS, SPEEDS, tokens).served is served
        assert plan(SHAPE, TIERS, SPEEDS, tokens + 1).served is not served


def test_a_step_costs_bytes_over_bandwidth_and_nvme_is_read_meanwhile() -> None:
    weights_s = 900 * 2 / 1e9
    assert plan(SHAPE, TIERS, SPEEDS, 160).step_s == pytest.approx(weights_s + 10 * ROW / 1e9)
    assert plan(SHAPE, TIERS, SPEEDS, 11 * 16).step_s == pytest.approx(weights_s + 4 * ROW / 1e9 + 7 * ROW / 1e8)
    near_s = weights_s + 4 * ROW / 1e9 + 21 * ROW / 1e8  # a row of NVMe is attended in DRAM, and takes less to read
    assert plan(SHAPE, TIERS, SPEEDS, 25 * 16).step_s == pytest.approx(near_s)
    assert near_s < 50 * ROW / 1e7
    assert plan(SHAPE, TIERS, SPEEDS, 74 * 16).step_s == pytest.approx(50 * ROW / 1e7)


def test_a_sliding_window_is_read_only_as_far_as_it_sees() -> None:
    windowed = Shape(LAYOUT, 1000, 100, 4, (16, None, 16, None))
    found = plan(windowed, TIERS, SPEEDS, 160)
    assert found.step_bytes[Tier.HBM] == pytest.approx(10 * ROW * (0.1 + 1 + 0.1 + 1) / 4, abs=1)
    assert windowed.prefill_flops(160) < SHAPE.prefill_flops(160)


def test_prefill_counts_two_operations_a_weight_and_four_a_pair_and_dimension() -> None:
    pairs = 5 * 6 // 2
    assert SHAPE.prefill_flops(5) == 2 * 5 * 900 + 4 * pairs * 4 * 4 * 64
    one = Shape(LAYOUT, 1000, 100, 4, (2,) * 4)
    assert one.prefill_flops(5) == 2 * 5 * 900 + 4 * (1 + 2 + 2 + 2 + 2) * 4 * 4 * 64


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_weights(tmp_path: Path, tied: bool) -> None:
    from kvtier.attention.reference import ReferenceAttention
    from kvtier.models.decoder import load_decoder

    folder = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    backend = ReferenceAttention()
    decoder = load_decoder(folder, "float32", 16, backend, make_ops(backend))
    shape = shape_of(ModelConfig.from_folder(folder), 16, "float32")
    assert shape.layout == decoder.layout and shape.weights_bytes == decoder.weights_bytes


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


SPEED_OPTIONS = ["--memory-speed", "20GB", "--nvme-speed", "1GB", "--flops", "1e12"]


def test_the_command_plans_what_an_engine_would_do(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    row = KVLayout(3, 2, 16, 16, "float32").row_bytes
    sizes = ["--hbm", 16 * row, "--dram", 40 * (row + 4096), "--nvme", "16MiB", "--set", "block_tokens=16"]
    sizes += [
        "--set",
        "scheduler.streamed_max=1",
        "--set",
        "tiers.dram.staging_bytes=0",
        "--dtype",
        "float32",
        *SPEED_OPTIONS,
        "--cache-dir",
        tmp_path,
    ]
    status, text, _ = run(folder, "--context", 100, *sizes, "--json")
    said = json.loads(text)
    assert status == 0 and said["served"] == "resident" and said["blocks"] == {"hbm": 7, "dram": 0, "nvme": 0}
    status, text, _ = run(folder, "--context", 512, *sizes, "--json")
    said = json.loads(text)
    assert status == 0 and said["served"] == "streamed from DRAM"
    assert said["blocks"]["dram"] == 32 - said["working_set_blocks"] and said["tokens_per_s"] > 0
    status, text, _ = run(folder, "--context", 512, *sizes)
    assert status == 0 and "streamed from DRAM" in text and "tokens/s at most" in text


def test_the_command_says_what_a_refused_context_lacks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    row = KVLayout(3, 2, 16, 16, "float32").row_bytes
    sizes = ["--hbm", 16 * row, "--dram", 0, "--set", "block_tokens=16", "--dtype", "float32", *SPEED_OPTIONS]
    status, text, _ = run(folder, *sizes)
    assert status == 1 and "raise tiers.hbm.bytes, or give tiers.dram.bytes" in " ".join(text.split())


@pytest.mark.parametrize(
    ("changed", "way_out"),
    [
        (["--set", "scheduler.streamed_max=0"], "scheduler.streamed_max above 0"),
        (["--set", "scheduler.streamed_hbm=0.01"], "raise tiers.hbm.bytes: it is too small"),
        (["--nvme", "16MiB"], "on NVMe: tiers.dram.staging_bytes, at most half of DRAM"),
        (["--nvme", 0], "raise tiers.dram.bytes or tiers.nvme.bytes, or ask"),
        (["--nvme", "16MiB", "--dram", "16MiB"], "served: streamed from DRAM"),
        (["--nvme", "16MiB", "--set", "tiers.dram.staging_bytes=16MiB", "--dram", 700_000], "streamed from NVMe"),
    ],
)
def test_a_refusal_names_what_would_let_the_context_in(tmp_path: Path, changed: list[object], way_out: str) -> None:
    folder = make_checkpoint(tmp_path / "model")
    row = KVLayout(3, 2, 16, 16, "float32").row_bytes
    sizes = ["--hbm", 20 * row, "--dram", 4 * (row + 4096), "--set", "block_tokens=16", "--dtype", "float32"]
    sizes += ["--cache-dir", tmp_path, "--set", "io.readers=1", "--set", "io.writers=1", *SPEED_OPTIONS]
    status, text, _ = run(folder, *sizes, *changed)
    assert status == ("refused" in text) and way_out in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--context", 513], "1 to 512 tokens, got 513"),
        (["--set", "context=100", "--context", 101], "model and `context` take 1 to 100 tokens, got 101"),
        (["--set", "context=513"], "context: the model was made for 512 tokens, got 513"),
        (["--memory-speed", "0"], "--memory-speed: more than 0 bytes a second"),
        (["--memory-speed", "fast"], "--memory-speed: bytes read within a second"),
        (["--memory-speed", "0.5"], "--memory-speed: bytes read within a second"),
        (["--flops", "-1"], "--flops: operations a second"),
        (["--hbm", "1KiB"], "tiers.hbm.bytes: 1.0 KiB hold 0 blocks"),
    ],
)
def test_wrong_options_are_named_with_limit_and_value(tmp_path: Path, arguments: list[object], complaint: str) -> None:
    folder = make_checkpoint(tmp_path / "model")
    status, _, errors = run(folder, *SPEED_OPTIONS, *arguments)
    assert status == 2 and complaint in " ".join(errors.split())


def test_a_prefill_of_hours_is_told_in_hours(tmp_path: Path) -> None:
    arguments = ["plan", str(make_checkpoint(tmp_path / "model")), "--context", "1", "--memory-speed", "1GB"]
    for flops, shown in ((1, r"computed [\d.,]+ (h|days)"), (1e4, r"computed [\d.]+ (s|min)"), (1e12, r"[\d.]+ ms")):
        result = CliRunner().invoke(app, [*arguments, "--flops", str(flops)])
        assert re.search(shown, result.stdout) and result.stdout.startswith("1 token of KV"), result.output
    assert [shown_time(seconds) for seconds in (0.5, 119, 121, 7201, 133_943, 86400 * 3)] == [
        "500.0 ms",
        "119.0 s",
        "2.0 min",
        "2.0 h",
        "37.2 h",
        "3.0 days",
    ]


PLANNED = ("hbm", "dram", "nvme")


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_plan_tells_what_an_engine_of_that_configuration_holds(
    sharing: bool, on_device: bool, tmp_path: Path
) -> None:
    folder, cache = make_checkpoint(tmp_path / "model"), tmp_path / "cache"
    layout = KVLayout(3, 2, 16, 16, "float32")
    for dtype in ("bfloat16", "float32"):  # another layout has part of the directory's bytes by then
        values: dict[str, object] = {
            "model": folder,
            "dtype": dtype,
            "block_tokens": 16,
            "sharing": sharing,
            "tiers.hbm.bytes": 20 * layout.row_bytes + 100,
            "tiers.dram.bytes": 30 * (layout.row_bytes + 4096) + 77,
            "tiers.dram.staging_bytes": 15 * layout.slice_bytes + 5,
            "tiers.nvme.bytes": (30 if dtype == "bfloat16" else 70) * (layout.row_bytes + 4096),
            "tiers.nvme.path": cache,
            "tiers.nvme.wait_s": 60,
            "tiers.linger_s": 0,
            "io.readers": 1,
            "io.writers": 1,
        }
        device = ["--set", "device=cuda", "--memory-speed", "2GB", "--dram-speed", "1GB"] if on_device else []
        given = [item for key, value in values.items() if key != "model" for item in ("--set", f"{key}={value}")]
        status, text, _ = run(folder, "--context", 512, *given, *SPEED_OPTIONS, *device, "--json")
        said = json.loads(text)
        with Engine(EngineConfig.load(None, values), device=LateDevice(1) if on_device else None) as engine:
            wait_for(lambda: {"dram_slots_total", "nvme_slots_total"} <= engine.stats().keys())
            stats, capacity = engine.stats(), engine._intake._capacity
            rows = (engine._store.usable_count, stats["dram_slots_total"], stats["nvme_slots_total"])
            assert tuple(said["capacity_blocks"][tier] for tier in PLANNED) == rows
            assert said["working_set_blocks"] == capacity.slots_max
            assert said["staged_blocks_max"] == engine._store.hand_down.staged_max > 0
            longest_tokens = max(said["longest_tokens"].values())
            assert capacity.tokens(NO_TENANT) == longest_tokens
            assert status == (0 if longest_tokens >= 512 else 1)
        end_keepers(cache, LEAVE_S)


def test_what_a_day_may_not_write_is_neither_planned_nor_taken(tmp_path: Path) -> None:
    folder, layout = make_checkpoint(tmp_path / "model"), KVLayout(3, 2, 16, 16, "float32")
    slot_bytes = layout.row_bytes + 4096
    values: dict[str, object] = {
        "model": folder,
        "dtype": "float32",
        "block_tokens": 16,
        "sharing": False,
        "tiers.hbm.bytes": 12 * layout.row_bytes,
        "tiers.dram.bytes": 4 * slot_bytes + 40 * layout.slice_bytes,
        "tiers.dram.staging_bytes": 40 * layout.slice_bytes,
        "tiers.nvme.bytes": 70 * slot_bytes,
        "tiers.nvme.path": tmp_path / "cache",
        "tiers.nvme.write_bytes_day": 4 * slot_bytes + 1,
        "io.readers": 1,
        "io.writers": 1,
        "scheduler.streamed_max": 1,
        "scheduler.streamed_hbm": 1.0,
    }
    given = [item for key, value in values.items() if key != "model" for item in ("--set", f"{key}={value}")]
    said = json.loads(run(folder, *given, *SPEED_OPTIONS, "--json")[1])
    rows = said["working_set_blocks"] + said["capacity_blocks"]["dram"] + 4
    assert max(said["longest_tokens"].values()) == rows * 16 < 512
    with Engine(EngineConfig.load(None, values)) as engine:
        assert engine._intake._capacity.tokens(NO_TENANT) == rows * 16
        with pytest.raises(InvalidRequest, match=r"of NVMe 48\.0 KiB"):
            engine.generate([[3] * (rows * 16 + 1)], SamplingParams(max_tokens=1))
        [done] = engine.generate([[3 + i % 200 for i in range(rows * 16)]], SamplingParams(max_tokens=1))
        assert len(done.token_ids) == 1 and engine.stats()["streamed_nvme_bytes"] > 0


def test_what_a_gpu_elsewhere_takes_is_planned_from_what_is_given(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    given = ["--set", "device=cuda", "--flops", "1e12"]
    status, _, said = run(folder, *given, "--hbm", "1GiB")
    assert status == 2 and "--memory-speed, --dram-speed: to be given for cuda" in " ".join(said.split())
    speeds = ["--memory-speed", "2GB", "--dram-speed", "1GB"]
    if not torch.cuda.is_available():
        status, _, said = run(folder, *given, *speeds, "--hbm", "0.5")
        assert status == 2 and "give bytes, as in 60GiB" in " ".join(said.split())
    status, text, _ = run(folder, *given, *speeds, "--hbm", "1GiB", "--json")
    assert status == 0 and json.loads(text)["speeds"]["hbm_bytes_s"] == 2e9
