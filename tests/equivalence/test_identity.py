"""Who differs in one thing that decides the bytes of a block reuses nothing of the other's, whatever they share.

Each dimension: engine A has filled the shelves of a cache directory, engine B differs from it in that alone, finds
nothing in any tier and then its own, and A still finds what it left. Rank and adapter have no option of an engine yet
and the format version is a constant, so those are changed where the engine reads them.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import kvtier.assembly
import kvtier.intake
from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout
from kvtier.cache_directory import layout_name
from kvtier.namespace import HashChain, namespace_digest
from tests.engines import LEAVE_S, end_keepers, keepers, knows_shelves, wait_for
from tests.tiny import make_checkpoint

BLOCK, BLOCKS = 16, 6
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
SLOT_BYTES = LAYOUT.row_bytes + 4096
TOKENS = BLOCKS * BLOCK
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave the engine as it is."""


def prompt_of(number: int) -> list[int]:
    """Tokens of a few blocks, others for each number."""
    return [(11 * token * token + 7 * number) % 290 + 3 for token in range(TOKENS + 5)]


class Other(NamedTuple):
    """How B differs: in the seed of its weights or a field of config.json, a key of engine.yaml, or its request."""

    checkpoint: Mapping[str, object] = MappingProxyType({})
    config: Mapping[str, object] = MappingProxyType({})
    salt: str = ""
    patch: Callable[[pytest.MonkeyPatch], None] = nothing


SAME = Other()


def other_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvtier.assembly, "namespace_digest", functools.partial(namespace_digest, rank=1))


def other_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvtier.intake, "HashChain", functools.partial(HashChain, adapter="lora-7"))


