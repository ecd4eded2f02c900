"""A watch tells once that files are not what they were, and ends when it is told to, even if a look hangs."""

from __future__ import annotations

import threading

import pytest

from kvtier.file_watch import FileWatch


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.file_watch.WATCH_S", 0.001)


def test_it_looks_again_and_again_and_tells_of_a_loss_once() -> None:
    answers, woken = [True, True, False], threading.Event()
    watch = FileWatch(lambda: answers.pop(0), woken.set)
    assert woken.wait(60) and watch.gone and answers == []
    assert watch.close(60.0)


def test_it_ends_without_a_word_while_all_is_well() -> None:
    looked, woken = threading.Event(), threading.Event()

    def is_well() -> bool:
        looked.set()
        return True

    watch = FileWatch(is_well, woken.set)
    assert looked.wait(60) and watch.close(60.0)
    assert not watch.gone and not woken.is_set()


def test_a_look_that_hangs_holds_up_nobody() -> None:
    looking, let = threading.Event(), threading.Event()

    def is_well() -> bool:
        looking.set()
        return let.wait(60)

    watch = FileWatch(is_well, lambda: None)
    assert looking.wait(60) and not watch.close(0.01) and not watch.gone
    let.set()
