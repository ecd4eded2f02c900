"""System calls that fail on request: the seam through which every fault of a disk is tested.

A script says which call (the nth of its kind) errs, moves short, dawdles, hangs until it is released, kills the process
or cuts the power. Wraps any `SystemCalls`; used by tests and soak runs, on whatever threads the wrapped calls run on.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.io.base import Ended, IoRequest, IoResult, KernelCalls, Mover, Operation, Ring, SystemCalls
from kvtier.io.threads import CallMover
from kvtier.io.unsynced import UnsyncedCalls


class Call(enum.Enum):
    """The kinds of calls, counted apart."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    ALLOCATE = "allocate"
    SETUP = "setup"
    """Of an io_uring, whose requests count as the calls that they stand for."""


CALLS = {Operation.READ: Call.READ, Operation.WRITE: Call.WRITE, Operation.SYNC: Call.SYNC}


class Effect(enum.Enum):
    """What a fault does; `Fault.value` says how much of it."""

    ERROR = "error"
    """Nothing moves; OSError with errno `value`."""
    SHORT = "short"
    """Only the first `value` bytes move."""
    DELAY = "delay"
    """The call happens after `value` seconds."""
    HANG = "hang"
    """The call happens once `FaultyCalls.release` was called."""
    KILL = "kill"
    """The process ends by SIGKILL before the call."""
    DROP_UNSYNCED = "drop-unsynced"
    """The power fails before the call and the process ends: `cut` of the wrapped `UnsyncedCalls`, with seed `value`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the script: the `nth` call (from 1) of a kind, or with `sticky` every one from there on."""

    call: Call
    nth: int
    effect: Effect
    value: float = 0
    sticky: bool = False

    def strikes(self, call: Call, number: int) -> bool:
        """Whether this fault is for the given call."""
        return call is self.call and (number >= self.nth if self.sticky else number == self.nth)


