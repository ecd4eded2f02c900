"""A scheduled pass as tensors: token ids, positions and the address tables of attention.

Built once per pass from the scheduled sequences and immutable until it is over. Knows sequences' tables, but neither
tiers nor models. Called by the runner on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Parts
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.attention.base import AttentionBatch
from kvtier.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class PassBatch:
    """Inputs of one forward pass over T tokens of S sequences, R of which are sampled from."""

    token_ids: torch.Tensor
    """int64 [token]."""
    positions: torch.Tensor
    """int64 [token]."""
    logits_rows: torch.Tensor
    """int64 [row]: tokens whose logits are wanted, in the order of the sequences that sample."""
    attention: AttentionBatch

    def to(self, place: torch.device) -> PassBatch:
        """The same where a device reads it; itself if that is the CPU."""
        if place.type == "cpu":
            return self
        ids, positions, rows = (tensor.to(place) for tensor in (self.token_ids, self.positions, self.logits_rows))
        return PassBatch(ids, positions, rows, self.attention.to(place))


def build_batch(parts: Parts[ScheduledSequence], block_tokens: int) -> PassBatch:
    """Flatten the parts of a pass, sequence after sequence."""
    counts = np.array([part.count for part in parts], np.int32)
    firsts = np.array([part.start for part in parts], np.int64)
    starts = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    tables = np.zeros((len(parts), max(len(part.sequence.table) for part in parts)), np.int64)
    ids: list[int] = []
    for index, part in enumerate(parts):
        addresses = part.sequence.table.addresses
        tables[index, : len(addresses)] = addresses
        ids += part.sequence.tokens[part.start : part.start + part.count]
    token_ids = np.array(ids, np.int64)
    positions = np.arange(len(ids)) + np.repeat(firsts - starts[:-1], counts)
    blocks, offsets = np.divmod(positions, block_tokens)
    rows = tables[np.repeat(np.arange(len(parts)), counts), blocks]
    samples = [end - 1 for end, part in zip(starts[1:].tolist(), parts, strict=True) if part.samples]
    return PassBatch(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        torch.tensor(samples, dtype=torch.int64),
        AttentionBatch(
            tables=torch.from_numpy(tables),
            query_starts=torch.from_numpy(starts),
            lengths=torch.from_numpy((firsts + counts).astype(np.int32)),
            append_rows=torch.from_numpy(rows),
            append_offsets=torch.from_numpy(offsets.astype(np.int32)),
        ),
    )
