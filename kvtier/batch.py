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
    starts = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    token_total = int(starts[-1])
    token_ids = np.empty(token_total, np.int64)
    positions = np.empty(token_total, np.int64)
    rows = np.empty(token_total, np.int64)
    lengths = np.array([part.start + part.count for part in parts], np.int32)
    tables = np.zeros((len(parts), max(len(part.sequence.table) for part in parts)), np.int64)
    for index, part in enumerate(parts):
        at, end = int(starts[index]), int(starts[index + 1])
        addresses = part.sequence.table.addresses
        tables[index, : len(addresses)] = addresses
        token_ids[at:end] = part.sequence.tokens[part.start : part.start + part.count]
        positions[at:end] = np.arange(part.start, part.start + part.count)
        rows[at:end] = addresses[positions[at:end] // block_tokens]
    samples = [int(starts[index + 1]) - 1 for index, part in enumerate(parts) if part.samples]
    return PassBatch(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        torch.tensor(samples, dtype=torch.int64),
        AttentionBatch(
            tables=torch.from_numpy(tables),
            query_starts=torch.from_numpy(starts),
            lengths=torch.from_numpy(lengths),
            append_rows=torch.from_numpy(rows),
            append_offsets=torch.from_numpy((positions % block_tokens).astype(np.int32)),
        ),
    )
