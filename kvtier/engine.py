"""The engine: one thread that runs the step loop over scheduler, runner and store, and the Python API around it.

MIND and BODY meet here. `submit` may be called from any thread; everything else happens on the engine thread, and events
leave through the outbox. A bug on the engine thread fails every request and makes the engine answer UNAVAILABLE.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

from kvtier.assembly import Parts, assemble
from kvtier.block import Tier
from kvtier.config import EngineConfig
from kvtier.errors import RequestError, Unavailable
from kvtier.intake import Intake
from kvtier.metrics import Metrics
from kvtier.outbox import Outbox, Sink
from kvtier.request import Completion, FinishReason, Request, SamplingParams, TokenEvent
from kvtier.runner import Runner
from kvtier.sampler import SampleRow
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.sequence import ScheduledSequence, Sequence
from kvtier.session import RequestHandle, Session, failure

_log = logging.getLogger(__name__)

PUBLISH_S = 0.1
DRAIN_S = 60.0
"""How long `evict` tries to copy before it lets go without a copy."""


@dataclass(eq=False, slots=True)
class _Drain:
    tier: Tier
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)


class Engine:
    """A model with its KV cache over three tiers. Use as a context manager, or call `close`."""

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the model, allocate the tiers and start. `progress(done_bytes, total_bytes)` follows the weights.

        Raises ConfigError (a key does not fit this machine) or CheckpointError (the model folder).
        """
        self.config = config
        self.metrics = Metrics()
        self._condition = threading.Condition()
        self._signalled = False
        self._inbox: deque[Sequence] = deque()
        self._cancels: deque[int] = deque()
        self._drains: deque[_Drain] = deque()
        self._closing = False
        self._failure: BaseException | None = None
        self._live: dict[int, Sequence] = {}
        self._published_at = 0.0
        parts: Parts = assemble(config, self.metrics, self._wake, progress)
        self.tokenizer = parts.tokenizer
        self.model_config = parts.decoder.config
        self._store = parts.store
        self._runner = Runner(parts.decoder, _sample_row)
        limits = SchedulerLimits(config.scheduler.step_tokens, config.scheduler.sequences_max)
        self._scheduler = Scheduler(parts.store, limits)
        self._intake = Intake(parts, config)
        self._outbox = Outbox(config.senders)
        self._thread = threading.Thread(target=self._run, name="kvtier-engine", daemon=True)
        self.metrics.engine_up.set(1)
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """The engine takes requests."""
        return self._failure is None and not self._closing

    def submit(self, request: Request, sink: Sink) -> RequestHandle:
        """Queue a request; `sink` gets its events from a sender thread, in order, the last with `finish_reason`.

        Raises InvalidRequest (the request can never run here) or Unavailable (queue full, closing, failed) at once.
        """
        try:
            self._refuse_if_down()
            sequence = self._intake.admit(request, sink, self._cancel)
        except RequestError as error:
            self.metrics.request_failures.add(1, "unavailable" if isinstance(error, Unavailable) else "invalid")
            raise
        with self._condition:
            self._refuse_if_down()
            if len(self._live) >= self.config.scheduler.queue_max + self.config.scheduler.sequences_max:
                self.metrics.request_failures.add(1, "unavailable")
                raise Unavailable(f"queue: {self.config.scheduler.queue_max} requests wait already; try again later")
            self._live[sequence.number] = sequence
            self._inbox.append(sequence)
        self._wake()
        return RequestHandle(sequence.number, self._cancel)

    def stream(
        self, prompt: str | list[int] | list[dict[str, object]], params: SamplingParams | None = None, **options: object
    ) -> Iterator[TokenEvent]:
        """Events of one request as they come. Closing the iterator early cancels the request.

        `options`: the other fields of `Request` (priority, cache_salt). Raises what `submit` raises.
        """
        request = Request(prompt, params or SamplingParams(), **options)  # type: ignore[arg-type]
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        handle = self.submit(request, events.put)
        return _events(handle, events)

    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[str | list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete all prompts, batched; returns in their order. Raises the first error of any of them."""
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params: as many as prompts are needed, got {len(each)} for {len(prompts)}")
        streams = [self.stream(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        try:
            return [_collect(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]

    def evict(self, tier: str) -> None:
        """Push what nobody holds in "hbm" or "dram" one tier down, and wait until that is done."""
        if tier not in (Tier.HBM.value, Tier.DRAM.value):
            raise ValueError(f'tier: must be "hbm" or "dram", got {tier!r}')
        drain = _Drain(Tier(tier), time.monotonic() + DRAIN_S)
        with self._condition:
            self._refuse_if_down()
            self._drains.append(drain)
        self._wake()
        drain.done.wait()

    def stats(self) -> dict[str, int | float]:
        """Plain numbers: queues, blocks and bytes by tier, transfers, evictions, failures."""
        return {
            "running": self._scheduler.running_count,
            "waiting": self._scheduler.waiting_count,
            "preemptions": self._scheduler.preemption_count,
            **self._store.stats(),
            **{f"promoted_{s}_{t}": int(self.metrics.promoted_blocks.value(s, t)) for s, t in PROMOTION_PAIRS},
            **{f"demoted_{s}_{t}": int(self.metrics.demoted_blocks.value(s, t)) for s, t in DEMOTION_PAIRS},
        }

    def close(self, deadline_s: float = 10.0) -> None:
        """Cancel what runs, let transfers end, close the shelves. Bounded by about `deadline_s`; may be repeated."""
        with self._condition:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join(deadline_s)
        self._outbox.close(deadline_s)
        self.metrics.engine_up.set(0)
        if not self._thread.is_alive():
            self._store.close(deadline_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_if_down(self) -> None:
        if self._failure is not None:
            raise Unavailable("the engine has failed and waits to be reloaded")
        if self._closing:
            raise Unavailable("the engine is shutting down")

    def _cancel(self, number: int) -> None:
        self._cancels.append(number)
        self._wake()

    def _wake(self) -> None:
        with self._condition:
            self._signalled = True
            self._condition.notify()

    # ---- engine thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and not self._live):
                self._step()
        except BaseException as error:  # a bug: the one border where it is caught
            _log.exception("the engine has failed; it answers UNAVAILABLE until it is reloaded")
            self._failure = error
            self.metrics.engine_up.set(0)
            for sequence in list(self._live.values()):
                self.metrics.request_failures.add(1, "internal")
                self._finish_with(sequence, failure(error if isinstance(error, Exception) else RuntimeError(str(error))))
        finally:
            for drain in self._drains:
                drain.done.set()

    def _step(self) -> None:
        """One turn of the loop; see DESIGN.md section 5."""
        self._take_in()
        now = time.monotonic()
        self._store.poll(now)
        plan = self._scheduler.schedule(now)
        self._give_up_stalled()
        if plan:
            tokens = self._runner.run(plan)
            self._commit(plan, tokens, time.monotonic())
        self._drain(now)
        self._publish(now, idle=not plan)
        if not plan:
            self._sleep(now)

    def _take_in(self) -> None:
        while self._inbox:
            self._scheduler.add(self._inbox.popleft())
        while self._cancels:
            sequence = self._live.get(self._cancels.popleft())
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED, "")
        if self._closing:
            for sequence in list(self._live.values()):
                self._end(sequence, FinishReason.CANCELLED, "")

    def _commit(self, plan: list[ScheduledSequence], tokens: list[int], now: float) -> None:
        sampled = iter(tokens)
        for part in plan:
            token = next(sampled) if part.samples else None
            reason = self._scheduler.commit(part, token, now)
            if token is None:
                continue
            session = _session(part.sequence)
            first, previous = session.first_token_at is None, session.last_token_at
            text, reason = session.token(token, reason, now)
            self.metrics.generated_tokens.add(1)
            if first:
                self.metrics.ttft_seconds.observe(now - session.submitted_at)
            elif previous is not None:
                self.metrics.tpot_seconds.observe(now - previous)
            if reason is None:
                self._outbox.post(part.sequence.number, session.mailbox, TokenEvent(text, (token,)))
            else:
                self._end(part.sequence, reason, text, (token,))

    def _end(self, sequence: Sequence, reason: FinishReason, text: str, token_ids: tuple[int, ...] = ()) -> None:
        session = _session(sequence)
        self._scheduler.finish(sequence, reason)
        usage = session.usage(sequence)
        for origin, count in usage.origin.as_dict().items():
            self.metrics.prompt_tokens.add(count, origin)
        self.metrics.requests.add(1, reason.value)
        self._finish_with(sequence, TokenEvent(text, token_ids, reason, usage))

    def _finish_with(self, sequence: Sequence, event: TokenEvent) -> None:
        with self._condition:
            self._live.pop(sequence.number, None)
        self._outbox.post(sequence.number, _session(sequence).mailbox, event)

    def _give_up_stalled(self) -> None:
        for sequence in self._scheduler.take_stalled():
            self._scheduler.finish(sequence, FinishReason.ERROR)
            self.metrics.requests.add(1, FinishReason.ERROR.value)
            self.metrics.request_failures.add(1, "unavailable")
            self._finish_with(sequence, failure(Unavailable("HBM is held by transfers that do not end; try again later")))

    def _drain(self, now: float) -> None:
        while self._drains:
            drain = self._drains[0]
            if not self._store.drain(drain.tier, give_up=now > drain.deadline or self._closing):
                return
            self._drains.popleft()
            drain.done.set()

    def _publish(self, now: float, idle: bool) -> None:
        if idle or now - self._published_at >= PUBLISH_S:
            self._published_at = now
            self.metrics.queued_requests.set(self._scheduler.waiting_count)
            self.metrics.running_requests.set(self._scheduler.running_count)
            preempted = self._scheduler.preemption_count - self.metrics.preemptions.value()
            if preempted:
                self.metrics.preemptions.add(preempted)
            self._store.publish_metrics()

    def _sleep(self, now: float) -> None:
        """Nothing can run: wait for a request, a completion or a deadline."""
        deadline = self._scheduler.next_deadline()
        waiting = bool(self._live or self._drains or self._store.busy)
        timeout = max(0.0, min(deadline - now if deadline is not None else 1.0, 1.0)) if waiting else 5.0
        with self._condition:
            if not self._signalled:
                self._condition.wait(timeout)
            self._signalled = False


PROMOTION_PAIRS = (("dram", "hbm"), ("nvme", "hbm"))
DEMOTION_PAIRS = (("hbm", "dram"), ("hbm", "nvme"), ("dram", "nvme"))


def _session(sequence: Sequence) -> Session:
    assert isinstance(sequence.context, Session)
    return sequence.context


def _sample_row(sequence: Sequence) -> SampleRow:
    return SampleRow(_session(sequence).sampler_state, sequence.output_count)


def _events(handle: RequestHandle, events: queue.SimpleQueue[TokenEvent]) -> Iterator[TokenEvent]:
    finished = False
    try:
        while not finished:
            event = events.get()
            finished = event.finish_reason is not None
            if event.error is not None:
                raise event.error
            yield event
    finally:
        if not finished:
            handle.cancel()


def _collect(stream: Iterator[TokenEvent]) -> Completion:
    text, token_ids = [], []
    for event in stream:
        text.append(event.text)
        token_ids.extend(event.token_ids)
    assert event.finish_reason is not None and event.usage is not None
    return Completion(
        text="".join(text),
        token_ids=token_ids,
        finish_reason=event.finish_reason.value,
        prompt_token_count=event.usage.prompt_token_count,
        origin=event.usage.origin.as_dict(),
        ttft_s=event.usage.ttft_s,
        usage=event.usage,
    )
