"""System calls that fail on request: the seam through which every fault of a disk is tested.

A script says which call (the nth of its kind) errs, moves short, dawdles or hangs until it is released. Wraps any
`SystemCalls`; used by tests and soak runs, on whatever threads the wrapped calls run on.
"""

from __future__ import annotations

import enum
import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.io.base import KernelCalls, SystemCalls


class Call(enum.Enum):
    """The kinds of calls, counted apart."""

    READ = "read"
    WRITE = "write"
    SYNC = "sync"
    ALLOCATE = "allocate"


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
        """Replace the script. Numbers go on counting from the first call ever made."""
        with self._lock:
            self._faults = list(faults)

    def release(self) -> None:
        """Let every hanging call, and all that would hang later, go on."""
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

    def _strike(self, call: Call, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """Count the call and suffer its faults; returns the buffers that still move."""
        with self._lock:
            self._counts[call] += 1
            faults = [fault for fault in self._faults if fault.strikes(call, self._counts[call])]
        for fault in faults:
            if fault.effect is Effect.ERROR:
                raise OSError(int(fault.value), "injected")
            if fault.effect is Effect.DELAY:
                time.sleep(fault.value)
            elif fault.effect is Effect.HANG:
                self._released.wait()
            else:
                buffers = _first(buffers, int(fault.value))
        return buffers


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
        if limit > 0:
            kept.append(buffer[:limit])
            limit -= min(limit, buffer.nbytes)
    return kept
