"""The step loop: one thread that runs scheduler, runner and store in turn.

MIND and BODY meet here, through the scheduled plan. `add`, `cancel`, `drain` and `close` may be called from any thread;
all else runs on the engine thread, and events leave through the outbox. A bug on the engine thread fails every request
with an error, and the loop refuses new ones from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from kvtier.bell import Bell
from kvtier.block import Tier
from kvtier.cost import Work
from kvtier.drains import Drain, Drains
from kvtier.errors import Unavailable
from kvtier.metrics import Metrics
from kvtier.models.decoder import NonFiniteError
from kvtier.outbox import Outbox
from kvtier.own_process import OwnProcess
from kvtier.request import FinishReason, TokenEvent
from kvtier.runner import Runner
from kvtier.scheduler import Scheduler
from kvtier.sequence import ScheduledSequence, Sequence, SequenceState
from kvtier.session import session_of
from kvtier.store import Store
from kvtier.turns import StreamedTurns

_log = logging.getLogger(__name__)

PUBLISH_S = 0.1
IDLE_S = 5.0
WAIT_S = 1.0
"""Longest sleeps of the loop with nothing at all, and with something under way, in case a wake is lost."""


class EngineLoop:
    """The engine thread and the queues that lead to it."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        runner: Runner,
        outbox: Outbox,
        bell: Bell,
        metrics: Metrics,
        turns: StreamedTurns | None = None,
    ) -> None:
        """`turns`: of sequences that stream from NVMe, if there can be any."""
        self._store = store
        self._scheduler = scheduler
        self._runner = runner
        self._outbox = outbox
        self._bell = bell
        self._metrics = metrics
        self._turns = turns
        self.process = OwnProcess()
        """Where the engine thread is."""
        self._lock = threading.Lock()
        self._inbox: deque[Sequence] = deque()
        self._cancels: deque[int] = deque()
        self._drains = Drains(store)
        self._live: dict[int, Sequence] = {}
        self._closing = False
        self._failed = False
        self._published_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)

    # ---- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        self._metrics.engine_up.set(1)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Requests are taken."""
        return self.process.is_here and not (self._failed or self._closing)

    @property
    def failed(self) -> bool:
        """A bug has ended the engine thread: its books are not to be trusted."""
        return self._failed

    def refuse_if_down(self) -> None:
        """Raise Unavailable if requests are not taken."""
        self.process.refuse_elsewhere()
        if self._failed:
            raise Unavailable("the engine has failed and waits to be reloaded")
        if self._closing:
            raise Unavailable("the engine is shutting down")

    def add(self, sequence: Sequence, live_max: int) -> None:
        """Queue a sequence. Raises Unavailable if `live_max` are queued or running already, or the loop is down."""
        with self._lock:
            self.refuse_if_down()
            if len(self._live) >= live_max:
                raise Unavailable(
                    f"scheduler.queue_max + scheduler.sequences_max: {live_max} requests wait or run; try again later"
                )
            self._live[sequence.number] = sequence
            self._inbox.append(sequence)
        self._bell.ring()

    def cancel(self, number: int) -> None:
        """End a request after the pass in flight; unknown or finished ones are passed over, in a forked child all."""
        if not self.process.is_here:
            return
        self._cancels.append(number)
        self._bell.ring()

    def drain(self, tier: Tier) -> Drain:
        """Ask for everything that nobody holds in `tier` to be pushed one tier down. Raises Unavailable if down."""
        self.process.refuse_elsewhere()
        with self._lock:
            self.refuse_if_down()
            drain = self._drains.add(tier)
        self._bell.ring()
        return drain

    def close(self, deadline_s: float) -> bool:
        """Cancel everything and end the thread; True if it has ended within the deadline.

        If it has not, every request still running is failed from here: a final event comes in any case.
        """
        with self._lock:
            self._closing = True
        self._bell.ring()
        self._thread.join(deadline_s)
        self._metrics.engine_up.set(0)
        if not self._thread.is_alive():
            return True
        error = Unavailable("the engine is shutting down and could not end this request in time")
        for sequence in list(self._live.values()):
            self._send(sequence, TokenEvent("", (), FinishReason.ERROR, None, error))
        return False

    # ---- engine thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and not self._live):
                self._step()
        except Exception as error:  # a bug: this is the one place of the engine where it is caught
            _log.exception("the engine has failed; it answers UNAVAILABLE until it is reloaded")
            with self._lock:
                self._failed = True
            self._metrics.engine_up.set(0)
            for sequence in list(self._live.values()):
                self._metrics.requests.add(1, FinishReason.ERROR.value)
                self._metrics.request_failures.add(1, "internal")
                self._send(sequence, TokenEvent("", (), FinishReason.ERROR, None, error))
        finally:
            self._drains.end()

    def _step(self) -> None:
        """One turn: intake, poll, schedule, pass (build, forward, sample, commit, emit), streamed layers, balance."""
        self._take_in()
        now = time.monotonic()
        self._store.poll(now)
        plan = self._scheduler.schedule(now)
        if given_up := self._scheduler.take_stalled():
            for sequence, why in given_up:
                self._fail(sequence, Unavailable(why))
            plan = [part for part in plan if part.sequence.state is not SequenceState.FINISHED]
        if plan:
            self._pass(plan)
            if self._turns is not None:
                work = Work.of((part.start, part.count) for part in plan)
                self._turns.note_step(work, now, time.monotonic())
        moved = self._stream(time.monotonic(), alone=not plan) if self._turns is not None else False
        self._drains.work_off(now, self._closing)
        self._publish(now, idle=not plan and (self._turns is None or self._turns.deadline is None))
        if not (plan or moved or given_up):
            self._sleep(now)

    def _take_in(self) -> None:
        # looked at before the inbox is: whatever these end has been added by then
        closing, cancels = self._closing, [self._cancels.popleft() for _ in range(len(self._cancels))]
        while self._inbox:
            self._scheduler.add(self._inbox.popleft())
        for number in cancels:
            sequence = self._live.get(number)
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED, "")
        if closing:
            for sequence in list(self._live.values()):
                self._end(sequence, FinishReason.CANCELLED, "")

    def _pass(self, plan: list[ScheduledSequence]) -> None:
        started_at = time.monotonic()
        try:
            tokens = self._runner.run(plan)
        except NonFiniteError as error:
            self._fail_overflowed(plan, error)
        else:
            now = time.monotonic()
            self._learn(plan, now - started_at)
            self._commit(plan, tokens, now)

    def _stream(self, now: float, alone: bool) -> bool:
        """Give streamed sequences their turn; whether anything has moved."""
        assert self._turns is not None
        ended = self._turns.turn(now, alone)
        if ended is not None and ended.error is not None:
            self._fail_overflowed([ended.part], ended.error)
        elif ended is not None:
            self._learn([ended.part], ended.busy_s)
            self._commit([ended.part], ended.tokens, time.monotonic())
        return self._turns.moved

    def _learn(self, plan: list[ScheduledSequence], seconds: float) -> None:
        if any(part.count > 1 for part in plan):
            self._store.costs.learn_pass(Work.of((part.start, part.count) for part in plan), seconds)

    def _commit(self, plan: list[ScheduledSequence], tokens: list[int], now: float) -> None:
        sampled = iter(tokens)
        for part in plan:
            token = next(sampled) if part.samples else None
            reason = self._scheduler.commit(part, token, now)
            if token is None:
                continue
            session = session_of(part.sequence)
            text, reason = session.take(token, reason, now)
            self._metrics.generated_tokens.add(1)
            if session.gap_s is None:
                self._metrics.ttft_seconds.observe(now - session.submitted_at)
            else:
                self._metrics.tpot_seconds.observe(session.gap_s)
            if reason is None:
                self._send(part.sequence, TokenEvent(text, (token,)))
            else:
                self._end(part.sequence, reason, text, (token,))

    def _end(self, sequence: Sequence, reason: FinishReason, text: str, token_ids: tuple[int, ...] = ()) -> None:
        self._finish(sequence, reason)
        usage = session_of(sequence).usage(sequence)
        for origin, count in usage.origin.as_dict().items():
            self._metrics.prompt_tokens.add(count, origin)
        self._metrics.requests.add(1, reason.value)
        self._send(sequence, TokenEvent(text, token_ids, reason, usage))

    def _fail(self, sequence: Sequence, error: Unavailable | NonFiniteError) -> None:
        self._finish(sequence, FinishReason.ERROR)
        self._metrics.requests.add(1, FinishReason.ERROR.value)
        self._metrics.request_failures.add(1, "unavailable" if isinstance(error, Unavailable) else "internal")
        self._send(sequence, TokenEvent("", (), FinishReason.ERROR, None, error))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if self._turns is not None:
            self._turns.abandon(sequence)
        self._scheduler.finish(sequence, reason, time.monotonic())

    def _fail_overflowed(self, plan: list[ScheduledSequence], error: NonFiniteError) -> None:
        """End the sequences whose tokens overflowed; nothing was committed, so the others run their part again."""
        end = 0
        for part in plan:
            begin, end = end, end + part.count
            own = tuple(part.start + token - begin for token in error.tokens if begin <= token < end)
            if own:
                self._fail(part.sequence, NonFiniteError(own, error.dtype))

    def _send(self, sequence: Sequence, event: TokenEvent) -> None:
        """Post an event of a live sequence; a final one ends its life, so nothing can follow. Also from `close`."""
        with self._lock:
            if sequence.number in self._live:
                if event.finish_reason is not None:
                    del self._live[sequence.number]
                self._outbox.post(sequence.number, session_of(sequence).mailbox, event)

    def _publish(self, now: float, idle: bool) -> None:
        if idle or now - self._published_at >= PUBLISH_S:
            self._published_at = now
            metrics = self._metrics
            metrics.queued_requests.set(self._scheduler.waiting_count)
            metrics.running_requests.set(self._scheduler.running_count)
            metrics.streamed_requests.set(self._scheduler.streamed_count)
            metrics.preemptions.add(self._scheduler.preemption_count - metrics.preemptions.value())
            self._store.publish_metrics()

    def _sleep(self, now: float) -> None:
        """Nothing can run: wait for a request, a completion or a deadline."""
        if self._closing and not self._live:
            return  # this step has ended the last request, and nobody rings for that
        if not (self._live or self._drains or self._store.busy):
            self._bell.wait(max(0.0, min(self._store.retry_at - now, IDLE_S)))
            return
        deadlines = [self._scheduler.next_deadline(), self._turns.deadline if self._turns is not None else None]
        deadline = min((deadline for deadline in deadlines if deadline is not None), default=now + WAIT_S)
        self._bell.wait(max(0.0, min(deadline - now, WAIT_S)))
