"""Contexts larger than HBM give the same bits as when all of them fits: fp32 logits and tokens.

Single contexts with HBM at a half, a quarter and a sixteenth of them, then seeded workloads that mix streamed and
resident requests, arrivals, cancellations and evictions. Every run asserts that bytes were streamed from the tier it is
about; the books are checked after every step.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import make_checkpoint
from workloads import Ask, Round, assert_equal, make_wishes, run_workload

from kvtier import EngineConfig, SamplingParams
from kvtier.block import KVLayout

BLOCK_TOKENS = 16
CONTEXT = 1024
LAYOUT = KVLayout(3, 2, 16, BLOCK_TOKENS, "float32")
CONTEXT_BLOCKS = CONTEXT // BLOCK_TOKENS
SEEDS = int(os.environ.get("KVTIER_STREAM_SEEDS", "12"))
"""Workloads on a tiny model; `scripts/prove_streaming` runs 100."""
SMOLLM2_SEEDS = int(os.environ.get("KVTIER_STREAM_SMOLLM2", "0"))
SMOLLM2 = Path(__file__).parents[2] / ".cache" / "models" / "smollm2"
SMOLLM2_LAYOUT = KVLayout(30, 3, 64, BLOCK_TOKENS, "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=CONTEXT)


def config(
    model: Path,
    hbm_blocks: int,
    dram_blocks: int,
    step_tokens: int = 128,
    layout: KVLayout = LAYOUT,
    **overrides: object,
) -> EngineConfig:
    values = {
        "model": model,
        "dtype": "float32",
        "block_tokens": BLOCK_TOKENS,
        "threads": 1,
        "tiers.hbm.bytes": hbm_blocks * layout.row_bytes,
        "tiers.dram.bytes": dram_blocks * (layout.row_bytes + 4096),
        "tiers.load": "always",
        "sharing": False,
        "io.readers": 1,
        "scheduler.step_tokens": step_tokens,
        "scheduler.streamed_max": 1,
        "scheduler.streamed_hbm": 1.0,
    }
    return EngineConfig.load(None, values | {name.replace("__", "."): value for name, value in overrides.items()})


def long_context() -> list[Round]:
    """One context that takes all positions, then one that begins alike and goes on otherwise, then the first again."""
    chance = random.Random(1)
    tokens = [chance.randrange(3, 300) for _ in range(CONTEXT)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    first = Ask(tokens[: CONTEXT - 30], params)
    other = Ask([*tokens[: CONTEXT // 2 + 5], *reversed(tokens[: CONTEXT // 3])], params)
    return [Round((), (first,)), Round((), (other,)), Round(("hbm",), (first,))]


@pytest.mark.parametrize("share", [2, 4, 16])
def test_a_context_larger_than_hbm_gives_the_same_bits(share: int, checkpoint: Path) -> None:
    rounds = long_context()
    reference = run_workload(config(checkpoint, 4 * CONTEXT_BLOCKS, 0), rounds)
    small = run_workload(config(checkpoint, CONTEXT_BLOCKS // share, 2 * CONTEXT_BLOCKS), rounds)
    assert_equal(reference, small)
    assert reference.stats["streamed_dram_bytes"] == 0 < small.stats["streamed_dram_bytes"]
    assert small.origin["dram"] > CONTEXT, "what DRAM had was computed again"


@pytest.mark.parametrize(("share", "layers"), [(2, 3), (4, 6), (16, 3)])
def test_a_context_that_fits_neither_hbm_nor_dram_gives_the_same_bits(
    share: int, layers: int, checkpoint: Path, tmp_path: Path
) -> None:
    model = checkpoint
    if layers != LAYOUT.layers:  # more of the context lies on NVMe then: of DRAM, slices of two layers are staged
        model = make_checkpoint(tmp_path / "deep", max_position_embeddings=CONTEXT, num_hidden_layers=layers)
    rounds = long_context()
    staging = 2 * CONTEXT_BLOCKS * LAYOUT.slice_bytes
    row_bytes = layers * LAYOUT.slice_bytes
    hbm = CONTEXT_BLOCKS // share + 1
    sizes: dict[str, object] = {
        "tiers.hbm.bytes": hbm * row_bytes,
        "tiers.dram.bytes": 2 * staging,
        "tiers.dram.staging_bytes": staging,
        "tiers.nvme.bytes": 2 * CONTEXT_BLOCKS * (row_bytes + 4096) + (1 << 20),
        "tiers.nvme.path": tmp_path / "cache",
    }
    reference = run_workload(config(model, 4 * CONTEXT_BLOCKS * layers // 3, 0), rounds)
    small = run_workload(config(model, 0, 0, **{name.replace(".", "__"): size for name, size in sizes.items()}), rounds)
    assert_equal(reference, small)
    assert small.stats["streamed_nvme_bytes"] > 0 and (share == 2 or small.stats["streamed_dram_bytes"] > 0)


def make_mixed(seed: int, resident_tokens: int, streamed_tokens: int) -> list[Round]:
    """Rounds of short and long requests that share prefixes; some are cancelled; tiers are pushed down in between."""
    chance, wishes = random.Random(seed), random.Random(f"wishes {seed}")

    def tokens(count: int) -> list[int]:
        return [chance.randrange(3, 300) for _ in range(count)]

    known = [tokens(chance.randrange(2, 20) * BLOCK_TOKENS) for _ in range(3)]

    def ask(long: bool) -> Ask:
        base = chance.choice(known)
        made = base[: chance.randrange(1, len(base) + 1)] if chance.random() < 0.7 else []
        length = chance.randrange(resident_tokens, streamed_tokens) if long else chance.randrange(1, 5 * BLOCK_TOKENS)
        made = (made + tokens(streamed_tokens))[
            : max(1, length // BLOCK_TOKENS * BLOCK_TOKENS + chance.choice([-1, 0, 1]))
        ]
        known.append(made)
        sampled = chance.random() < 0.3
        params = SamplingParams(
            max_tokens=chance.randrange(1, 24),
            temperature=0.8 if sampled else 0.0,
            seed=chance.randrange(1000) if sampled else None,
            ignore_eos=True,
        )
        cancel_after = chance.randrange(1, 6) if chance.random() < 0.15 else None
        return Ask(made, params, cancel_after, make_wishes(wishes, 3600))

    evictions: list[tuple[str, ...]] = [(), ("hbm",), (), ("hbm", "dram")]
    rounds = [
        Round(evict, tuple(ask(chance.random() < 0.4) for _ in range(chance.randrange(2, 5)))) for evict in evictions
    ]
    sure = Ask(tokens(streamed_tokens - 30), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    return [*rounds, Round((), (sure, ask(False), ask(True))), Round(("hbm",), (sure,))]


@dataclass(frozen=True)
class Places:
    """Where the older blocks of a workload's long contexts lie."""

    name: str
    dram_blocks: int
    staged_blocks: int = 0
    """What of DRAM's bytes is for staging, in blocks that a pass may have on NVMe."""
    shared: bool = False

    def overrides(self, cache: Path, layout: KVLayout = LAYOUT) -> dict[str, object]:
        """Of the configuration; DRAM's budget is for its rows and the staging memory."""
        slot_bytes = layout.row_bytes + 4096
        if not self.staged_blocks and not self.shared:
            return {"tiers__dram__bytes": self.dram_blocks * slot_bytes}
        staging_bytes = 2 * self.staged_blocks * layout.slice_bytes
        return {
            "tiers__dram__bytes": self.dram_blocks * slot_bytes + staging_bytes,
            "tiers__dram__staging_bytes": staging_bytes,
            "tiers__nvme__bytes": 128 * slot_bytes + (1 << 21) if self.staged_blocks else 0,
            "tiers__nvme__path": cache,
            "tiers__nvme__wait_s": 60,
            "tiers__linger_s": 0.0,
            "sharing": self.shared,
        }


