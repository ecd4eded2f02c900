"""The yardstick: greedy decode in `transformers` with a static cache, same weights, dtype, threads and prompts.

Knows no kvtier. A `StaticDecode` keeps one prefilled cache and decodes from its end as often as asked.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PREFILL_TOKENS = 1024
"""Tokens of one prefill pass over all sequences, so that progress can be shown."""


def load_model(folder: Path, dtype: str) -> Any:
    """The checkpoint as `transformers` runs it."""
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


class StaticDecode:
    """A batch of prompts, all but their last token in a static cache."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompts: list[list[int]], output_max: int, advance: Callable[[int], None]) -> None:
        """Prefill; `advance(tokens)` follows it. Prompts are of one length."""
        from transformers import StaticCache

        self._model = model
        known = torch.tensor(prompts)[:, :-1]
        self._cache = StaticCache(config=model.config, max_cache_len=known.shape[1] + 1 + output_max)
        for part in torch.split(known, max(1, PREFILL_TOKENS // len(prompts)), dim=1):
            model(part, cache=self._cache, logits_to_keep=1)
            advance(part.numel())

    @torch.inference_mode()
    def run(self, last_tokens: list[int], token_count: int) -> tuple[float, list[list[int]]]:
        """Decode after the given last prompt tokens; tokens a second of all steps but the first, and the tokens.

        The cache is as before afterwards.
        """
        token = torch.tensor(last_tokens)[:, None]
        found: list[torch.Tensor] = []
        started = 0.0
        for _ in range(token_count):
            logits = self._model(token, cache=self._cache, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            found.append(token)
            if len(found) == 1:
                started = time.perf_counter()
        duration_s = time.perf_counter() - started
        self._cache.crop(-token_count)
        rate = len(last_tokens) * (token_count - 1) / duration_s
        return rate, [[int(x) for x in row] for row in torch.cat(found, dim=1)]
