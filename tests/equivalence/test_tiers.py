"""The property the project stands on: fp32 logits are the same bits whatever tier a prefix came from.

HBM big enough for everything against HBM so small that sequences are preempted and blocks travel through DRAM and NVMe
and back. Every run asserts that each tier gave tokens; the books are checked after every step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_checkpoint
from workloads import assert_equal, make_workload, run_workload

from kvtier import EngineConfig
from kvtier.block import KVLayout

SEEDS = range(200)
GROUP = 20
BLOCK_TOKENS = 16
LONGEST = 9 * BLOCK_TOKENS
LAYOUT = KVLayout(3, 2, 16, BLOCK_TOKENS, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def config(model: Path, hbm_blocks: int, dram_blocks: int, cache: Path | None, step_tokens: int) -> EngineConfig:
    return EngineConfig.load(
        None,
        {
            "model": model,
            "dtype": "float32",
            "block_tokens": BLOCK_TOKENS,
            "tiers.hbm.bytes": hbm_blocks * LAYOUT.row_bytes,
            "tiers.dram.bytes": dram_blocks * SLOT_BYTES,
            "tiers.nvme.bytes": "4MiB" if cache else 0,
            "sharing": False,
            "tiers.nvme.path": cache,
            "scheduler.step_tokens": step_tokens,
        },
    )


@pytest.mark.parametrize("group", range(len(SEEDS) // GROUP))
def test_small_tiers_give_the_same_bits_as_big_hbm(group: int, checkpoint: Path, tmp_path: Path) -> None:
    preemptions = 0
    for seed in SEEDS[group * GROUP : (group + 1) * GROUP]:
        print("seed", seed)
        rounds = make_workload(seed, BLOCK_TOKENS, 300, LONGEST)
        reference = run_workload(config(checkpoint, 512, 0, None, 4096), rounds)
        assert reference.origin["dram"] == reference.origin["nvme"] == 0 < reference.origin["hbm"]
        small = run_workload(config(checkpoint, 11, 24, tmp_path / f"cache-{seed}", 16 + seed % 50), rounds)
        assert_equal(reference, small)
        assert min(small.origin["hbm"], small.origin["dram"], small.origin["nvme"]) > 0, small.origin
        assert small.stats["promoted_nvme_hbm"] > 0 and small.stats["promoted_dram_hbm"] > 0
        preemptions += int(small.stats["preemptions"])
    assert preemptions > 0, "HBM was never tight enough to preempt"
