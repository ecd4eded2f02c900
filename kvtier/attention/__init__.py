"""Paged attention: the contract (base.py) and its implementations, chosen by name.

Knows which implementation was built; the runner calls `make_backend` once, on the engine thread.
"""

from __future__ import annotations

import logging

from kvtier.attention.base import SPAN_TOKENS, AttentionBackend, AttentionBatch
from kvtier.attention.reference import ReferenceAttention
from kvtier.errors import ConfigError

__all__ = ["SPAN_TOKENS", "AttentionBackend", "AttentionBatch", "make_backend"]


def make_backend(name: str, threads: int) -> AttentionBackend:
    """The attention backend called `name`: "native", "reference", or "auto": native where it was built.

    Raises ConfigError for another name, and for "native" where it was not built.
    """
    if name not in ("auto", "native", "reference"):
        raise ConfigError(f'attention backend: "{name}" is not one of "auto", "native", "reference"')
    if name == "reference":
        return ReferenceAttention()
    try:
        from kvtier.attention.native import NativeAttention
    except ImportError as error:
        if name == "native":
            raise ConfigError(
                'attention backend: "native" was not built; install a C++ compiler and kvtier again, or choose "auto"'
            ) from error
        logging.getLogger(__name__).warning(
            "kvtier._native was not built (%s): attention runs in torch, many times slower in decode. "
            "Install a C++ compiler and then kvtier again.",
            error,
        )
        return ReferenceAttention()
    return NativeAttention(threads)
