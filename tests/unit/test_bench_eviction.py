"""scripts/bench_eviction.py on tiny traces: LRU as a plain list would do it, an optimum nobody beats, clear errors."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


def trace(file: Path) -> list[list[int]]:
    """Conversations that grow by a block a turn, among prompts that come once."""
    chance = random.Random(1)
    turns = [0] * 12
    prompts = []
    for number in range(300):
        one = chance.randrange(24)
        if one < 12:
            turns[one] += 1
            prompts.append([one * 1000 + block for block in range(2 + turns[one] % 6)])
        else:
            prompts.append([100_000 + number * 10 + block for block in range(4)])
    lines = [json.dumps({"timestamp": 500 * n, "hash_ids": ids}) for n, ids in enumerate(prompts)]
    file.write_text("\n".join(lines) + "\n")
    return prompts


def lru_hits(prompts: list[list[int]], capacity: int) -> int:
    kept: list[int] = []
    hits = 0
    for ids in prompts:
        found = [block in kept for block in ids]
        hits += (*found, False).index(False)
        kept = [block for block in kept if block not in ids] + ids[::-1]
        kept = kept[-capacity:]
    return hits


def test_hits_are_those_of_a_plain_lru_and_the_optimum_is_above_all(tmp_path: Path) -> None:
    import bench_eviction

    prompts = trace(tmp_path / "trace.jsonl")
    arguments = ["--capacities", "20,60", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert bench_eviction.main([str(tmp_path / "trace.jsonl"), *arguments]) == 0
    runs = json.loads((tmp_path / "out.json").read_text())
    asked = sum(map(len, prompts))
    shares = {(run["policy"], run["capacity"]): run["share"] for run in runs}
    for capacity in (20, 60):
        assert shares["lru", capacity] == pytest.approx(lru_hits(prompts, capacity) / asked)
        assert all(share <= shares["optimum", capacity] for (_, blocks), share in shares.items() if blocks == capacity)
    assert 0 < shares["lru", 20] < shares["lru", 60] < max(shares.values())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no trace at"),
        ("", "0 requests"),
        ("{}\n", "line 1"),
        ('{"timestamp": 5, "hash_ids": [1]}\n{"timestamp": 4, "hash_ids": [1]}\n', "line 2"),
        ('{"timestamp": 5, "hash_ids": "x"}\n', "line 1"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_line_that_says_why(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_eviction

    file = tmp_path / "trace.jsonl"
    if content is not None:
        file.write_text(content)
    assert bench_eviction.main([str(file)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("option", [("--policies", "lru,best"), ("--capacities", "0"), ("--capacities", "many")])
def test_wrong_options_are_refused(option: tuple[str, str]) -> None:
    import bench_eviction

    with pytest.raises(SystemExit) as ended:
        bench_eviction.main(list(option))
    assert ended.value.code == 2