class FaultyCalls:
    """`SystemCalls` that follow a script of faults."""

    def __init__(self, faults: Sequence[Fault] = (), inner: SystemCalls | None = None) -> None:
        self._faults = list(faults)
        self._inner = inner if inner is not None else KernelCalls()
        self._counts: Counter[Call] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()

    def count(self, call: Call) -> int:
        """How many calls of a kind have begun."""
        return self._counts[call]

    def inject(self, faults: Sequence[Fault]) -> None:
        """Replace the script. Numbers go on counting from the first call ever made; what hangs from now on hangs."""
        with self._lock:
            self._faults = list(faults)
        self._released.clear()  # who was released goes on all the same

    def release(self) -> None:
        """Let every hanging call go on, and all that would hang later, until there is another script."""
        self._released.set()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        return self._inner.preadv(descriptor, self._strike(Call.READ, buffers), offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `SystemCalls`."""
        return self._inner.pwritev(descriptor, self._strike(Call.WRITE, buffers), offset)

    def fdatasync(self, descriptor: int) -> None:
        """See `SystemCalls`."""
        self._strike(Call.SYNC, ())
        self._inner.fdatasync(descriptor)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """See `SystemCalls`."""
        self._strike(Call.ALLOCATE, ())
        self._inner.fallocate(descriptor, offset, length)

    def ring(self, depth: int, slice_bytes: int) -> Ring:
        """See `SystemCalls`."""
        self._strike(Call.SETUP, ())
        return FaultyRing(self, self._inner.ring(depth, slice_bytes), depth)

    def mover(self, mover: Mover) -> Mover:
        """See `SystemCalls`."""
        return FaultyMover(self, self._inner.mover(mover))

    @property
    def may_wait(self) -> bool:
        """Some of the script lets a call wait."""
        return any(fault.effect in (Effect.DELAY, Effect.HANG) for fault in self._faults)

    def passes(self, call: Call) -> bool:
        """Whether the next call of a kind suffers nothing; then it has begun."""
        with self._lock:
            passes = not any(fault.strikes(call, self._counts[call] + 1) for fault in self._faults)
            self._counts[call] += passes
            return passes

    def begin(self, call: Call) -> list[Fault]:
        """A call begins: count it; returns the faults that it suffers."""
        with self._lock:
            self._counts[call] += 1
            return [fault for fault in self._faults if fault.strikes(call, self._counts[call])]

    def suffer(self, faults: Sequence[Fault], buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """Let the faults of a call happen; returns the buffers that still move."""
        for fault in faults:
            if fault.effect is Effect.ERROR:
                raise OSError(int(fault.value), "injected")
            if fault.effect is Effect.DELAY:
                time.sleep(fault.value)
            elif fault.effect is Effect.HANG:
                self._released.wait()
            elif fault.effect is Effect.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.effect is Effect.DROP_UNSYNCED:
                assert isinstance(self._inner, UnsyncedCalls), "only what remembers its writes can drop them"
                self._inner.cut(int(fault.value))
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                buffers = _first(buffers, int(fault.value))
        return buffers

    def _strike(self, call: Call, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        return self.suffer(self.begin(call), buffers)


class FaultyMover:
    """A `Mover` whose requests count as calls. What a fault strikes is made of calls, the rest is the inner one's."""

    def __init__(self, calls: FaultyCalls, inner: Mover) -> None:
        self._calls, self._inner, self._struck = calls, inner, CallMover(calls)

    @property
    def batch_max(self) -> int:
        """See `Mover`. One that may wait does so alone."""
        return 1 if self._calls.may_wait else self._inner.batch_max

    def move(self, requests: Sequence[IoRequest]) -> list[IoResult]:
        """See `Mover`."""
        results: dict[int, IoResult] = {}
        passing: list[IoRequest] = []
        for request in requests:
            if self._calls.passes(CALLS[request.operation]):
                passing.append(request)
            else:
                [results[request.tag]] = self._struck.move([request])
        results |= {result.tag: result for result in (self._inner.move(passing) if passing else ())}
        return [results[request.tag] for request in requests]


class FaultyRing:
    """A `Ring` whose requests count as the calls that they stand for, once the kernel would get them, and suffer alike.

    It keeps a queue of its own, so that what the script lets hang is among the `depth` that are in the kernel.
    """

    def __init__(self, calls: FaultyCalls, inner: Ring, depth: int) -> None:
        self._calls = calls
        self._inner = inner
        self.register_memory, self.refusal = inner.register_memory, inner.refusal
        self._depth = depth
        self._lock = threading.Lock()
        self._waiting: deque[IoRequest] = deque()
        self._begun: dict[int, IoRequest] = {}
        """By tag."""
        self._ended: list[Ended] = []
        """Of these what the kernel never got."""

    def push(self, requests: list[IoRequest]) -> None:
        """See `Ring`."""
        with self._lock:
            self._waiting.extend(requests)
        self._start()

    def cancel(self) -> list[int]:
        """See `Ring`."""
        with self._lock:
            tags = [request.tag for request in self._waiting]
            self._waiting.clear()
        return tags

    @property
    def bell(self) -> int:
        """See `Ring`."""
        return self._inner.bell

    def take(self) -> tuple[list[IoResult], list[Ended]]:
        """See `Ring`."""
        results, others = self._inner.take()
        with self._lock:
            for result in results:
                del self._begun[result.tag]
            ended, self._ended = others + self._ended, []
            others = [(its := self._begun.pop(e[0].tag), e[1], e[1] == its.total_bytes, *e[3:]) for e in ended]
        self._start()
        return results, others

    def wake(self) -> None:
        """See `Ring`."""
        self._inner.wake()

    def close(self) -> bool:
        """See `Ring`."""
        return not self._begun and self._inner.close()

    def after_fork_in_child(self) -> None:
        """See `Ring`."""
        self._inner.after_fork_in_child()

    def _start(self) -> None:
        """Begin what there is room for. What may hang does so on a thread of its own."""
        while True:
            with self._lock:
                if not self._waiting or len(self._begun) >= self._depth:
                    return
                request = self._waiting.popleft()
                self._begun[request.tag] = request
                faults = self._calls.begin(CALLS[request.operation])
            if any(fault.effect in (Effect.DELAY, Effect.HANG) for fault in faults):
                threading.Thread(target=self._suffer, args=(request, faults), daemon=True).start()
            else:
                self._suffer(request, faults)

    def _suffer(self, request: IoRequest, faults: Sequence[Fault]) -> None:
        started_ns = time.monotonic_ns()
        left, result = request.buffers, 0
        try:
            left = tuple(self._calls.suffer(faults, request.buffers))
        except OSError as error:
            result = -(error.errno or errno.EIO)
        if result == 0 and (left or not request.buffers):
            # With a `then` the ring makes no result of the part that moves.
            cut = left is not request.buffers
            self._inner.push([request._replace(buffers=left, then=int, sums=None) if cut else request])
            return
        with self._lock:
            self._ended.append((request, result, False, started_ns, time.monotonic_ns()))
        self._inner.wake()


def seeded_faults(seed: int, count: int, nth_max: int) -> list[Fault]:
    """`count` passing faults on reads, writes and syncs among the first `nth_max` calls; the same for the same seed."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(count):
        call = chance.choice([Call.READ, Call.WRITE, Call.SYNC])
        nth = chance.randint(1, nth_max)
        effect = chance.choice([Effect.ERROR, Effect.ERROR, Effect.SHORT, Effect.DELAY])
        value: float = chance.choice([errno.EIO, errno.EINTR, errno.ENOSPC])
        if effect is Effect.SHORT:
            value = 4096 * chance.randint(0, 2)
        elif effect is Effect.DELAY:
            value = 0.001
        faults.append(Fault(call, nth, effect, value))
    return faults


def _first(buffers: Sequence[memoryview], limit: int) -> list[memoryview]:
    """The first `limit` bytes of a run of buffers."""
    kept: list[memoryview] = []
    for buffer in buffers:
        kept += [buffer[:limit]] if limit > 0 else []
        limit -= min(limit, buffer.nbytes)
    return kept
