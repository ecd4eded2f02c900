"""A fault at every single I/O of a scripted run: serving goes on, exactly, and is whole again soon after the fault.

Two runs: one of a shelf from its making to its reopening, time being an argument; one of a whole engine over DRAM and
NVMe whose logits must keep their bits. The faults come through the seam, below rows and below the journal.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from kvtier import Engine, EngineConfig, SamplingParams, reopening
from kvtier.errors import ShelfError
from kvtier.io.faulty import Call, Effect, Fault, FaultyCalls
from kvtier.shelf import ShelfLimits
from kvtier.shelves import open_dram_shelf, open_nvme_shelf
from tests.equivalence.workloads import Recorder
from tests.rows import ShelfUser, block_hashes, nvme_user
from tests.soak.quiet import quiet
from tests.tiny import make_checkpoint

RESUMES_S = 30.0
EFFECTS: list[tuple[str, Effect, float]] = [
    ("EIO", Effect.ERROR, errno.EIO),
    ("ENOSPC", Effect.ERROR, errno.ENOSPC),
    ("EROFS", Effect.ERROR, errno.EROFS),
    ("EINTR", Effect.ERROR, errno.EINTR),
    ("short", Effect.SHORT, 4096),
    ("nothing", Effect.SHORT, 0),
]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one run."""

    seam: str
    fault: Fault
    name: str


def cases_of(counts: dict[tuple[str, Call], int]) -> list[Case]:
    """Every fault at every I/O that a run without faults has made, once and for good."""
    cases: list[Case] = []
    for (seam, call), count in counts.items():
        for nth, (name, effect, value), sticky in itertools.product(range(1, count + 1), EFFECTS, (False, True)):
            if effect is Effect.ERROR or call in (Call.READ, Call.WRITE):
                fault = Fault(call, nth, effect, value, sticky)
                cases.append(Case(seam, fault, f"{seam} {call.value} {nth} {name}{' for good' * sticky}"))
    return cases


def chosen(cases: list[Case], count: int, seed: int) -> Iterator[Case]:
    """`count` cases in an order of the seed's, none twice before all have had their turn."""
    chance = random.Random(seed)
    while count > 0:
        yield from chance.sample(cases, min(count, len(cases)))
        count -= len(cases)


# ---- a shelf ---------------------------------------------------------------------------------------------------------

HASHES = block_hashes(12, 77)
SHELF_BYTES = 300_000


