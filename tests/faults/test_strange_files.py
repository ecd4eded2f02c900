"""Pipes, folders and devices in the place of a cache directory's files: engines say so, serve, and never wait for them.

What is left of the shelves is used, and the rest comes back once the thing is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout
from kvtier.cache_directory import layout_name
from tests.engines import end_keepers, knows_shelves, wait_for
from tests.strange import put
from tests.tiny import make_checkpoint

BLOCK, BLOCKS = 16, 6
LAYOUT = KVLayout(3, 2, 16, BLOCK, "float32")
FOLDER = layout_name(LAYOUT)
PROMPT = [(13 * token * token) % 290 + 3 for token in range(BLOCKS * BLOCK + 5)]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
REFUSAL = "in the cache directory is no plain file of this user's own; remove it"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(model: Path) -> list[int]:
    """What an engine without shelves answers."""
    with Engine(configured(model, None, False)) as engine:
        return engine.generate([PROMPT], GREEDY)[0].token_ids


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "cache" / FOLDER).mkdir(parents=True)
    os.chmod(tmp_path / "cache", 0o700)
    (tmp_path / "cache" / "keeper.lock").touch(0o600)
    yield tmp_path / "cache"
    end_keepers(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is away is asked for often."""
    monkeypatch.setattr("kvtier.keeper.client.RETRY_S", 0.2)
    monkeypatch.setattr("kvtier.reopening.RETRY_S", 0.2)


def configured(model: Path, cache: Path | None, sharing: bool) -> EngineConfig:
    values: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "block_tokens": BLOCK,
        "threads": 1,
        "sharing": sharing,
        "tiers.hbm.bytes": 16 * LAYOUT.row_bytes,
        "tiers.dram.bytes": "1MiB" if cache else 0,
        "tiers.dram.staging_bytes": 0,
        "tiers.nvme.bytes": "2MiB" if cache else 0,
        "tiers.nvme.path": cache,
        "tiers.nvme.wait_s": 0.3,
        "tiers.linger_s": 0.1,
        "tiers.load": "always",
        "tiers.fetch_deadline_s": 60,
    }
    return EngineConfig.load(None, values)


def check_answers(engine: Engine, right: list[int]) -> None:
    for _ in range(2):
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == right
        engine.evict("hbm")


def remove(place: Path) -> None:
    place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("keeper.lock", "pipe"),
        ("owners.lock", "pipe"),
        ("keeper.log", "pipe"),
        ("keeper.log", "folder"),
        ("keeper.log", "device"),
        ("keeper.log", "socket"),
    ],
)
def test_without_a_keeper_the_engine_says_which_file_and_the_shelves_come_once_it_is_gone(
    model: Path, right: list[int], cache: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    (cache / name).unlink(missing_ok=True)
    put(cache / name, kind)
    with Engine(configured(model, cache, True)) as engine:
        wait_for(lambda: f"no line to the keeper: {name} {REFUSAL}" in caplog.text)
        check_answers(engine, right)
        assert "dram_slots_total" not in engine.stats()
        remove(cache / name)
        wait_for(lambda: {"dram_slots_total", "nvme_slots_total"} <= set(engine.stats()))
        check_answers(engine, right)
    assert caplog.text.count(REFUSAL) <= 3, "once in the log, twice where the start tells of it"


def test_a_folder_in_the_place_of_the_socket_is_said(
    model: Path, right: list[int], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(cache / "keeper.sock", "folder")
    with Engine(configured(model, cache, True)) as engine:
        wait_for(lambda: "keeper.sock in the cache directory is a folder; remove it" in caplog.text)
        check_answers(engine, right)
        remove(cache / "keeper.sock")
        wait_for(lambda: {"dram_slots_total", "nvme_slots_total"} <= set(engine.stats()))


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_what_else_is_in_the_place_of_the_socket_makes_way_for_it(
    model: Path, right: list[int], cache: Path, kind: str
) -> None:
    put(cache / "keeper.sock", kind) if kind == "pipe" else (cache / "keeper.sock").touch()
    with Engine(configured(model, cache, True)) as engine:
        wait_for(lambda: {"dram_slots_total", "nvme_slots_total"} <= set(engine.stats()))
        check_answers(engine, right)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "alone"])
def test_without_nvme_the_engine_says_why_and_goes_on_with_dram(
    model: Path, right: list[int], cache: Path, caplog: pytest.LogCaptureFixture, sharing: bool, kind: str
) -> None:
    put(cache / FOLDER / "nvme.slab", kind)
    with Engine(configured(model, cache, sharing)) as engine:
        wait_for(lambda: "dram_slots_total" in engine.stats())
        check_answers(engine, right)
        assert "nvme_slots_total" not in engine.stats()
        wait_for(lambda: f"nvme.slab {REFUSAL}" in caplog.text + keeper_log(cache))
        remove(cache / FOLDER / "nvme.slab")
        wait_for(lambda: "nvme_slots_total" in engine.stats())
        check_answers(engine, right)


def keeper_log(cache: Path) -> str:
    return (cache / "keeper.log").read_text() if (cache / "keeper.log").exists() else ""


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "alone"])
def test_without_a_journal_rows_are_found_by_their_headers(
    model: Path, right: list[int], cache: Path, caplog: pytest.LogCaptureFixture, sharing: bool, kind: str
) -> None:
    with Engine(configured(model, cache, sharing)) as engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        check_answers(engine, right)
        wait_for(lambda: engine.stats()["nvme_writes"] >= BLOCKS and (cache / FOLDER / "journal").exists())
    end_keepers(cache)
    (cache / FOLDER / "journal").unlink()
    for name in ("journal", "journal.new"):
        put(cache / FOLDER / name, kind)
    with Engine(configured(model, cache, sharing)) as engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        completion = engine.generate([PROMPT], GREEDY)[0]
        assert completion.token_ids == right and completion.origin["nvme"] == BLOCKS * BLOCK
        wait_for(lambda: f"journal {REFUSAL}" in caplog.text + keeper_log(cache))
        if kind == "folder":
            wait_for(
                lambda: (
                    "journal cannot be written, NVMe may come back colder: journal.new"
                    in caplog.text + keeper_log(cache)
                )
            )
