"""Logits to tokens: greedy, or drawn after penalties, temperature, min-p, top-k and top-p (in vLLM's order).

Owns how a sequence's sampling parameters are resolved and what it has to remember (`SamplerState`). A row's token
depends on its own logits and state alone: its random number is a hash of seed and output index, its arithmetic never
sees another row. Knows no sequences, text or stop conditions. Called by the engine thread.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.models.config import GenerationDefaults
from kvtier.request import SamplingParams

_GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy."""
_FLOORS = (1e-3, 1e-5, 0.0)
"""Weights, of the likeliest token's, above which top-k and top-p look for their tokens first: sorting few is cheap."""

_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters with every default filled in. `temperature` 0 is greedy; 0, 1.0 and 0.0 turn the rest off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken (after penalties)."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Greedy, and earlier tokens change nothing."""
        return self.greedy and not self.penalized

    @property
    def penalized(self) -> bool:
        """Earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def resolve(params: SamplingParams, defaults: GenerationDefaults) -> ResolvedSampling:
    """Merge a request's parameters with its model's generation_config.

    What a request leaves out comes from `defaults`. So a model without `do_sample` is greedy, as in transformers,
    unless the request gives a temperature, or asks for sampling by a seed, top_k, top_p or min_p of its own: then the
    temperature is 1. Without a seed one is drawn.
    """
    temperature = params.temperature
    if temperature is None:
        temperature = defaults.temperature or (1.0 if _asks_for_sampling(params) else 0.0)
    top_k = defaults.top_k if params.top_k is None else params.top_k
    penalty = defaults.repetition_penalty if params.repetition_penalty is None else params.repetition_penalty
    return ResolvedSampling(
        temperature=float(temperature),
        top_k=max(0, top_k),
        top_p=float(defaults.top_p if params.top_p is None else params.top_p),
        min_p=float(defaults.min_p if params.min_p is None else params.min_p),
        repetition_penalty=float(penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
    )


def _asks_for_sampling(params: SamplingParams) -> bool:
    narrowed = params.top_k not in (None, 0, -1) or params.top_p not in (None, 1.0) or params.min_p not in (None, 0.0)
    return narrowed or params.seed is not None


Floats = npt.NDArray[np.float32]


class SamplerState:
    """What one sequence brings to the sampler: its parameters and the tokens that its penalties count.

    Owned by the sequence. It may be rebuilt at any time from the prompt and the output tokens.
    """

    def __init__(self, prompt_ids: Sequence[int], resolved: ResolvedSampling, vocab: int) -> None:
        """`vocab` is the width of the logits; prompt ids from there on are ignored."""
        self.resolved = resolved
        self._vocab = vocab
        prompt = sorted({i for i in prompt_ids if i < vocab}) if resolved.repetition_penalty != 1.0 else []
        self._positions = {token: position for position, token in enumerate(prompt)}
        capacity = max(64, 2 * len(prompt)) if resolved.penalized else 0
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(capacity, np.float32)  # of output tokens; 0 for those that are only in the prompt

    def observe(self, token: int) -> None:
        """Take the next output token."""
        assert 0 <= token < self._vocab, token
        if not self.resolved.penalized:
            return
        position = self._positions.setdefault(token, len(self._positions))
        if position == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[position] = token
        self._counts[position] += 1.0

    def penalize(self, row: Floats) -> None:
        """Apply the penalties to `row` (`[vocab]`) in place, at the cost of the distinct tokens.

        What is finite stays so, and what is not (a masked token) stays as it is.
        """
        distinct = len(self._positions)
        if not self.resolved.penalized or distinct == 0:
            return
        ids, counts = self._ids[:distinct], self._counts[:distinct]
        before = row[ids]
        penalty = self.resolved.repetition_penalty
        values = np.where(before > 0, before / penalty, before * penalty)
        values -= self.resolved.frequency_penalty * counts
        values -= self.resolved.presence_penalty * (counts > 0)
        row[ids] = np.where(np.isfinite(before), values.clip(-_LARGEST, _LARGEST), before)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is sampled for: a sequence's state and the index of the output token it gives."""

    state: SamplerState
    output_index: int


