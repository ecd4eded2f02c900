"""NVMe files deleted, replaced or cut short under a running engine: noticed, made anew, used, and no request knows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_engine_faults import BLOCK, assert_same, config, serve
from tiny import make_checkpoint
from workloads import make_workload

from kvtier import Engine, SamplingParams

BACK_S = 120.0
"""From the loss to shelves that work, on a crowded machine: a look a second, another keeper, a try in five seconds."""

PROMPT = [token % 200 + 3 for token in range(5 * BLOCK + 1)]
GREEDY = SamplingParams(max_tokens=3, temperature=0)


def delete_slab(cache: Path) -> None:
    (slab,) = cache.glob("*/nvme.slab")
    slab.unlink()


def cut_slab(cache: Path) -> None:
    (slab,) = cache.glob("*/nvme.slab")
    os.truncate(slab, slab.stat().st_size // 3 // 4096 * 4096)


def replace_slab(cache: Path) -> None:
    (slab,) = cache.glob("*/nvme.slab")
    other = slab.with_name("other")
    shutil.copyfile(slab, other)
    other.replace(slab)


def delete_folder(cache: Path) -> None:
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    shutil.rmtree(folder)


def delete_all(cache: Path) -> None:
    shutil.rmtree(cache)


def origin(engine: Engine) -> dict[str, int]:
    """Where the prompt came from, with nothing of it left in HBM and DRAM; its answer is always the same."""
    engine.evict("hbm")
    engine.evict("dram")
    (found,) = engine.generate([PROMPT], GREEDY)
    return dict(found.origin)


LOSSES = [delete_slab, cut_slab, replace_slab, delete_folder, delete_all]


@pytest.mark.parametrize(
    ("sharing", "lose"),
    [(False, lose) for lose in LOSSES] + [(True, lose) for lose in (cut_slab, delete_all)],
    ids=lambda value: value.__name__ if callable(value) else ("in-process", "keeper")[value],
)
def test_lost_files_are_noticed_and_made_anew_under_a_running_engine(
    sharing: bool,
    lose: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvtier.file_watch.WATCH_S", 0.05)
    model, cache = make_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "cache"
    rounds = make_workload(5, BLOCK, 300, 9 * BLOCK, outputs=6)[:2]
    with Engine(config(model, None, 512, 0)) as engine:
        expected = serve(engine, rounds)
    with Engine(config(model, cache, sharing=sharing, tiers__linger_s=1, tiers__nvme__wait_s=60)) as engine:
        assert_same(serve(engine, rounds), expected)
        origin(engine)
        assert origin(engine)["nvme"] == 5 * BLOCK
        lost_at = time.monotonic()
        lose(cache)
        while "its files are gone" not in caplog.text:
            assert time.monotonic() - lost_at < BACK_S
            engine.generate([[5]], GREEDY)
        while origin(engine)["nvme"] != 5 * BLOCK:
            assert time.monotonic() - lost_at < BACK_S, caplog.text
            time.sleep(0.05)
        print(f"{time.monotonic() - lost_at:.1f} s from the loss to a hit on the new shelf")
        assert_same(serve(engine, rounds), expected)
        assert engine.healthy and len(list(cache.glob("*/nvme.slab"))) == 1
        assert engine.stats()["nvme_bytes_total"] <= next(cache.glob("*/nvme.slab")).stat().st_size


def test_two_engines_meet_again_over_new_files(tmp_path: Path) -> None:
    model, cache = make_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "cache"
    settings = {"sharing": True, "tiers__linger_s": 1, "tiers__nvme__wait_s": 60}
    with Engine(config(model, cache, **settings)) as busy, Engine(config(model, cache, **settings)) as idle:
        first = busy.generate([PROMPT], GREEDY)[0].token_ids
        lost_at = time.monotonic()
        delete_slab(cache)
        while not (cache.is_dir() and list(cache.glob("*/nvme.slab"))) or origin(busy)["nvme"] != 5 * BLOCK:
            assert time.monotonic() - lost_at < 2 * BACK_S
            busy.generate([[5]], GREEDY)
        while origin(idle)["nvme"] != 5 * BLOCK:
            assert time.monotonic() - lost_at < 2 * BACK_S
        print(f"{time.monotonic() - lost_at:.1f} s from the loss until both hit on the new shelf")
        busy.evict("hbm")
        busy.evict("dram")
        (found,) = busy.generate([PROMPT], GREEDY)
        assert found.token_ids == first and found.origin["computed"] == 1
        assert busy.healthy and idle.healthy
