"""The equivalence of tiers on real weights: SmolLM2-135M in fp32, the same bits from HBM alone and through every tier.

Ten seeded workloads, kept short: what scales (preemption, long crowds) is test_tiers.py's on a tiny model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from workloads import Round, assert_equal, make_workload, run_workload

from kvtier import EngineConfig
from kvtier.block import KVLayout

MODEL = Path(__file__).parents[2] / ".cache" / "models" / "smollm2"
BLOCK_TOKENS = 16
LAYOUT = KVLayout(30, 3, 64, BLOCK_TOKENS, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
ASKS_MAX, OUTPUTS_MAX = 4, 4

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        not (MODEL / "model.safetensors").is_file(), reason="SmolLM2 is not there: run scripts/fetch_model.py"
    ),
]


def config(hbm_blocks: int, dram_blocks: int, cache: Path | None, step_tokens: int) -> EngineConfig:
    return EngineConfig.load(
        None,
        {
            "model": MODEL,
            "dtype": "float32",
            "block_tokens": BLOCK_TOKENS,
            "tiers.hbm.bytes": hbm_blocks * LAYOUT.row_bytes,
            "tiers.dram.bytes": dram_blocks * SLOT_BYTES,
            "tiers.dram.staging_bytes": 0,
            "tiers.nvme.bytes": "256MiB" if cache else 0,
            "sharing": False,
            "tiers.nvme.path": cache,
            "tiers.load": "always",
            "io.readers": 1,
            "scheduler.step_tokens": step_tokens,
        },
    )


def short_workload(seed: int) -> list[Round]:
    """A workload of fewer and shorter answers; the prefixes that must come back from each tier stay in."""
    rounds = make_workload(seed, BLOCK_TOKENS, 49152, 7 * BLOCK_TOKENS, outputs=OUTPUTS_MAX)
    short: list[Round] = []
    for index, turn in enumerate(rounds):
        asks = turn.asks[-ASKS_MAX:] if index == 0 else turn.asks[:ASKS_MAX]
        params = [replace(ask.params, max_tokens=min(ask.params.max_tokens or 1, OUTPUTS_MAX)) for ask in asks]
        short.append(replace(turn, asks=tuple(replace(ask, params=own) for ask, own in zip(asks, params, strict=True))))
    return short


@pytest.mark.parametrize("seed", range(10))
def test_real_weights_give_the_same_bits_through_every_tier(seed: int, tmp_path: Path) -> None:
    print("seed", seed)
    rounds = short_workload(seed)
    reference = run_workload(config(128, 0, None, 2048), rounds)
    assert reference.origin["dram"] == reference.origin["nvme"] == 0 < reference.origin["hbm"]
    small = run_workload(config(11, 24, tmp_path / "cache", 16 + 7 * seed), rounds)
    assert_equal(reference, small)
    assert min(small.origin["hbm"], small.origin["dram"], small.origin["nvme"]) > 0, small.origin
    assert len(reference.rows.keys() & small.rows.keys()) > 20