def uniform(seed: int, output_index: int) -> float:
    """The random number of one output token, in [0, 1) with 53 bits: a hash, so no draw depends on another."""
    message = seed.to_bytes(8, "little") + output_index.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"kvtier-sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Chooses one token for each row of logits; has no state of its own."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
        """Choose a token for each of `rows` from `logits` (fp32 `[row, vocab]`, any device; not changed).

        Of equal logits a greedy row takes the lowest id. The states are only read: `observe` what is kept. A row with
        NaN or +inf, or with nothing finite, gets None. A token of logit -inf is never chosen.
        """
        assert logits.dim() == 2 and len(logits) == len(rows), (logits.shape, len(rows))
        plain = [i for i, row in enumerate(rows) if row.state.resolved.plain]
        tokens: list[int | None] = [None] * len(rows)
        if plain:
            picked = logits if len(plain) == len(rows) else logits[plain]
            for i, token in zip(plain, _best(picked), strict=True):
                tokens[i] = token
        others = [i for i, row in enumerate(rows) if not row.state.resolved.plain]
        if others:
            copies = logits[others].cpu().numpy()  # an indexed read is a copy already
            for i, copy in zip(others, copies, strict=True):
                tokens[i] = _choose(copy, rows[i].state, rows[i].output_index)
        return tokens


def _best(logits: torch.Tensor) -> list[int | None]:
    """Argmax of each row, by one hand-over to Python; None if the largest is not finite."""
    if logits.device.type == "cpu":  # numpy's takes a tenth of the time of torch's
        rows = logits.numpy()
        places = rows.argmax(-1)
        values = rows[np.arange(len(rows)), places]
        found: list[int] = np.where(np.isfinite(values), places, -1).tolist()
    else:
        largest, indices = logits.max(dim=-1)
        found = torch.where(largest.isfinite(), indices, -1).tolist()
    return [None if token < 0 else token for token in found]


@np.errstate(over="ignore")  # penalties are clipped, and a hopeless token's distance to the best may become -inf
def _choose(row: Floats, state: SamplerState, output_index: int) -> int | None:
    """One token or None of one row `[vocab]`, which is overwritten. In numpy, whose calls wait for no other thread."""
    state.penalize(row)
    resolved = state.resolved
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        return None
    if resolved.greedy:
        return best
    row -= row[best]
    row /= resolved.temperature
    weights = np.exp(row, out=row)  # the likeliest token has weight 1
    if resolved.min_p > 0.0:
        weights[weights < resolved.min_p] = 0.0
    if 0 < resolved.top_k < len(weights):
        weights[weights < _kth(weights, resolved.top_k)] = 0.0
    number = uniform(resolved.seed, output_index)
    if resolved.top_p >= 1.0:
        return _draw(weights, number)
    ids = _nucleus(weights, resolved.top_p)
    return int(ids[_draw(weights[ids], number)])


def _kth(weights: Floats, k: int) -> np.float32:
    """The k-th largest weight; all that equal it are kept."""
    for floor in _FLOORS:
        likely = weights[weights > floor]
        if len(likely) >= k:
            return np.float32(np.partition(likely, -k)[-k])
    return np.float32(0.0)


def _nucleus(weights: Floats, top_p: float) -> npt.NDArray[np.int64]:
    """Ids of the likeliest tokens, as few as reach `top_p` of the sum; likeliest first, then by id."""
    wanted = top_p * _sums(weights)[-1]
    for floor in _FLOORS:
        ids = np.flatnonzero(weights > floor)
        if floor == 0.0 or _sums(weights[ids])[-1] > wanted * (1 + 1e-9):
            break
    # Bits of floats above 0 order like the floats: one plain sort by (descending weight, id).
    keys = (~weights[ids].view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    ids = (keys & np.uint64(2**32 - 1)).astype(np.int64)
    return ids[: int(np.searchsorted(_sums(weights[ids]), wanted)) + 1]


def _draw(weights: Floats, number: float) -> int:
    """The index whose share of the weights holds `number` of [0, 1); an index without weight has no share."""
    sums = _sums(weights)
    # A number of at most 1 - 2**-53 times the sum rounds to less than the sum, so the index is never past the end.
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


def _sums(weights: Floats) -> npt.NDArray[np.float64]:
    """Running sums, added in order."""
    return weights.cumsum(dtype=np.float64)