def fail_each_shelf_io(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """A fault at each I/O of an NVMe shelf's life: rows are right or missed, and all is back 30 s after its end."""
    numbers: Counter[str] = Counter()
    with quiet(logging.CRITICAL):
        cases = cases_of(_live(scratch / "counted", None, numbers))
        for case in chosen(cases, count, seed):
            path = scratch / "case"
            try:
                _live(path, case, numbers)
            except (AssertionError, OSError) as error:
                raise AssertionError(f"{case.name}: {error!r}") from error
            shutil.rmtree(path)
            numbers["cases"] += 1
    assert numbers["hits"] > 0 and numbers["struck"] > 0.7 * numbers["cases"], numbers
    return {**numbers, "cases in all": len(cases), "seed": seed}


def _live(path: Path, case: Case | None, numbers: Counter[str]) -> dict[tuple[str, Call], int]:
    """Open, write, read, meet the fault somewhere; then without it all must come back, now and after reopening.

    Returns how many calls were made while the fault was there.
    """
    seams = {"rows": FaultyCalls(), "journal": FaultyCalls()}
    calls, journal_calls = seams["rows"], seams["journal"]
    if case is not None:
        seams[case.seam].inject([case.fault])
    opened = functools.partial(nvme_user, path, SHELF_BYTES, calls, journal_calls=journal_calls)
    user: ShelfUser | None = None
    try:
        user = opened()
    except ShelfError:
        numbers["refused to open"] += 1
    if user is not None:
        for hashes in (HASHES[:6], HASHES[4:9]):
            user.write(hashes)
            numbers["hits"] += user.hits(HASHES[:9])
            user.shelf.check()
    made = {(seam, call): calls.count(call) for seam, calls in seams.items() for call in Call}
    if case is not None:
        numbers["struck"] += seams[case.seam].count(case.fault.call) >= case.fault.nth
        seams[case.seam].inject([])
    if user is None:
        user = opened()
    user.now += RESUMES_S
    user.shelf.poll(user.now)
    for hashes in (HASHES[9:10], HASHES):  # the first is the probe
        user.write(hashes)
        user.hits(hashes[:1])
    assert user.hits(HASHES) == len(HASHES), "it does not come back"
    user.shelf.check()
    user.shelf.close(10.0)
    again = nvme_user(path, SHELF_BYTES)
    assert again.hits(HASHES) == len(HASHES), "it is not warm afterwards"
    again.shelf.close(10.0)
    return made


# ---- an engine -------------------------------------------------------------------------------------------------------

BLOCK = 16
BLOCKS = 5
PROMPT_TOKENS = BLOCKS * BLOCK + 1
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
LIMITS = ShelfLimits(pause_s=0.2)


class Judge:
    """An engine without shelves, whose logits are those that all others must have."""

    def __init__(self, model: Path) -> None:
        self._engine = Engine(_config(model, None))
        self._recorder = Recorder(self._engine)

    def logits(self, prompt: list[int]) -> torch.Tensor:
        """[output token, vocab]."""
        return answer(self._engine, self._recorder, prompt)[0]

    def close(self) -> None:
        """End its engine."""
        self._engine.close()


def answer(engine: Engine, recorder: Recorder, prompt: list[int]) -> tuple[torch.Tensor, dict[str, int]]:
    """Logits [output token, vocab] of a greedy answer, and where the prompt came from."""
    recorder.rows.clear()
    (found,) = engine.generate([prompt], GREEDY)
    rows = [recorder.rows[key] for key in sorted(recorder.rows)]
    assert len(rows) == GREEDY.max_tokens
    return torch.stack(rows), dict(found.origin)


def fail_each_engine_io(count: int, seed: int, scratch: Path) -> dict[str, object]:
    """A fault at each I/O of one running engine: all logits keep their bits, and each tier is used again at once."""
    numbers: Counter[str] = Counter()
    model = make_checkpoint(scratch / "tiny", "llama")
    seams = {"dram": FaultyCalls(), "nvme": FaultyCalls(), "journal": FaultyCalls()}
    slowest_s = 0.0
    prompts = _prompts(seed)
    with (
        quiet(logging.CRITICAL),
        _seams(seams),
        contextlib.closing(Judge(model)) as judge,
        Engine(_config(model, scratch)) as engine,
    ):
        recorder = Recorder(engine)
        before = {(seam, call): calls.count(call) for seam, calls in seams.items() for call in Call}
        _serve(engine, recorder, judge, next(prompts))
        made = {key: seams[key[0]].count(key[1]) - number for key, number in before.items()}
        assert made["dram", Call.READ] == made["nvme", Call.READ] == made["nvme", Call.WRITE] == BLOCKS, made
        made = {(seam, call): max(number, seam == "journal") for (seam, call), number in made.items()}
        made = {key: number for key, number in made.items() if key[1] is not Call.ALLOCATE and number}
        for case in chosen(cases_of(made), count, seed):
            calls, fault = seams[case.seam], case.fault
            first = calls.count(fault.call)
            calls.inject([Fault(fault.call, first + fault.nth, fault.effect, fault.value, fault.sticky)])
            try:
                for tier, hits in _serve(engine, recorder, judge, next(prompts)).items():
                    numbers[f"{tier} tokens under faults"] += hits
                numbers["struck"] += calls.count(fault.call) >= first + fault.nth
                calls.inject([])
                cleared = time.monotonic()
                while set(_serve(engine, recorder, judge, next(prompts)).values()) != {BLOCKS * BLOCK}:
                    assert time.monotonic() - cleared < RESUMES_S, "a tier is not used again"
                slowest_s = max(slowest_s, time.monotonic() - cleared)
            except AssertionError as error:
                raise AssertionError(f"{case.name}: {error}") from error
            numbers["cases"] += 1
        assert engine.healthy
    assert numbers["struck"] > 0.7 * numbers["cases"], numbers
    return {**numbers, "cases in all": len(cases_of(made)), "slowest return s": round(slowest_s, 2), "seed": seed}


def _serve(engine: Engine, recorder: Recorder, judge: Judge, prompt: list[int]) -> dict[str, int]:
    """Ask thrice: computed, from DRAM, from NVMe; each answer has the judge's bits. Tokens that came from each tier."""
    expected = judge.logits(prompt)
    found: dict[str, int] = {}
    for tier, evicted in (("hbm", ()), ("dram", ("hbm",)), ("nvme", ("hbm", "dram"))):
        for one in evicted:
            engine.evict(one)
        logits, origin = answer(engine, recorder, prompt)
        assert torch.equal(logits, expected), f"logits differ, prompt from {origin}"
        found[tier] = origin[tier]
    del found["hbm"]
    return found


def _prompts(seed: int) -> Iterator[list[int]]:
    chance = random.Random(f"prompts {seed}")
    while True:
        yield [chance.randrange(3, 250) for _ in range(PROMPT_TOKENS)]


@contextlib.contextmanager
def _seams(seams: dict[str, FaultyCalls]) -> Iterator[None]:
    """The next engines' shelves make their calls through these; drains that get nowhere are given up soon."""
    dram = functools.partial(open_dram_shelf, calls=seams["dram"], limits=LIMITS)
    nvme = functools.partial(open_nvme_shelf, calls=seams["nvme"], journal_calls=seams["journal"], limits=LIMITS)
    with (
        mock.patch("kvtier.assembly.open_dram_shelf", dram),
        mock.patch("kvtier.assembly.open_nvme_shelf", nvme),
        mock.patch("kvtier.drains.DRAIN_S", 0.2),
        mock.patch.object(reopening, "RETRY_S", 0.05),
    ):
        yield


def _config(model: Path, cache: Path | None) -> EngineConfig:
    return EngineConfig.load(
        None,
        {
            "model": model,
            "dtype": "float32",
            "block_tokens": BLOCK,
            "threads": 1,
            "tiers.hbm.bytes": "1MiB",
            "tiers.dram.bytes": "1MiB" if cache else 0,
            "tiers.dram.staging_bytes": 0,
            "tiers.nvme.bytes": "4MiB" if cache else 0,
            "tiers.nvme.path": cache / "cache" if cache else None,
            "sharing": False,
            "tiers.load": "always",
        },
    )
