"""The runner: one pass from scheduled sequences to sampled tokens, at once or a few layers at a time.

Owns the decoder and the sampler; turns a plan into tensors, runs the forward pass and samples. On a device that works
on its own time, passes that only decode are replayed, and slices that a prefill would read many times over are brought
near. Knows neither tiers nor the scheduler: it reads sequences and addresses only. Called on the engine thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Parts
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.batch import PassBatch, build_batch
from kvtier.device.base import Device
from kvtier.device.decode_graph import DecodePasses
from kvtier.device.host import HostDevice
from kvtier.device.near import NearPass, NearSlices
from kvtier.models.decoder import Decoder, Hidden, NonFiniteError
from kvtier.sampler import Sampler, SampleRow
from kvtier.sequence import ScheduledSequence, Sequence


@dataclass(eq=False, slots=True)
class RestingPass:
    """A pass over one part that rests between two layers."""

    part: ScheduledSequence
    batch: PassBatch
    hidden: Hidden
    near: NearPass | None
    addresses: NDArray[np.int64] | None = None
    """Of its staged rows, as they are in the batch's tables."""

    @property
    def layer(self) -> int:
        """The next layer."""
        return self.hidden.layer


class Runner:
    """Decoder and sampler behind a few calls."""

    def __init__(
        self,
        decoder: Decoder,
        row_of: Callable[[Sequence], SampleRow],
        device: Device | None = None,
        near: NearSlices | None = None,
    ) -> None:
        """`row_of` gives what the sampler needs to know of a sequence. The decoder is `device`'s; None: the CPU's."""
        self._device = device if device is not None else HostDevice()
        self._decoder = decoder
        self.near = near
        """Where slices of far rows are brought, if there is room for some."""
        launcher = self._device.launcher
        self.decodes = DecodePasses(decoder, self._device.place, launcher) if launcher is not None else None
        """Passes that are replayed, if they can be."""
        self._sampler = Sampler()
        self._row_of = row_of

    @torch.inference_mode()
    def run(self, parts: Parts[ScheduledSequence]) -> list[int]:
        """One pass; returns one token for each part that samples, in order. K,V of all parts lie in their rows then.

        Raises NonFiniteError naming all tokens (indices into the pass) without a usable result.
        """
        return self._sample(parts, self.logits(parts))

    def logits(self, parts: Parts[ScheduledSequence]) -> torch.Tensor:
        """The forward pass alone: fp32 [row, vocab] for the parts that sample; valid until the next pass but one."""
        if self.decodes is not None and all(part.count == 1 and part.samples for part in parts):
            return self.decodes.logits(self._build(parts))
        batch, near, hidden = self._begin(parts)
        self._run_layers(hidden, range(self._decoder.layout.layers), batch, near)
        return self._decoder.end(hidden, batch.logits_rows)

    @torch.inference_mode()
    def begin(self, part: ScheduledSequence) -> RestingPass:
        """Begin a pass over one part; it rests before the first layer. Its rows must not move until it has ended."""
        batch, near, hidden = self._begin([part])
        return RestingPass(part, batch, hidden, near)

    @torch.inference_mode()
    def run_layers(
        self, resting: RestingPass, layers: range, places: NDArray[np.int64], addresses: NDArray[np.int64]
    ) -> None:
        """Run the next layers, `layers`. For them the rows of the blocks `places` lie at `addresses`.

        Both are the same arrays for as long as nothing in them changes.
        """
        if addresses is not resting.addresses:
            tables, place = resting.batch.attention.tables, self._device.place
            tables[0, torch.from_numpy(places).to(place)] = torch.from_numpy(addresses).to(place)
            resting.addresses = addresses
            if resting.near is not None:
                resting.near.note_tables()
        self._run_layers(resting.hidden, layers, resting.batch, resting.near)

    @torch.inference_mode()
    def end(self, resting: RestingPass) -> list[int]:
        """What `run` would have returned or raised, once the pass is through all layers."""
        return self._sample([resting.part], self.end_logits(resting))

    def end_logits(self, resting: RestingPass) -> torch.Tensor:
        """Of a pass that is through all layers, what `logits` would have returned."""
        return self._decoder.end(resting.hidden, resting.batch.logits_rows)

    def finish(self) -> None:
        """Wait until layers that were run have done with their rows. `run` and `end` have waited themselves."""
        self._device.finish()

    def _build(self, parts: Parts[ScheduledSequence]) -> PassBatch:
        self._device.enter()
        return build_batch(parts, self._decoder.layout.block_tokens)

    def _begin(self, parts: Parts[ScheduledSequence]) -> tuple[PassBatch, NearPass | None, Hidden]:
        built = self._build(parts)
        near = self.near.begin(built) if self.near is not None else None
        batch = built.to(self._device.place)
        return batch, near, self._decoder.begin(batch.token_ids, batch.positions)

    def _run_layers(self, hidden: Hidden, layers: range, batch: PassBatch, near: NearPass | None) -> None:
        if near is None:
            self._decoder.run_layers(hidden, layers, batch.attention)
        else:
            near.run(layers, batch.attention, functools.partial(self._decoder.run_layers, hidden))

    def _sample(self, parts: Parts[ScheduledSequence], logits: torch.Tensor) -> list[int]:
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
