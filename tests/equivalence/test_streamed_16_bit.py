"""Contexts larger than HBM in 16 bit, held to what the design asks of reduced precision against all-in-HBM.

Logits within a tolerance of the largest one, and tokens equal wherever the margin of the top two exceeds it. Rows of a
request are compared up to the first token in which two runs part: after that they have different contexts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_streamed_contexts import BLOCK_TOKENS, CONTEXT, CONTEXT_BLOCKS, config, long_context
from tiny import make_checkpoint
from workloads import Outcome, run_workload

from kvtier.block import KVLayout

TOLERANCE = {"bfloat16": 0.03, "float16": 0.004}
"""Of the largest logit: some units in the last place of the type, several layers deep."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)


def assert_close(reference: Outcome, other: Outcome, tolerance: float) -> tuple[int, float]:
    """See the module; returns how many rows were compared and by how much of the largest logit they differ at most."""
    compared, worst = 0, 0.0
    for index, (ours, theirs) in enumerate(zip(other.tokens, reference.tokens, strict=True)):
        assert len(ours) == len(theirs)
        for place, (token, expected) in enumerate(zip(ours, theirs, strict=True)):
            row, near = reference.rows[(index, place)], other.rows[(index, place)]
            largest = float(row.abs().max())
            worst = max(worst, float((near - row).abs().max()) / largest)
            compared += 1
            top = row.topk(2).values
            if token != expected:
                margin = float(top[0] - top[1]) / largest
                assert margin <= tolerance, f"request {index}, token {place}: margin {margin:.4f}"
                break
    assert worst <= tolerance, f"logits differ by {worst:.4f} of the largest"
    return compared, worst


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("nvme", "attention"), [(False, "auto"), (True, "auto"), (True, "reference")])
def test_a_context_larger_than_hbm_gives_nearly_the_same_logits(
    dtype: str, nvme: bool, attention: str, checkpoint: Path, tmp_path: Path
) -> None:
    layout = KVLayout(3, 2, 16, BLOCK_TOKENS, dtype)
    rounds, slot_bytes = long_context(), layout.row_bytes + 4096
    reference = run_workload(config(checkpoint, 4 * CONTEXT_BLOCKS, 0, layout=layout, dtype=dtype), rounds)
    places: dict[str, object] = {"dtype": dtype, "attention": attention}
    if nvme:
        staging = 2 * CONTEXT_BLOCKS * layout.slice_bytes
        places |= {
            "tiers__dram__bytes": staging + 16 * slot_bytes,
            "tiers__dram__staging_bytes": staging,
            "tiers__nvme__bytes": 2 * CONTEXT_BLOCKS * slot_bytes + (1 << 20),
            "tiers__nvme__path": tmp_path / "cache",
        }
    small = run_workload(config(checkpoint, CONTEXT_BLOCKS // 8, 2 * CONTEXT_BLOCKS, 100, layout, **places), rounds)
    compared, worst = assert_close(reference, small, TOLERANCE[dtype])
    print(f"{dtype}, {attention}: {compared} of {len(reference.rows)} rows compared, off by {worst:.5f} of the largest")
    assert compared >= 20
    assert small.stats["streamed_dram_bytes"] > 0 and (small.stats["streamed_nvme_bytes"] > 0) == nvme