def other_format(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvtier.namespace.FORMAT_VERSION", 99)


SAME_LAYOUT = {
    "weights": Other({"seed": 1}),
    "rope-theta": Other({"rope_theta": 20000.0}),
    "rope-factor": Other({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "heads": Other({"num_attention_heads": 8, "head_dim": 16}),
    "salt": Other(salt="other"),
    "rank": Other(patch=other_rank),
    "adapter": Other(patch=other_adapter),
    "format-version": Other(patch=other_format),
}
"""B's rows lie in A's slabs, beside A's, in DRAM and on NVMe."""
OTHER_LAYOUT = {
    "dtype": Other(config={"dtype": "bfloat16"}),
    "block-tokens": Other(config={"block_tokens": 8}),
    "layers": Other({"num_hidden_layers": 4}),
    "kv-heads": Other({"num_key_value_heads": 1}),
    "head-dim": Other({"head_dim": 32}),
}
"""B has a folder of its own."""

SMALL_NVME = Other(config={"tiers.nvme.bytes": "2MiB"})
LARGE_NVME = Other(config={"tiers.nvme.bytes": "10MiB"})


def configured(model: Path, cache: Path, **overrides: object) -> EngineConfig:
    values: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "tiers.hbm.bytes": 40 * LAYOUT.row_bytes,
        "tiers.dram.bytes": 64 * SLOT_BYTES,
        "tiers.dram.staging_bytes": 0,
        "tiers.nvme.bytes": "8MiB",
        "tiers.nvme.path": cache,
        "tiers.linger_s": 0.2,
        "tiers.fetch_deadline_s": 60,
        "tiers.nvme.wait_s": 60,
        "tiers.load": "always",
    }
    return EngineConfig.load(None, values | overrides)


class Answer(NamedTuple):
    """What an engine answers to the prompt, and how many of its tokens came from where."""

    token_ids: list[int]
    hbm: int = 0
    dram: int = 0
    nvme: int = 0


@contextmanager
def patched(other: Other) -> Iterator[None]:
    """What B does in here it does with its patch; A, in the same process, never comes in here meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        other.patch(patch)
        yield


class Asker:
    """An engine, asked again and again for one prompt, of which it finds nothing the first time."""

    def __init__(self, engine: Engine, prompt: list[int], other: Other = SAME) -> None:
        self._engine = engine
        self._prompt = prompt
        self._other = other
        self._first = self._ask()
        assert self._first[1:] == (0, 0, 0), self._first

    def finds(self, *counts: int) -> None:
        """The same answer as ever, with so many tokens out of HBM, DRAM and NVMe."""
        assert self._ask() == Answer(self._first.token_ids, *counts), self._engine.stats()

    def push_down(self, *tiers: str) -> None:
        """Leave nothing in these tiers of what this engine knows of."""
        for tier in tiers:
            self._engine.evict(tier)

    def _ask(self) -> Answer:
        with patched(self._other):
            done = self._engine.stream(self._prompt, GREEDY, cache_salt=self._other.salt).collect()
        return Answer(done.token_ids, done.origin["hbm"], done.origin["dram"], done.origin["nvme"])


@contextmanager
def opened(model: Path, cache: Path, other: Other = SAME) -> Iterator[Engine]:
    """Engine A, or B, which differs in one thing."""
    if other.checkpoint:
        fields: dict[str, Any] = dict(other.checkpoint)
        model = make_checkpoint(cache.parent / f"model-{len(os.listdir(cache.parent))}", **fields)
    with patched(other):
        engine = Engine(configured(model, cache, **other.config))
    with engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        yield engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("identity") / "model", tokenizer=True)


@pytest.fixture(scope="module")
def a(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """Engine A and its cache directory."""
    cache = tmp_path_factory.mktemp("identity-cache") / "cache"
    with opened(model, cache) as engine:
        yield engine, cache


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_in_one_slab_nobody_finds_what_another_made(a: tuple[Engine, Path], model: Path, name: str) -> None:
    """A's blocks are in DRAM and on NVMe when B comes; then each finds its own, in DRAM and after that on NVMe."""
    engine, cache = a
    prompt = prompt_of(list(SAME_LAYOUT).index(name))
    mine = Asker(engine, prompt)
    mine.push_down("hbm")
    other = SAME_LAYOUT[name]
    with opened(model, cache, other) as others_engine:
        others = Asker(others_engine, prompt, other)
        for asker in (others, mine):
            asker.push_down("hbm")
            asker.finds(0, TOKENS, 0)
        for asker in (others, mine):
            asker.push_down("hbm", "dram")
        for asker in (others, mine):
            asker.finds(0, 0, TOKENS)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [layout_name(LAYOUT)]


@pytest.mark.parametrize("name", OTHER_LAYOUT)
def test_rows_of_another_layout_lie_in_a_folder_of_their_own(model: Path, tmp_path: Path, name: str) -> None:
    """One after the other, since the first has all of the DRAM; both have a slab on NVMe."""
    cache, prompt = tmp_path / "cache", prompt_of(0)
    with opened(model, cache, SMALL_NVME) as a_engine:
        Asker(a_engine, prompt).push_down("hbm", "dram")
    end_keepers(cache, LEAVE_S)
    with opened(model, cache, OTHER_LAYOUT[name]) as b_engine:
        others = Asker(b_engine, prompt)
        others.push_down("hbm")
        others.finds(0, TOKENS, 0)
        others.push_down("hbm", "dram")
        others.finds(0, 0, TOKENS)
    end_keepers(cache, LEAVE_S)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    with opened(model, cache, LARGE_NVME) as a_engine:
        assert a_engine.generate([prompt], GREEDY)[0].origin["nvme"] == TOKENS


def test_who_finds_the_dram_taken_by_another_layout_serves_without(
    a: tuple[Engine, Path], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, cache = a
    with Engine(configured(model, cache, **OTHER_LAYOUT["block-tokens"].config)) as engine:
        assert "leave too little of tiers.dram.bytes" in caplog.text
        assert engine.generate([prompt_of(101)], GREEDY)[0].token_ids


def test_the_tokenizer_changes_nothing(a: tuple[Engine, Path], model: Path) -> None:
    _, cache = a
    other = make_checkpoint(cache.parent / "other-tokenizer", tokenizer=True)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 290, "content": "<|new|>"})
    path.write_text(json.dumps(tokenizer))
    assert path.read_bytes() != (model / "tokenizer.json").read_bytes()
    (other / "tokenizer_config.json").unlink()
    prompt = prompt_of(99)
    with opened(model, cache) as a_engine:
        Asker(a_engine, prompt).push_down("hbm")
    with opened(other, cache) as b_engine:
        origin = b_engine.generate([prompt], GREEDY)[0].origin
    assert origin["dram"] == TOKENS


def test_a_row_found_under_the_hash_of_another_namespace_is_never_used(
    a: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If hashes said too little, the header of the row would still tell: B is made to ask by A's hashes."""
    engine, cache = a
    prompt = prompt_of(100)
    with opened(make_checkpoint(cache.parent / "alone", seed=7), cache.parent / "alone-cache") as alone:
        right = alone.generate([prompt], GREEDY)[0].token_ids
    mine = Asker(engine, prompt)
    mine.push_down("hbm")
    namespace = engine._intake._parts.namespace
    with monkeypatch.context() as patch:
        patch.setattr(kvtier.intake, "HashChain", lambda _, *rest: HashChain(namespace, *rest))
        with opened(cache.parent / "alone", cache) as b_engine:
            done = b_engine.generate([prompt], GREEDY)[0]
            assert done.token_ids == right and done.origin["computed"] == len(prompt)
            failures = b_engine.metrics.shelf_failures
            wait_for(lambda: failures.value("dram", "bad_row") >= 1 and failures.value("nvme", "bad_row") >= 1)


def test_rows_of_all_namespaces_are_found_again_from_their_headers(model: Path, tmp_path: Path) -> None:
    """By the keeper that takes over DRAM after a kill, and by the one that finds NVMe without its journal."""
    cache, prompt = tmp_path / "cache", prompt_of(0)
    other = make_checkpoint(tmp_path / "other", seed=1)
    with opened(model, cache) as a_engine, opened(other, cache) as b_engine:
        for engine in (a_engine, b_engine):
            Asker(engine, prompt).push_down("hbm")
        wait_for(lambda: all(engine.stats()["nvme_slots_used"] >= 2 * BLOCKS for engine in (a_engine, b_engine)))
        (before,) = keepers(cache)
        os.kill(before, signal.SIGKILL)
        for checkpoint in (model, other):
            with opened(checkpoint, cache) as engine:
                assert engine.generate([prompt], GREEDY)[0].origin["dram"] == TOKENS
        assert before not in keepers(cache)
    end_keepers(cache, LEAVE_S)
    (cache / layout_name(LAYOUT) / "journal").unlink()
    for checkpoint in (model, other):
        with opened(checkpoint, cache) as engine:
            assert engine.generate([prompt], GREEDY)[0].origin["nvme"] == TOKENS
