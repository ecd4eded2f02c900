"""The read that bounds the kernels: it reads every word, whatever the length and the threads."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.machine import MemoryRead

_native = pytest.importorskip("kvtier._native")
WORDS = 3 * 8 * 4096 // 8 + 5000
CHANCE = np.random.default_rng(5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_word_is_read_once(threads: int) -> None:
    kernels = _native.Kernels(threads)
    words = CHANCE.integers(0, 1 << 63, WORDS, dtype=np.uint64)
    for count in (0, 1, 7, 511, 4096, 8 * 512, 8 * 512 + 3, WORDS):
        total = int(words[:count].sum(dtype=np.uint64))
        assert kernels.read(words.ctypes.data, 8 * count) == total, count
        assert kernels.read(words.ctypes.data, 8 * count + 7 * (count < WORDS)) == total, "a part of a word is none"


def test_all_memory_of_a_read_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, found = MemoryRead(2, 1 << 20), list[int]()
    inner = read._kernels
    assert inner is not None

    class Watched:
        def read(self, memory: int, size_bytes: int) -> None:
            found.append(inner.read(memory, size_bytes))

    monkeypatch.setattr(read, "_kernels", Watched())
    read()
    one = int(np.ones(2, np.float32).view(np.uint64)[0])
    assert found == [(one * (1 << 17)) % (1 << 64)]
