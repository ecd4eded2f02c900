"""The property the project stands on: fp32 logits are the same bits whatever tier a prefix came from.

HBM big enough for everything against HBM so small that sequences are preempted and blocks travel through DRAM and NVMe
and back. Seeds take turns with the NVMe policy, the eviction policy and the attention backend. Every run asserts that
each tier gave tokens; the books are checked after every step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import make_checkpoint
from workloads import assert_equal, make_workload, run_workload

from kvtier import EngineConfig
from kvtier.block import KVLayout
from kvtier.demotion import NvmePolicy
from kvtier.eviction import POLICIES

SEEDS = range(200)
GROUP = 20
CANCELLED_ROWS_MIN = 10
BLOCK_TOKENS = 16
LONGEST = 9 * BLOCK_TOKENS
LAYOUT = KVLayout(3, 2, 16, BLOCK_TOKENS, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@dataclass(frozen=True)
class Variant:
    """What a seed runs besides its workload."""

    policy: NvmePolicy
    eviction: str
    attention: str


def variant(seed: int) -> Variant:
    """All nine pairs of policies in nine seeds that follow each other, and the reference attention in one of ten."""
    policies, evictions = list(NvmePolicy), list(POLICIES)
    attention = "reference" if seed % 10 == 7 else "auto"
    return Variant(policies[seed % 3], evictions[seed // 3 % 3], attention)


def config(
    model: Path, variant: Variant, hbm_blocks: int, dram_blocks: int, cache: Path | None, step_tokens: int
) -> EngineConfig:
    return EngineConfig.load(
        None,
        {
            "model": model,
            "dtype": "float32",
            "block_tokens": BLOCK_TOKENS,
            "tiers.hbm.bytes": hbm_blocks * LAYOUT.row_bytes,
            "tiers.dram.bytes": dram_blocks * SLOT_BYTES,
            "tiers.dram.staging_bytes": 0,
            "tiers.nvme.bytes": "4MiB" if cache else 0,
            "tiers.pin_share": 0.1,  # what is pinned in DRAM does not come from NVMe
            "sharing": False,
            "tiers.nvme.path": cache,
            "tiers.load": "always",
            "tiers.nvme.policy": variant.policy.value,
            "eviction": variant.eviction,
            "attention": variant.attention,
            "io.readers": 1,
            "scheduler.step_tokens": step_tokens,
            "scheduler.beside_tokens": step_tokens // 3,
        },
    )


@pytest.mark.parametrize("group", range(len(SEEDS) // GROUP))
def test_small_tiers_give_the_same_bits_as_big_hbm(group: int, checkpoint: Path, tmp_path: Path) -> None:
    preemptions = cancelled_rows = 0
    written: Counter[NvmePolicy] = Counter()
    for seed in SEEDS[group * GROUP : (group + 1) * GROUP]:
        chosen = variant(seed)
        print("seed", seed, chosen)
        rounds = make_workload(seed, BLOCK_TOKENS, 300, LONGEST)
        reference = run_workload(config(checkpoint, chosen, 512, 0, None, 4096), rounds)
        assert reference.origin["dram"] == reference.origin["nvme"] == 0 < reference.origin["hbm"]
        cache = tmp_path / f"cache-{seed}"
        small = run_workload(config(checkpoint, chosen, 11, 24, cache, 16 + seed % 50), rounds)
        cancelled_rows += assert_equal(reference, small)
        assert min(small.origin["hbm"], small.origin["dram"], small.origin["nvme"]) > 0, small.origin
        assert small.stats["promoted_nvme_hbm"] > 0 and small.stats["promoted_dram_hbm"] > 0
        preemptions += int(small.stats["preemptions"])
        written[chosen.policy] += small.stats["nvme_writes"]
    assert preemptions > 0, "HBM was never tight enough to preempt"
    assert cancelled_rows >= CANCELLED_ROWS_MIN, f"{cancelled_rows} rows of cancelled requests were compared"
    assert min(written[policy] for policy in NvmePolicy) > 0, written


def test_the_seeds_cover_every_pair_of_policies_and_both_attentions() -> None:
    seen = Counter(variant(seed) for seed in SEEDS)
    assert len({(item.policy, item.eviction) for item in seen}) == 9
    assert len({item.policy for item in seen if item.attention == "reference"}) == 3
    assert 15 <= sum(count for item, count in seen.items() if item.attention == "reference") <= 25