PLACES = [
    Places("dram", 64),
    Places("dram and nvme", 16, 32),
    Places("dram, shared", 80, shared=True),
    Places("dram and nvme, shared", 16, 32, shared=True),
]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_streamed_and_resident_requests_give_the_same_bits(seed: int, checkpoint: Path, tmp_path: Path) -> None:
    places = PLACES[seed % len(PLACES)]
    print("seed", seed, places)
    hbm_blocks, streams_max = 8 + seed % 9, 1 + seed % 3
    rounds = make_mixed(seed, (hbm_blocks + 2) * BLOCK_TOKENS, 32 * BLOCK_TOKENS)
    attention = "reference" if seed % 6 == 5 else "auto"
    reference = run_workload(config(checkpoint, 512, 0, 4096, attention=attention), rounds)
    limits: dict[str, object] = {"scheduler__streamed_max": streams_max, "scheduler__streamed_hbm": 0.9}
    limits |= {"attention": attention, "io__writers": 1, **places.overrides(tmp_path / "cache")}
    small = run_workload(config(checkpoint, hbm_blocks + 2, 0, 16 + seed % 50, **limits), rounds)
    assert_equal(reference, small)
    assert small.stats["streamed_dram_bytes"] > 0
    assert small.stats["streamed_nvme_bytes"] > 0 or not places.staged_blocks


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2_SEEDS, reason="takes minutes: scripts/prove_streaming runs it")
@pytest.mark.skipif(
    not (SMOLLM2 / "model.safetensors").is_file(), reason="SmolLM2 is not there: scripts/fetch_model.py"
)
@pytest.mark.parametrize("seed", range(max(1, SMOLLM2_SEEDS)))
def test_streamed_and_resident_requests_of_real_weights_give_the_same_bits(seed: int, tmp_path: Path) -> None:
    places = [Places("dram", 40), Places("dram and nvme", 12, 20)][seed % 2]
    print("seed", seed, places)
    rounds = make_mixed(1000 + seed, 11 * BLOCK_TOKENS, 22 * BLOCK_TOKENS)
    reference = run_workload(config(SMOLLM2, 256, 0, 512, SMOLLM2_LAYOUT), rounds)
    limits = {"scheduler__streamed_hbm": 0.9, "io__writers": 1, **places.overrides(tmp_path, SMOLLM2_LAYOUT)}
    small = run_workload(config(SMOLLM2, 10, 0, 64, SMOLLM2_LAYOUT, **limits), rounds)
    assert_equal(reference, small)
    assert small.stats["streamed_dram_bytes"] > 0
    assert small.stats["streamed_nvme_bytes"] > 0 or not places.staged_blocks
