"""Identity: every dimension changes the hash, and nothing else does."""

from __future__ import annotations

import dataclasses

import pytest

from kvtier.block import KVLayout
from kvtier.namespace import HashChain, framed, namespace_digest

LAYOUT = KVLayout(2, 2, 32, 16, "float32")
ARCHITECTURE = {"family": "llama", "layers": 2, "heads": 4, "rope": {"type": "default", "theta": 1e4}}


def hashes(
    namespace: bytes, tokens: list[int], salt: str = "", adapter: str = "", block_tokens: int = 4
) -> list[bytes]:
    found: list[bytes] = []
    HashChain(namespace, block_tokens, salt, adapter).extend(found, tokens)
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"weights_digest": b"other"},
        {"architecture": ARCHITECTURE | {"rope": {"type": "default", "theta": 1e5}}},
        {"architecture": ARCHITECTURE | {"heads": 8}},
        {"layout": dataclasses.replace(LAYOUT, dtype="bfloat16")},
        {"layout": dataclasses.replace(LAYOUT, block_tokens=32)},
        {"layout": dataclasses.replace(LAYOUT, layers=3)},
        {"layout": dataclasses.replace(LAYOUT, kv_heads=1)},
        {"layout": dataclasses.replace(LAYOUT, head_dim=64)},
        {"rank": 1},
    ],
    ids=str,
)
def test_every_dimension_separates_namespaces(change: dict[str, object]) -> None:
    base: dict[str, object] = {"weights_digest": b"w", "architecture": ARCHITECTURE, "layout": LAYOUT, "rank": 0}
    assert namespace_digest(**base) == namespace_digest(**base)  # type: ignore[arg-type]
    assert namespace_digest(**base) != namespace_digest(**(base | change))  # type: ignore[arg-type]


def test_the_format_version_separates_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespace_digest(b"w", ARCHITECTURE, LAYOUT)
    monkeypatch.setattr("kvtier.namespace.FORMAT_VERSION", 2)
    assert namespace_digest(b"w", ARCHITECTURE, LAYOUT) != before


def test_salt_adapter_and_every_earlier_token_change_a_hash() -> None:
    tokens = list(range(12))
    base = hashes(b"n", tokens)
    assert len(base) == 3
    for other in (hashes(b"m", tokens), hashes(b"n", tokens, salt="s"), hashes(b"n", tokens, adapter="s")):
        assert not set(base) & set(other)
    assert not set(hashes(b"n", tokens, salt="s")) & set(hashes(b"n", tokens, adapter="s"))
    changed = hashes(b"n", [99, *tokens[1:]])
    assert not set(base) & set(changed)
    assert hashes(b"n", [*tokens[:-1], 99])[:2] == base[:2]


def test_a_chain_grows_by_whole_blocks_only() -> None:
    chain, found = HashChain(b"n", 4), []  # type: HashChain, list[bytes]
    for end in range(1, 14):
        chain.extend(found, list(range(end)))
        assert found == hashes(b"n", list(range(end)))
        assert len(found) == end // 4


def test_framing_keeps_fields_apart() -> None:
    assert framed([b"ab", b"c"]) != framed([b"a", b"bc"]) != framed([b"abc"])
