"""An engine in a forked child: refuses at once, whatever was locked, and closes without harm; the parent goes on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier import Engine, Request, SamplingParams, Unavailable
from tests.engines import GREEDY, PROMPTS, Gate, Sink, end_keepers, knows_shelves, opened, wait_for
from tests.tiny import make_checkpoint

CHILD_S = 30
FORKED = r"runs in process \d+, which made it, and not in its forked child \d+; fork before an engine is made"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", tokenizer=True)


@pytest.fixture(params=[True, False], ids=["shared", "alone"])
def engine(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Engine]:
    path = tmp_path / "cache"
    options = {"sharing": request.param, "tiers__nvme__path": path, "tiers__nvme__bytes": "4MiB"}
    with opened(checkpoint, **options, tiers__linger_s=0.1) as engine:
        wait_for(lambda: knows_shelves(engine, "dram", "nvme"))
        yield engine
    end_keepers(path)


def in_child(work: Callable[[], None]) -> None:
    """Run this in a forked child; AssertionError with its traceback, or if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            work()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as said:
        trouble = said.read().decode()
    _, status = os.waitpid(child, 0)
    assert not trouble, trouble
    assert status == 0, "the child hung" if os.WIFSIGNALED(status) else status


def check_refused(engine: Engine, sink: Sink) -> None:
    assert not engine.healthy
    calls: list[Callable[[], object]] = [
        lambda: engine.submit(Request(PROMPTS[0], GREEDY), sink),
        lambda: engine.stream(PROMPTS[0], GREEDY),
        lambda: engine.generate(PROMPTS[:2], GREEDY),
        lambda: engine.evict("hbm"),
        engine.stats,
    ]
    for call in calls:
        with pytest.raises(Unavailable, match=FORKED):
            call()


def answers(engine: Engine) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]


def test_a_forked_child_is_refused_and_the_parent_goes_on(engine: Engine) -> None:
    right = answers(engine)
    in_child(lambda: check_refused(engine, Sink()))
    engine.evict("hbm")
    again = engine.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in again] == right
    assert sum(completion.origin["dram"] for completion in again) > 0, "its shelves are still there"


def test_closing_in_a_forked_child_does_nothing_to_anybody(engine: Engine) -> None:
    right = answers(engine)

    def close_all() -> None:
        with engine:
            pass
        engine.close()
        engine.close(0.0)
        check_refused(engine, Sink())
        gc.collect()

    in_child(close_all)
    assert engine.healthy and answers(engine) == right
    engine.evict("hbm")
    engine.evict("dram")
    again = engine.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in again] == right
    assert sum(completion.origin["nvme"] for completion in again) > 0
    engine.close()
    in_child(engine.close)


def test_a_stream_that_a_forked_child_has_inherited_is_refused_and_the_parents_ends(engine: Engine) -> None:
    gate = Gate(engine)
    streams = [engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)]

    def look() -> None:
        with pytest.raises(Unavailable, match=FORKED):
            next(streams[0])
        with pytest.raises(Unavailable, match=FORKED):
            streams[1].collect()
        streams.pop().close()
        streams.clear()
        gc.collect()

    in_child(look)
    gate.open()
    assert [len(stream.collect().token_ids) for stream in streams] == [GREEDY.max_tokens] * 2


def test_whatever_was_locked_at_the_fork_a_child_never_waits(engine: Engine) -> None:
    held, over = threading.Event(), threading.Event()
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))

    def hold() -> None:
        with engine._loop._lock, engine._loop._bell._condition, engine.metrics._lock:
            held.set()
            over.wait(CHILD_S)

    def look() -> None:
        check_refused(engine, Sink())
        stream.close()
        engine.close()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(CHILD_S)
    try:
        in_child(look)
    finally:
        over.set()
        holder.join()
    assert len(stream.collect().token_ids) == 400
