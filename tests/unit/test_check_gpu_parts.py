"""What scripts/check_gpu makes of steps that fail, hang or die, and of engines that differ. No GPU, no kernels."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WORKER = """
import json, os, sys, time
def say(*values): print(json.dumps(values), flush=True)
if "broken" in sys.argv: sys.exit(3)
print("what a library prints")
for step in sys.argv[1:]:
    say("Mark", "begin", step)
    if step == "raises": say("Mark", "failed", "ValueError: no"); sys.exit(1)
    if step == "dies": os.abort()
    if step == "hangs": time.sleep(1000)
    say("Line", step, step != "differs", "said")
    say("Speed", f"speed of {step}", 2.0, "speed of first")
    say("Mark", "end", step)
"""


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def oversee(tmp_path: Path) -> Callable[..., Any]:
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(WORKER))

    def run(steps: Sequence[str], limit_s: float = 60.0, step_limit_s: float = 60.0) -> Any:
        from gpu.oversight import Oversight

        def command(steps: Sequence[str]) -> list[str]:
            starts.append(list(steps))
            return [sys.executable, "-S", str(worker), *steps]

        starts: list[list[str]] = []
        said: list[str] = []
        found = Oversight(command, limit_s, step_limit_s, said.append)
        found.run(steps)
        assert len(said) == len(found.lines) + len(found.speeds)
        return found, starts

    return run


def names(lines: Sequence[Any]) -> list[str]:
    return [line.name for line in lines if line.right]


def test_steps_that_run_are_all_run_by_one_process(oversee: Callable[..., Any]) -> None:
    found, starts = oversee(["first", "differs", "third"])
    assert starts == [["first", "differs", "third"]]
    assert names(found.lines) == ["first", "third"] and [line.name for line in found.lines] == starts[0]
    assert [speed.what for speed in found.speeds] == [f"speed of {step}" for step in starts[0]]


@pytest.mark.parametrize(("step", "why"), [("raises", "ValueError: no"), ("dies", "status -6")])
def test_a_step_that_fails_or_dies_costs_itself_alone(step: str, why: str, oversee: Callable[..., Any]) -> None:
    found, starts = oversee(["first", step, "third"])
    assert starts == [["first", step, "third"], ["third"]]
    assert names(found.lines) == ["first", "third"]
    [wrong] = [line for line in found.lines if not line.right]
    assert wrong.name == step and why in wrong.says


def test_a_step_that_hangs_is_ended_at_its_limit(oversee: Callable[..., Any]) -> None:
    found, _ = oversee(["first", "hangs", "third"], step_limit_s=1.5)
    assert names(found.lines) == ["first", "third"]
    assert [line.name for line in found.lines if "still at it after" in line.says] == ["hangs"]


def test_when_time_is_over_what_was_found_is_there_and_the_rest_is_named(oversee: Callable[..., Any]) -> None:
    found, starts = oversee(["first", "hangs", "third", "fourth"], limit_s=1.5)
    assert names(found.lines) == ["first"] and len(starts) == 1 and found.speeds
    assert ["not run: 2 s were over" in line.says for line in found.lines] == [False, False, True, True]


def test_a_worker_that_cannot_begin_is_not_started_again(oversee: Callable[..., Any]) -> None:
    found, starts = oversee(["broken", "third"])
    assert len(starts) == 1 and names(found.lines) == []
    assert ["status 3" in line.says for line in found.lines] == [True, True]


def test_the_table_has_each_speed_beside_its_limit_if_there_is_one() -> None:
    from gpu.found import Speed, table

    rows = table([Speed("a copy", 10.0), Speed("decode", 5.0, "a copy"), Speed("other", 5.0, "not measured")])
    assert [row.split()[-3:] for row in rows[2:3]] == [["0.50", "a", "copy"]]
    assert rows[1].endswith("10.0") and rows[3].endswith("not measured") and len(rows) == 4


def outcome(token_ids: list[int], logits: list[list[float]]) -> Any:
    from gpu.engines import Outcome

    return Outcome(token_ids, torch.tensor(logits), 1.0, 1.0, {"DRAM": 2048, "NVMe": 0}, 0, 0)


@pytest.mark.parametrize(
    ("token_ids", "logits", "right"),
    [
        ([1, 0], [[0.0, 9.0, 1.0], [8.0, 7.9999, 0.0]], True),
        ([1, 1], [[0.0, 9.0, 1.0], [8.0, 8.0001, 0.0]], True),  # as near as they may be off
        ([1, 2], [[0.0, 9.0, 1.0], [8.0, 7.9999, 9.0]], False),
        ([2, 0], [[0.0, 1.0, 9.0], [8.0, 7.9999, 0.0]], False),
        ([1, 0], [[0.0, 9.0, 1.1], [8.0, 7.9999, 0.0]], False),
        ([1, 0], [[0.0, 9.0, float("nan")], [8.0, 7.9999, 0.0]], False),
        ([1], [[0.0, 9.0, 1.0]], False),
    ],
)
def test_engines_may_part_only_where_two_tokens_are_as_likely(
    token_ids: list[int], logits: list[list[float]], right: bool
) -> None:
    from gpu.engines import compare

    expected = outcome([1, 0], [[0.0, 9.0, 1.0], [8.0, 7.9999, 0.0]])
    line = compare("an engine", outcome(token_ids, logits), expected)
    assert line.right is right and ("2 KiB from DRAM" in line.says) is (len(token_ids) == 2)


def test_every_step_is_named_once_and_the_limits_come_first() -> None:
    from gpu.correctness import CASES, FEW, SHAPES
    from gpu.steps import STEPS

    kernels = [name for name in STEPS if name.startswith("kernels, ") and name != "kernels, bits"]
    assert len(CASES) == len(FEW) == len(kernels) == len(SHAPES) + 1
    assert list(STEPS).index("copies") == 1 and list(STEPS).index("decode from NVMe") < list(STEPS).index(
        "engine, NVMe"
    )
