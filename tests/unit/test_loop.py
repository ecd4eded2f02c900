"""The loop's queues and its bell: no lost wakes, drains that always end, and requests that arrive while it closes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import LAYOUT, FakeModel, SteppedTiers, chain_hashes, make_sequence

from kvtier.bell import Bell
from kvtier.block import Tier
from kvtier.demotion import NvmePolicy
from kvtier.errors import Unavailable
from kvtier.io.base import Operation
from kvtier.loop import EngineLoop
from kvtier.models.config import GenerationDefaults
from kvtier.outbox import Mailbox, Outbox
from kvtier.request import FinishReason, SamplingParams, TokenEvent
from kvtier.sampler import SamplerState, resolve
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.sequence import ScheduledSequence, Sequence
from kvtier.session import Session
from kvtier.tokens import TextStream
from tests.own_time import own_time

BLOCK = LAYOUT.block_tokens


class Setup:
    """An engine loop over stepped tiers and the fake model, with real threads for the loop and its senders."""

    def __init__(self, folder: Path, dram: int = 0, nvme: int = 0, policy: NvmePolicy = NvmePolicy.THROUGH) -> None:
        self.tiers = SteppedTiers(folder, 16, dram, nvme, policy)
        self.bell = Bell()
        self.model = FakeModel()
        self.outbox = Outbox(1)
        scheduler = Scheduler(self.tiers.store, SchedulerLimits(64, 4))
        metrics = self.tiers.metrics
        self.loop = EngineLoop(self.tiers.store, scheduler, self.model, self.outbox, self.bell, metrics)  # type: ignore[arg-type]
        self.events: dict[int, list[TokenEvent]] = {}
        self.finals = threading.Semaphore(0)

    def sequence(self, number: int, output_max: int = 5) -> Sequence:
        sequence = make_sequence(number, [number] * 10, output_max)
        events = self.events[number] = []

        def sink(event: TokenEvent) -> None:
            events.append(event)
            if event.finish_reason is not None:
                self.finals.release()

        state = SamplerState([], resolve(SamplingParams(), GenerationDefaults()), 300)
        mailbox = Mailbox(sink, lambda: self.loop.cancel(number))
        sequence.context = Session(mailbox, state, TextStream(None), time.monotonic())
        return sequence

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.finals.acquire(timeout=60), "a request has no final event"

    def close(self) -> None:
        assert self.loop.close(60.0)
        self.outbox.close(60.0)


def test_a_bell_rung_before_the_wait_ends_it_at_once_and_only_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    started = time.monotonic()
    with own_time() as clock:
        bell.wait(60.0)
        assert clock.seconds < 5
    bell.wait(0.01)
    assert time.monotonic() - started >= 0.01


def test_a_bell_rung_during_the_wait_ends_it() -> None:
    bell = Bell()
    thread = threading.Timer(0.02, bell.ring)
    thread.start()
    with own_time() as clock:
        bell.wait(60.0)
        assert clock.seconds < 15
    thread.join()


def test_requests_from_many_threads_all_end_with_their_own_tokens(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.loop.start()

    def work(first: int) -> None:
        for number in range(first, first + 10):
            setup.loop.add(setup.sequence(number), live_max=100)

    threads = [threading.Thread(target=work, args=(10 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    setup.wait(40)
    for number, events in setup.events.items():
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == setup.model.expected([number] * 10, 5)
        assert events[-1].finish_reason is FinishReason.LENGTH
    setup.close()


def test_what_arrives_before_the_close_ends_and_what_arrives_after_is_refused(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.loop.start()
    refused = 0
    closer = threading.Timer(0.01, setup.loop.close, args=(60.0,))
    closer.start()
    number, end = 0, time.monotonic() + 60
    while refused < 3:
        assert time.monotonic() < end, "it never closes"
        if len(setup.loop._live) >= 5000:
            time.sleep(0.001)
            continue
        try:
            setup.loop.add(setup.sequence(number), live_max=10_000)
            number += 1
        except Unavailable:
            refused += 1
    closer.join()
    setup.wait(number)
    setup.close()
    finals = [event for events in setup.events.values() for event in events if event.finish_reason is not None]
    assert refused == 3 and len(finals) == number


class LateInbox(deque[Sequence]):
    """Calls `late` on the engine thread when that has just seen that nothing is in it, once."""

    def __init__(self, late: Callable[[], None]) -> None:
        super().__init__()
        self._late: Callable[[], None] | None = late

    def __len__(self) -> int:
        count = super().__len__()
        if count == 0 and self._late is not None:
            late, self._late = self._late, None
            late()
        return count


@pytest.mark.parametrize("closing", [False, True])
def test_a_request_that_comes_and_goes_while_others_are_taken_in_does_no_harm(closing: bool, tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    closer = threading.Thread(target=setup.loop.close, args=(60.0,))

    def come_and_go() -> None:
        setup.loop.add(setup.sequence(1), 10)
        if closing:
            closer.start()
            while setup.loop.healthy:
                time.sleep(0.0005)
        else:
            setup.loop.cancel(1)

    setup.loop._inbox = LateInbox(come_and_go)
    setup.loop.start()
    setup.wait(1)
    assert setup.events[1][-1].finish_reason is FinishReason.CANCELLED
    if closing:
        closer.join()
    setup.close()
    assert not setup.loop.failed


def test_a_full_house_refuses(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for number in range(2):
        setup.loop.add(setup.sequence(number), live_max=2)
    with pytest.raises(Unavailable, match=r"scheduler\.queue_max \+ scheduler\.sequences_max: 2 requests"):
        setup.loop.add(setup.sequence(2), live_max=2)
    setup.loop.start()
    setup.wait(2)
    setup.close()


def test_unknown_numbers_are_cancelled_without_harm(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.loop.start()
    setup.loop.cancel(77)
    setup.loop.add(setup.sequence(0), live_max=5)
    setup.wait(1)
    setup.loop.cancel(0)
    setup.loop.add(setup.sequence(1), live_max=5)
    setup.wait(1)
    setup.close()


def test_a_drain_ends_though_a_write_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.drains.DRAIN_S", 0.1)
    monkeypatch.setattr("kvtier.loop.WAIT_S", 0.05)
    setup = Setup(tmp_path, dram=16)
    setup.tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    setup.tiers.store.release(setup.tiers.compute(chain_hashes(range(3 * BLOCK))))
    setup.loop.start()
    assert setup.loop.drain(Tier.HBM).done.wait(60)
    setup.close()


def test_closing_ends_a_drain_that_waits(tmp_path: Path) -> None:
    setup = Setup(tmp_path, dram=16)
    setup.tiers.io[Tier.DRAM].hanging = {Operation.WRITE}
    setup.tiers.store.release(setup.tiers.compute(chain_hashes(range(3 * BLOCK))))
    setup.loop.start()
    drain = setup.loop.drain(Tier.HBM)
    assert not drain.done.wait(0.05)
    setup.close()
    assert drain.done.is_set()
    with pytest.raises(Unavailable):
        setup.loop.drain(Tier.HBM)


def test_closing_ends_the_thread_though_it_slept_over_a_request_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IDLE_S", "WAIT_S"):
        monkeypatch.setattr(f"kvtier.loop.{name}", 600.0)
    setup, asleep = Setup(tmp_path), threading.Event()
    inner = setup.bell.wait

    def wait(timeout_s: float) -> None:
        if setup.loop._live:
            asleep.set()
        inner(timeout_s)

    monkeypatch.setattr(setup.bell, "wait", wait)
    monkeypatch.setattr(setup.loop._scheduler, "schedule", lambda _now: [])  # it waits for something
    setup.loop.start()
    setup.loop.add(setup.sequence(1), 10)
    assert asleep.wait(60)
    assert setup.loop.close(60), "the engine thread sleeps on"
    setup.outbox.close(60)
    assert setup.events[1][-1].finish_reason is FinishReason.CANCELLED


def test_gauges_follow_and_the_engine_is_up_only_while_it_takes_requests(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    metrics = setup.tiers.metrics
    assert metrics.engine_up.value() == 0
    setup.loop.start()
    assert metrics.engine_up.value() == 1 and setup.loop.healthy
    setup.loop.add(setup.sequence(0), live_max=5)
    setup.wait(1)
    setup.close()
    assert metrics.engine_up.value() == 0 and not setup.loop.healthy
    assert metrics.ttft_seconds.count() == 1 and metrics.tpot_seconds.count() == 4
    assert metrics.generated_tokens.value() == 5 and metrics.requests.value("length") == 1
    assert sum(metrics.prompt_tokens.value(origin) for origin in ("hbm", "dram", "nvme", "computed")) == 10


def test_a_sequence_that_is_given_up_when_it_has_been_planned_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tmp_path)
    for number in range(2):
        setup.loop.add(setup.sequence(number), live_max=2)
    scheduler, given_up = setup.loop._scheduler, list[tuple[Sequence, str]]()

    def take_stalled() -> list[tuple[Sequence, str]]:
        found = [(one, "lost again") for one in scheduler.sequences if one.number == 0 and not given_up]
        given_up.extend(found)
        return found

    monkeypatch.setattr(scheduler, "take_stalled", take_stalled)
    setup.loop.start()
    setup.wait(2)
    assert setup.loop.healthy, "its table was built"
    setup.close()
    assert [event.finish_reason for event in setup.events[0]] == [FinishReason.ERROR]
    assert setup.events[1][-1].finish_reason is FinishReason.LENGTH and len(given_up) == 1


def test_what_is_given_up_is_there_for_who_waits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.loop.WAIT_S", 3600.0)
    setup = Setup(tmp_path)
    for number in range(5):
        setup.loop.add(setup.sequence(number), live_max=5)
    setup.bell.wait(0.0)  # nobody rings from now on
    scheduler, given_up = setup.loop._scheduler, list[tuple[Sequence, str]]()

    def take_stalled() -> list[tuple[Sequence, str]]:
        found = [(one, "lost again") for one in scheduler.sequences if one.number < 4 and not given_up]
        given_up.extend(found)
        return found

    monkeypatch.setattr(scheduler, "take_stalled", take_stalled)
    setup.loop.start()
    setup.wait(5)
    setup.close()
    assert len(given_up) == 4 and setup.events[4][-1].finish_reason is FinishReason.LENGTH


class ShutModel(FakeModel):
    """A model whose passes wait until they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let = threading.Event(), threading.Event()

    def run(self, parts: list[ScheduledSequence]) -> list[int]:  # type: ignore[override]
        self.entered.set()
        assert self.let.wait(60)
        return super().run(parts)


