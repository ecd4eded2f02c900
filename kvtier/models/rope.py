"""Rotary position embedding: its kinds, how a config spells them, and the table of cosines and sines.

Frequencies follow Transformers 5 operation by operation in fp32, so that logits agree. Kinds whose frequencies depend
on the length at the time (longrope, dynamic beyond its context) are refused: K would not be a function of its content.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from kvtier.models.fields import Fields

SUPPORTED = "supported are default, linear, llama3, yarn, and dynamic within its original context"
THETA = 10_000.0
TABLE_CHUNK_POSITIONS = 8192
KNOWN_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
    "finetuned",
}


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Frequencies theta^(-2i / head_dim)."""

    theta: float

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2], radians per position."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return torch.pow(self.theta, exponents).reciprocal()


@dataclass(frozen=True, slots=True)
class LinearRope(DefaultRope):
    """Every frequency divided by `factor` (position interpolation)."""

    factor: float

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2], radians per position."""
        return DefaultRope.inverse_frequencies(self, head_dim) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope(DefaultRope):
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth blend in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2], radians per position."""
        plain = DefaultRope.inverse_frequencies(self, head_dim)
        wavelengths = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = (self.original_context / wavelengths - low) / (high - low)
        blended = (1 - smooth) * plain / self.factor + smooth * plain
        long = wavelengths > self.original_context / low
        short = wavelengths < self.original_context / high
        return torch.where(long, plain / self.factor, torch.where(short, plain, blended))


@dataclass(frozen=True, slots=True)
class YarnRope(DefaultRope):
    """YaRN (Peng et al. 2023, section 3): a ramp over the dimensions between interpolated and plain frequencies."""

    factor: float
    scale: float
    beta_fast: float
    beta_slow: float
    original_context: int
    truncate: bool

    @property
    def context(self) -> int:
        """Positions that the factor stretches the original context to."""
        return int(self.original_context * self.factor)

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.scale

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """fp32 [head_dim / 2], radians per position."""
        low, high = self._dimension(self.beta_fast, head_dim), self._dimension(self.beta_slow, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        powers = torch.pow(self.theta, exponents)
        kept = 1 - ramp
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _dimension(self, rotations: float, head_dim: int) -> float:
        """The dimension that turns `rotations` times within the original context."""
        return head_dim * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


Rope = DefaultRope
"""Any of the four kinds."""


def rope_architecture(rope: Rope) -> dict[str, object]:
    """JSON-able identity of a kind and its numbers."""
    return {"kind": type(rope).__name__, **asdict(rope)}


def rope_table(rope: Rope, head_dim: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each fp32 [context, head_dim / 2].

    Angles are fp32 products as in Transformers; cos and sin are taken in fp64 and rounded once, which gives the same
    bits whatever the context, the number of threads and the vector width.
    """
    frequencies = rope.inverse_frequencies(head_dim)
    cos = torch.empty(context, head_dim // 2, dtype=torch.float32)
    sin = torch.empty_like(cos)
    for start in range(0, context, TABLE_CHUNK_POSITIONS):
        end = min(context, start + TABLE_CHUNK_POSITIONS)
        angles = (torch.arange(start, end, dtype=torch.float32)[:, None] * frequencies).double()
        cos[start:end] = angles.cos() * rope.attention_factor
        sin[start:end] = angles.sin() * rope.attention_factor
    return cos, sin


def rope_from_fields(config: Fields, layer_types: Sequence[str], context: int) -> Rope:
    """Read either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    `context` is max_position_embeddings. Raises CheckpointError for what is not supported.
    """
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        config.refuse("partial_rotary_factor", "partial rotary embedding is not supported, only 1.0 is")
    if config.flag("rope_interleaved", False):
        config.refuse("rope_interleaved", "only false is supported")
    parameters = _flat(config, "rope_parameters", layer_types)
    scaling = _flat(config, "rope_scaling", layer_types)
    if any(parameters[key] != scaling[key] for key in parameters.keys() & scaling.keys()):
        config.refuse("rope_scaling", "which contradicts rope_parameters")
    merged = {**parameters, **scaling}
    merged.setdefault("rope_theta", config.number("rope_theta", THETA))
    if config.has("original_max_position_embeddings"):
        merged["original_max_position_embeddings"] = config.whole("original_max_position_embeddings")
    name = "config.json rope_parameters" if parameters else "config.json rope_scaling"
    return _parse(Fields(name, merged), context)


def _flat(config: Fields, key: str, layer_types: Sequence[str]) -> dict[str, object]:
    """The parameters under `key`, un-nested if they are given per layer type and agree."""
    values = config.inner(key)
    nested = [values[kind] for kind in dict.fromkeys(layer_types) if kind in values]
    if not nested:
        return {name: value for name, value in values.items() if value is not None}
    first = nested[0]
    if not isinstance(first, Mapping) or len(nested) < len(set(layer_types)) or any(item != first for item in nested):
        config.refuse(key, "rope that differs between layer types is not supported")
    return {name: value for name, value in first.items() if value is not None}


def _parse(fields: Fields, context: int) -> Rope:
    unknown = sorted(fields.keys() - KNOWN_KEYS)
    if unknown:
        fields.refuse(unknown[0], f"which is not known here; {SUPPORTED}")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        fields.refuse("partial_rotary_factor", "partial rotary embedding is not supported, only 1.0 is")
    theta = fields.number("rope_theta")
    if theta <= 1.0:
        fields.refuse("rope_theta", "expected a number above 1")
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return DefaultRope(theta)
    if kind == "dynamic":
        if fields.whole("original_max_position_embeddings", context) < context:
            limit = f"dynamic rope is supported up to its original context only, not to {context} positions"
            fields.refuse("original_max_position_embeddings", f"{limit}: beyond it K depends on the length at the time")
        return DefaultRope(theta)
    if kind == "linear":
        return LinearRope(theta, _factor(fields))
    if kind == "llama3":
        return _llama3(fields, theta, context)
    if kind != "yarn":
        fields.refuse("rope_type" if fields.has("rope_type") else "type", SUPPORTED)
    return _yarn(fields, theta, context)


def _factor(fields: Fields) -> float:
    factor = fields.number("factor")
    if factor <= 0:
        fields.refuse("factor", "expected a number above 0")
    return factor


def _llama3(fields: Fields, theta: float, context: int) -> Rope:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if not 0 < low < high:
        fields.refuse("low_freq_factor", f"expected a number above 0 and below high_freq_factor = {high:g}")
    return Llama3Rope(theta, _factor(fields), low, high, fields.whole("original_max_position_embeddings", context))


def _yarn(fields: Fields, theta: float, context: int) -> Rope:
    original = fields.whole("original_max_position_embeddings", context)
    factor = _factor(fields) if fields.has("factor") else context / original
    mscale, mscale_all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    if fields.has("attention_factor"):
        scale = fields.number("attention_factor")
    elif mscale and mscale_all_dim:
        scale = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    else:
        scale = _magnitude(factor, 1.0)
    fast, slow = fields.number("beta_fast", 32.0) or 32.0, fields.number("beta_slow", 1.0) or 1.0
    return YarnRope(theta, factor, scale, fast, slow, original, fields.flag("truncate", True))


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
