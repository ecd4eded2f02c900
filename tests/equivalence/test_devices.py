"""Engines whose HBM is a device's give the same bits as one whose HBM the shelves reach themselves.

First with copies that come late and in any order, decode passes that are replayed late, and slices that are brought
near late; then a rehearsal of the CUDA device on the CPU: the Triton-language
programs in their interpreter, rows by way of landing places, DRAM and NVMe rows attended in place. No GPU is needed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from late import LateDevice
from test_streamed_contexts import LAYOUT, PLACES, config, make_mixed
from tiny import make_checkpoint
from workloads import Ask, Outcome, Round, assert_equal, run_workload

from kvtier import EngineConfig, SamplingParams, sizing
from kvtier.block import KVLayout
from kvtier.device.cuda import CudaDevice

CONTEXT = 1024
SEEDS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=CONTEXT)


@pytest.mark.parametrize("seed", [0, 1])
def test_copies_that_come_late_change_no_bits(seed: int, checkpoint: Path, tmp_path: Path) -> None:
    rounds = make_mixed(seed, 14 * LAYOUT.block_tokens, 32 * LAYOUT.block_tokens)
    reference = run_workload(config(checkpoint, 512, 0, 4096), rounds)
    slot_bytes, staging_bytes = LAYOUT.row_bytes + 4096, 64 * LAYOUT.slice_bytes
    small = config(
        checkpoint, 12 + seed, 0, 16 + 10 * seed, scheduler__streamed_max=1 + seed % 2, scheduler__streamed_hbm=0.9,
        tiers__dram__bytes=20 * slot_bytes + staging_bytes, tiers__dram__staging_bytes=staging_bytes,
        tiers__nvme__bytes=128 * slot_bytes + (1 << 21), tiers__nvme__path=tmp_path / "cache", io__writers=1,
    )  # fmt: skip
    device = LateDevice(seed)
    found = run_workload(small, rounds, device)
    assert_equal(reference, found)
    assert device.made.late_count > 20, "no copy was late"
    assert device.launcher.late_count > 20 and device.launcher.replayed_count > device.launcher.recorded_count > 0
    assert min(found.stats["streamed_dram_bytes"], found.stats["streamed_nvme_bytes"]) > 0
    assert found.origin["dram"] + found.origin["nvme"] > 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_decode_in_graphs_and_slices_brought_near_change_no_bits(
    seed: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of HBM is for slices than an engine would take, so that whole prefixes fit, or a few rows of them."""
    monkeypatch.setattr(sizing, "NEAR_SHARE_MAX", 0.5 if seed % 2 else 0.2)
    places = PLACES[seed % 2]
    rounds = make_mixed(100 + seed, 14 * LAYOUT.block_tokens, 32 * LAYOUT.block_tokens)
    reference = run_workload(config(checkpoint, 512, 0, 4096), rounds)
    limits: dict[str, object] = {"scheduler__streamed_max": 1 + seed % 3, "scheduler__streamed_hbm": 0.9}
    limits |= {"io__writers": 1, **places.overrides(tmp_path / "cache")}
    device = LateDevice(seed)
    small = run_workload(config(checkpoint, 22, 0, 16 + seed % 50, **limits), rounds, device)
    compared = assert_equal(reference, small)
    print("seed", seed, places.name, "rows of cancelled requests", compared, vars(device.launcher))
    launcher = device.launcher
    assert launcher.late_count > 20 and launcher.gathered_count > 20
    assert launcher.replayed_count > launcher.recorded_count > 0
    assert small.stats["streamed_nvme_bytes"] > 0 or not places.staged_blocks


def small_config(folder: Path, **overrides: object) -> EngineConfig:
    """A model of two layers with one KV head, for the interpreter: it takes a tenth of a second a program."""
    model = folder / "small"
    if not model.exists():
        make_checkpoint(model, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=32)
    layout = KVLayout(2, 1, 16, 16, "float32")
    staging_bytes = 8 * layout.slice_bytes
    sizes = {
        "tiers__dram__bytes": 4 * layout.row_bytes + (layout.row_bytes + 4096) + staging_bytes,
        "tiers__dram__staging_bytes": staging_bytes,
        "tiers__nvme__bytes": 32 * (layout.row_bytes + 4096) + (1 << 21),
        "tiers__nvme__path": folder / "cache",
        "io__writers": 1,
    }
    return config(model, 6, 0, 48, layout, **(sizes | overrides))


ASKS = [
    Ask([(7 * i) % 290 + 3 for i in range(count)], SamplingParams(max_tokens=4, ignore_eos=True)) for count in (20, 97)
]


def test_an_engine_on_the_triton_kernel_gives_the_native_tokens(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    rounds = [Round((), (ASKS[0],))]
    native = run_workload(small_config(tmp_path), rounds)
    interpreted = run_workload(small_config(tmp_path, attention="triton_kernel"), rounds)
    assert_close(native, interpreted)


def test_a_rehearsal_of_a_gpu_on_the_cpu_gives_the_native_tokens_from_every_tier(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    rounds = [Round((), tuple(ASKS)), Round(("hbm",), (ASKS[0],))]
    native = run_workload(small_config(tmp_path, tiers__hbm__bytes="1MiB", tiers__nvme__bytes=0), rounds)
    rehearsed = run_workload(small_config(tmp_path), rounds, CudaDevice(torch.device("cpu")))
    assert_close(native, rehearsed)
    stats = rehearsed.stats
    assert min(stats["streamed_dram_bytes"], stats["streamed_nvme_bytes"]) > 0, stats
    assert rehearsed.origin["dram"] + rehearsed.origin["nvme"] > 0 and stats["demoted_hbm_dram"] > 0


def assert_close(one: Outcome, other: Outcome) -> None:
    """Same tokens, and logits that differ by no more than the order of sums explains."""
    assert one.tokens == other.tokens and one.rows.keys() == other.rows.keys()
    for key, row in one.rows.items():
        torch.testing.assert_close(other.rows[key], row, rtol=1e-4, atol=1e-4)