def test_a_close_that_times_out_in_a_pass_still_sends_every_final_event_and_nothing_after_it(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    model = ShutModel()
    setup.loop._runner = model  # type: ignore[assignment]
    for number in range(6):
        setup.loop.add(setup.sequence(number), live_max=10)
    setup.loop.start()
    assert model.entered.wait(60)
    with own_time() as clock:
        assert not setup.loop.close(0.1)
        assert clock.seconds < 5
    setup.wait(6)
    for events in setup.events.values():
        assert [event.finish_reason for event in events] == [FinishReason.ERROR]
        assert isinstance(events[0].error, Unavailable)
    model.let.set()
    setup.close()  # the thread ends by itself now, and finds nothing to send
    assert [len(events) for events in setup.events.values()] == [1] * 6 and not setup.loop._live


def test_a_drain_starts_its_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.loop.WAIT_S", 600.0)
    monkeypatch.setattr("kvtier.loop.IDLE_S", 600.0)
    setup = Setup(tmp_path, dram=16, nvme=16, policy=NvmePolicy.SELECTIVE)
    setup.tiers.store.release(setup.tiers.compute(chain_hashes(range(3 * BLOCK))))
    setup.tiers.settle(0.0)
    setup.loop.start()
    drain = setup.loop.drain(Tier.DRAM)
    end = time.monotonic() + 60
    while setup.tiers.io[Tier.NVME].in_flight < 3:
        assert time.monotonic() < end, "the writes wait for the next time the loop wakes by itself"
        time.sleep(0.002)
    setup.tiers.step()
    setup.bell.ring()
    assert drain.done.wait(60)
    setup.close()


def test_writes_that_a_shelf_has_refused_are_tried_again_though_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.loop.IDLE_S", 600.0)
    setup = Setup(tmp_path, dram=4)
    dram = setup.tiers.shelves[Tier.DRAM]
    dram.holdings.ask_rows(4, bytes(16))
    [reply] = dram.holdings.replies()
    assert reply.grants is not None
    monkeypatch.setattr(setup.tiers.store.hand_down, "check", lambda: None)
    setup.tiers.store.release(setup.tiers.compute(chain_hashes(range(3 * BLOCK))))
    setup.loop.start()
    end = time.monotonic() + 60
    while setup.tiers.store._demoter.retry_at == 0.0:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert setup.tiers.io[Tier.DRAM].in_flight == 0
    dram.holdings.give_rows(reply.grants)  # nobody rings
    while setup.tiers.io[Tier.DRAM].in_flight < 3:
        assert time.monotonic() < end, "the writes wait for the next request"
        time.sleep(0.002)
    setup.tiers.step()
    setup.close()
