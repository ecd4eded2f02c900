"""Identity of KV content: the namespace digest and the chain of block hashes.

Two blocks may share a hash only if their bytes are interchangeable. The namespace binds the model (weights content and
normalized architecture), dtype, layout and format version; the chain binds salt, adapter and every token before.
The served name and the tokenizer are not part of it. Every field is length-framed, so no two tuples collide by shift.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections.abc import Mapping, Sequence

from kvtier.block import BlockHash, KVLayout

FORMAT_VERSION = 1
"""Version of the row format; part of every namespace."""


def namespace_digest(
    weights_digest: bytes, architecture: Mapping[str, object], layout: KVLayout, rank: int = 0
) -> bytes:
    """32-byte identity of everything that decides the bytes of a block besides its tokens.

    `architecture` is the normalized model config (JSON-able, rope included), without names or paths.
    """
    geometry = [layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens, layout.dtype]
    parts = [
        b"kvtier-namespace",
        str(FORMAT_VERSION).encode(),
        weights_digest,
        json.dumps(architecture, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps(geometry).encode(),
        str(rank).encode(),
    ]
    return hashlib.sha256(framed(parts)).digest()


class HashChain:
    """Extends the chain of block hashes of one sequence: block i's hash covers tokens 0 .. (i+1) x block_tokens."""

    def __init__(self, namespace: bytes, block_tokens: int, salt: str = "", adapter: str = "") -> None:
        self._namespace = namespace
        self._prefix = framed([namespace, salt.encode(), adapter.encode()])
        self._block_tokens = block_tokens

    def private(self) -> HashChain:
        """A chain for the same content whose hashes nobody else can know."""
        return HashChain(self._namespace, self._block_tokens, secrets.token_hex(32))

    def extend(self, hashes: list[BlockHash], tokens: Sequence[int]) -> None:
        """Append to `hashes` one hash for each full block of `tokens` that has none yet. Ids must fit 32 bits."""
        size = self._block_tokens
        parent = hashes[-1] if hashes else b""
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            chunk = array("I", tokens[start : start + size]).tobytes()
            parent = hashlib.sha256(self._prefix + framed([parent, chunk])).digest()
            hashes.append(parent)


def framed(parts: Sequence[bytes]) -> bytes:
    """Join byte strings so that distinct sequences give distinct results (8-byte length before each part)."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
