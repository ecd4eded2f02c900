"""The prompts, sizes and settings of a benchmark run, shared by every system that it measures.

Knows kvtier's layout (to size the tiers) and nothing of how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.block import ITEM_BYTES, KVLayout
from kvtier.config import IoConfig
from kvtier.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asked for."""

    model: Path
    dtype: str
    threads: int
    block_tokens: int
    cache_directory: Path
    prefix_tokens: int
    ttft_samples: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    output_tokens: int
    rounds: int

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(batch, context), small first."""
        return [(batch, context) for context in self.contexts for batch in self.batches]

    def plain(self) -> dict[str, object]:
        """For the report; without the paths of this machine."""
        return {
            "model": self.model.name,
            "dtype": self.dtype,
            "threads": self.threads,
            "block_tokens": self.block_tokens,
            "prefix_tokens": self.prefix_tokens,
            "ttft_samples": self.ttft_samples,
            "output_tokens": self.output_tokens,
            "rounds": self.rounds,
        }


class Workload:
    """Prompts of random tokens: no two share a block, so nothing is found by accident."""

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        """Raises CheckpointError if the model folder is not usable."""
        self.settings = settings
        self.config = ModelConfig.from_folder(settings.model)
        self.layout = KVLayout(
            self.config.layers, self.config.kv_heads, self.config.head_dim, settings.block_tokens, settings.dtype
        )
        self.weights_bytes = _weights_bytes(settings.model, self.config, self.layout)
        self._random = np.random.default_rng(seed)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Fresh prompts of ordinary token ids."""
        low = min(256, self.config.vocab // 2)
        drawn: list[list[int]] = self._random.integers(low, self.config.vocab, (count, tokens)).tolist()
        return drawn

    def last_tokens(self, batch: int) -> list[int]:
        """Fresh last tokens: they give known prompts an answer that no tier has seen."""
        return self.prompts(1, batch)[0]

    def kv_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of the rows that `batch` sequences of so many tokens need, with a block to spare for each."""
        return batch * (self.layout.block_count(tokens) + 1) * self.layout.row_bytes

    def hbm_bytes(self) -> int:
        """HBM that holds the largest case and the TTFT prompt, and the blocks that no sequence may count on."""
        settings = self.settings
        needs = [self.kv_bytes(batch, context + settings.output_tokens) for batch, context in settings.cases]
        needed_bytes = max(*needs, self.kv_bytes(1, settings.prefix_tokens))
        return needed_bytes * 16 // 15 + (IoConfig().readers + IoConfig().writers) * self.layout.row_bytes

    def tier_overrides(self, hbm: int, dram: int, nvme: int, folder: Path) -> dict[str, object]:
        """Keys of engine.yaml for an engine with so many bytes in each tier."""
        settings = self.settings
        return {
            "model": settings.model,
            "dtype": settings.dtype,
            "threads": settings.threads,
            "block_tokens": settings.block_tokens,
            "tiers.hbm.bytes": hbm,
            "tiers.dram.bytes": dram,
            "tiers.nvme.bytes": nvme,
            "sharing": False,
            "tiers.nvme.path": folder,
            "tiers.load": "always",
        }


def prefill_limit(config: ModelConfig, tokens: int, flops_s: float) -> float:
    """Tokens a second if a prompt only took its matrix products at `flops_s`, and its attention at half of that.

    The head is left out: the last token alone needs it. A query attends to half of the prompt in the mean.
    """
    width = config.heads * config.head_dim
    weights = config.hidden * (2 * width + 2 * config.kv_heads * config.head_dim + 3 * config.intermediate)
    linear, attention = 2 * weights * tokens, 2 * width * tokens**2
    return tokens * flops_s / (config.layers * (linear + 2 * attention))


def _weights_bytes(folder: Path, config: ModelConfig, layout: KVLayout) -> int:
    """Bytes of the weights in the benchmark's dtype."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return stored * layout.item_bytes // ITEM_BYTES.get(config.checkpoint_dtype or "", layout.item_bytes)
