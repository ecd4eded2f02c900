"""SIGKILL at every system call that touches the cache directory, of a keeper and of engines: by `strace`.

Of two engines one moves its rows by io_uring, whose requests are no calls, the other by threads. Each process is traced
from before its first call on; which calls there are is found out by a run without a kill. Needs strace and the right to
trace.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.cache_directory import layout_name
from kvtier.keeper.server import SOCKET_NAME
from tests.nursery import Nursery, Worker
from tests.rows import LAYOUT, SLOT_BYTES
from tests.soak.crew import BOTH, FILES, Crew, first_keeper
from tests.soak.step_storm import spread
from tests.soak.words import Numbers

KEEPER, ENGINE, THREADS = "keeper", "engine", "threads"
ROW_CALLS = {"preadv", "pwritev"}
PREPARED = "prepared"
LOOKING = ("access", "faccessat", "faccessat2")
"""How a gate is looked for, and nothing else."""
SLOTS = 64
PRELUDE = 6
PRELUDE_SEED, SCRIPT_SEED, AFTER_SEED = 1, 2, 3
IN_FOLDER = ("nvme.slab", "journal", "journal.new")
DETACH_S = 10.0
_CALL = re.compile(r"^(\d+) +(?:\S+ )?(\w+)\(")


def strace_reason() -> str:
    """Why calls cannot be traced here."""
    if shutil.which("strace") is None:
        return "needs strace"
    tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"needs the right to trace: {tried.stderr.strip()}"


def call_kills(count: int, seed: int, scratch: Path) -> Numbers:
    """Keeper and engine killed at every system call on the cache directory: it opens, warm, and no row is wrong."""
    numbers: Numbers = {}
    with Nursery() as nursery:
        _prepare(nursery, scratch / PREPARED)
        for role in (KEEPER, ENGINE, THREADS):
            calls = _calls(nursery, scratch / f"{role}-all", role)
            assert role != THREADS or {name.rstrip("2") for name, _ in calls} >= ROW_CALLS, "no call has moved a row"
            chosen = [calls[step - 1] for step in spread(len(calls), count, seed)]
            came = 0
            for name, nth in chosen:
                inject = ["-e", f"inject={name}:signal=KILL:when={nth}"]
                came += _run(nursery, scratch / f"{role}-{name}-{nth}", role, inject)
            assert came >= 0.7 * len(chosen), f"{role}: {came} of {len(chosen)} kills came"
            numbers |= {f"{role}_calls": len(calls), f"{role}_kills": came}
    return numbers


def _calls(nursery: Nursery, path: Path, role: str) -> list[tuple[str, int]]:
    """(name, nth of its thread) of each call; of the same one again and again, numbers aside, the first."""
    _run(nursery, path, role, [])
    counts: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], str] = {}
    found: set[tuple[str, int]] = set()
    for line in path.with_suffix(".calls").read_text().splitlines():
        parsed = _CALL.match(line)
        if parsed and parsed[2] not in LOOKING:
            thread_call = parsed[1], parsed[2]
            counts[thread_call] += 1
            text = re.sub(r"\d+", "", line)
            if last.get(thread_call) != text:
                found.add((parsed[2], counts[thread_call]))
            last[thread_call] = text
    return sorted(found)


def _run(nursery: Nursery, path: Path, role: str, options: Sequence[str]) -> bool:
    """A warm directory, a traced process that does everything once on it, and who comes after; whether it died."""
    setting = {"dram_slots": SLOTS, "nvme_bytes": SLOTS * (SLOT_BYTES + 1024) + 64_000}
    shutil.copytree(path.with_name(PREPARED), path)
    gate = path.with_suffix(".gate")
    with ExitStack() as stack:
        if role == KEEPER:
            traced = stack.enter_context(nursery.keeper(path, linger_s=0.2, gate=str(gate)))
        else:
            stack.enter_context(first_keeper(nursery, path))
            threads = role == THREADS
            traced = stack.enter_context(nursery.engine(path, linger_s=0.2, gate=str(gate), threads=threads, **setting))
        with _strace(traced.pid, [*_paths(path), *options], path.with_suffix(".calls"), gate):
            while role == KEEPER and not (path / SOCKET_NAME).exists() and traced.is_alive:
                time.sleep(0.005)
            next_keeper = stack.enter_context(nursery.keeper(path)) if role == KEEPER else None
            crew = stack.enter_context(Crew(path, 2, nursery, **setting))
            if role == KEEPER:
                crew.engines[0]("script", SCRIPT_SEED)
                died = traced.wait(5.0)  # a watch and a sync come once a second
            else:
                died = _script(traced)
        if died and next_keeper is not None:
            crew.join(traced.pid)
        _judge(crew)
        if next_keeper is not None and crew.last_keeper != next_keeper.pid:
            next_keeper.drop()
        crew.close()
    return died


def _prepare(nursery: Nursery, path: Path) -> None:
    """Rows on NVMe, left behind by a keeper that has left."""
    with (
        first_keeper(nursery, path, linger_s=0.0) as keeper,
        Crew(path, 1, nursery, dram_slots=SLOTS, nvme_bytes=SLOTS * (SLOT_BYTES + 1024) + 64_000) as crew,
    ):
        crew.publish(PRELUDE_SEED, PRELUDE)
        crew.close()
        assert keeper.wait(60)


def _script(traced: Worker) -> bool:
    """Open, do everything, close; whether it died over it."""
    for command, *arguments in (("open", 60, 2), ("script", SCRIPT_SEED), ("close",)):
        with contextlib.suppress(BrokenPipeError):
            traced.start(str(command), *arguments)
        if traced.died():
            return True
    return False


def _judge(crew: Crew) -> None:
    """What was there is there, what comes can be written, everything is right."""
    for engine in crew.engines:
        assert engine("hits", "nvme", PRELUDE_SEED, 0, PRELUDE) == PRELUDE, "rows of before are lost"
        for tier in BOTH:
            engine("hits", tier, SCRIPT_SEED, 0, 5)
    for tier in BOTH:
        crew.engines[0]("write", tier, AFTER_SEED, 0, 4, 30)
        assert crew.engines[1]("known", tier, AFTER_SEED, 0, 4, 60) == 4
        assert crew.engines[1]("hits", tier, AFTER_SEED, 0, 4) == 4
    crew.check()
    crew.engines[0]("settled", "dram", 0.3)  # the keeper has seen its first engine, so that the linger counts


def _paths(path: Path) -> list[str]:
    """Options that choose calls on the directory or anything in it."""
    folder = path / layout_name(LAYOUT)
    inside = [path, folder, *(path / name for name in FILES - set(IN_FOLDER)), *(folder / name for name in IN_FOLDER)]
    return [option for one in inside for option in ("-P", str(one))]


@contextmanager
def _strace(process: int, options: Sequence[str], log: Path, gate: Path) -> Iterator[None]:
    """Trace a process and its threads until it ends or the block does; opens the gate once it is traced."""
    command = ["strace", "-f", "-qq", "-p", str(process), "-P", str(gate), "-o", str(log), *options]
    with subprocess.Popen(command) as tracer:
        try:
            while not log.exists() or not log.read_text():
                assert tracer.poll() is None, "strace has ended"
                time.sleep(0.005)
            gate.touch()
            yield
        finally:
            tracer.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracer.wait(DETACH_S)
            tracer.kill()  # it may wait for ever for a thread whose process has ended; this lets the thread go
