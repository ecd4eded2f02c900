"""The runner: one pass from scheduled sequences to sampled tokens.

Owns the decoder and the sampler; turns a plan into tensors, runs the forward pass and samples. Knows neither tiers nor
the scheduler: it reads sequences and addresses only. Called by the engine, on the engine thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Parts

import torch

from kvtier.batch import build_batch
from kvtier.models.decoder import Decoder, NonFiniteError
from kvtier.sampler import Sampler, SampleRow
from kvtier.sequence import ScheduledSequence, Sequence


class Runner:
    """Decoder and sampler behind one call."""

    def __init__(self, decoder: Decoder, row_of: Callable[[Sequence], SampleRow]) -> None:
        """`row_of` gives what the sampler needs to know of a sequence."""
        self._decoder = decoder
        self._sampler = Sampler()
        self._row_of = row_of

    @torch.inference_mode()
    def run(self, parts: Parts[ScheduledSequence]) -> list[int]:
        """One pass; returns one token for each part that samples, in order. K,V of all parts lie in their rows then.

        Raises NonFiniteError naming all tokens (indices into the pass) without a usable result.
        """
        logits = self.logits(parts)
        sampling = [part.sequence for part in parts if part.samples]
        if not sampling:
            return []
        tokens = self._sampler.sample(logits, [self._row_of(sequence) for sequence in sampling])
        chosen = [token for token in tokens if token is not None]
        if len(chosen) < len(tokens):
            ends = itertools.accumulate(part.count for part in parts)
            last = [end - 1 for end, part in zip(ends, parts, strict=True) if part.samples]
            lost = tuple(index for index, token in zip(last, tokens, strict=True) if token is None)
            raise NonFiniteError(lost, self._decoder.dtype)
        return chosen

    def logits(self, parts: Parts[ScheduledSequence]) -> torch.Tensor:
        """The forward pass alone: fp32 [row, vocab] for the parts that sample."""
        batch = build_batch(parts, self._decoder.layout.block_tokens)
        return self._decoder.forward(batch.token_ids, batch.positions, batch.attention, batch.logits_rows)
