"""The engine's Python API: submit, stream, generate, evict, stats, close.

Owns the assembling and the closing of the parts; the work is done by the step loop on its own thread. Every method may
be called from any thread, but not in a forked child: there all but `close` raise Unavailable. The Triton server's
model.py, the command line and programs all come in here.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypedDict

from typing_extensions import Unpack

from kvtier.assembly import UNDO_S, assemble
from kvtier.bell import Bell
from kvtier.block import Tier
from kvtier.config import EngineConfig
from kvtier.device import Device, make_device
from kvtier.drains import DRAIN_S
from kvtier.errors import RequestError, Unavailable
from kvtier.intake import Intake
from kvtier.loop import EngineLoop
from kvtier.metrics import DEMOTIONS, LOAD_DECISIONS, PROMOTIONS, SHELVES, Metrics
from kvtier.outbox import Outbox, Sink
from kvtier.own_process import OwnProcess
from kvtier.process_limits import shortage_as_config_error
from kvtier.request import Completion, Request, SamplingParams, TokenEvent
from kvtier.runner import Runner
from kvtier.scheduler import Scheduler, SchedulerLimits
from kvtier.session import RequestHandle, sample_row
from kvtier.turns import StreamedTurns

BESIDE_TOKENS_CPU = 256
"""`scheduler.beside_tokens` of a CPU: half of the default step, for up to 3 % more of its time a prompt token."""
Prompt = str | list[int] | list[dict[str, object]]
"""Text, token ids, or chat messages."""


class RequestOptions(TypedDict, total=False):
    """Fields of `Request` besides prompt and params."""

    priority: int
    cache_salt: str
    cache_tenant: str
    cache_priority: int
    cache_ttl_s: int | None
    cache_pin: bool
    cache_read: bool
    cache_write: bool


class Engine:
    """A model with its KV cache over three tiers. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        device: Device | None = None,
    ) -> None:
        """Load the model, allocate the tiers and start. `progress(done_bytes, total_bytes)` follows the weights.

        `device` stands in for the one that the configuration names, for tests and rehearsals.
        Raises ConfigError (a key does not fit this machine, or its limits are too low) or CheckpointError (the model
        folder); nothing is left behind then.
        """
        self.config = config
        self.metrics = Metrics()
        self._closed = False
        with shortage_as_config_error(), contextlib.ExitStack() as undo:
            self._start(progress, device if device is not None else make_device(config.device), undo)
            undo.pop_all()

    def _start(self, progress: Callable[[int, int], None] | None, device: Device, undo: contextlib.ExitStack) -> None:
        """Make the parts and start the loop; `undo` gives back what was made should that fail."""
        config, bell = self.config, Bell()
        parts = assemble(config, self.metrics, bell.ring, progress, device)
        undo.callback(parts.store.close, UNDO_S)
        self.tokenizer = parts.tokenizer
        self.model_config = parts.decoder.config
        self._store = parts.store
        self._runner = Runner(parts.decoder, sample_row, device, parts.near)
        limits = _scheduler_limits(config)
        self._scheduler = Scheduler(parts.store, limits, parts.streams)
        self._intake = Intake(parts, config)
        self._outbox = Outbox(config.senders)
        undo.callback(self._outbox.close, UNDO_S)
        turns = None
        if self._store.stager is not None:
            share = config.scheduler.streamed_share
            turns = StreamedTurns(self._scheduler.staged_parts, self._runner, self._store.stager, share)
        self._loop = EngineLoop(self._store, self._scheduler, self._runner, self._outbox, bell, self.metrics, turns)
        self._loop.start()

    @property
    def healthy(self) -> bool:
        """The engine takes requests."""
        return self._loop.healthy

    def submit(self, request: Request, sink: Sink) -> RequestHandle:
        """Queue a request; `sink` gets its events from a sender thread, in order, the last with `finish_reason`.

        Raises InvalidRequest (the request can never run here) or Unavailable (queue full, closing, failed) at once.
        """
        self._loop.process.refuse_elsewhere()
        live_max = self.config.scheduler.queue_max + self.config.scheduler.sequences_max
        try:
            self._loop.refuse_if_down()
            sequence = self._intake.admit(request, sink, self._loop.cancel)
            self._loop.add(sequence, live_max)
        except RequestError as error:
            self.metrics.request_failures.add(1, "unavailable" if isinstance(error, Unavailable) else "invalid")
            raise
        return RequestHandle(sequence.number, self._loop.cancel)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> EventStream:
        """Events of one request as they come. Closing the stream early cancels the request.

        Raises what `submit` raises, at once; an error that comes later is raised by the iteration.
        """
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        handle = self.submit(Request(prompt, params or SamplingParams(), **options), events.put)
        return EventStream(handle, events, self._loop.process)

    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Complete all prompts, batched; returns in their order. Raises the first error of any of them.

        `options` are those of each request.
        """
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params: one for each prompt is needed, got {len(each)} for {len(prompts)} prompts")
        streams: list[EventStream] = []
        try:
            streams.extend(self.stream(prompt, own, **options) for prompt, own in zip(prompts, each, strict=True))
            return [stream.collect() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def evict(self, tier: str) -> None:
        """Push what nobody holds in "hbm" or "dram" one tier down, and wait until that is done.

        What cannot be copied within `DRAIN_S` is let go of. Raises Unavailable if the engine does not even get to that.
        """
        if tier not in (Tier.HBM.value, Tier.DRAM.value):
            raise ValueError(f'tier: must be "hbm" or "dram", got {tier!r}')
        if not self._loop.drain(Tier(tier)).done.wait(2 * DRAIN_S):
            raise Unavailable(f"{tier} is not evicted within {2 * DRAIN_S} s: the engine is stuck in a pass")

    def stats(self) -> dict[str, int]:
        """Plain numbers of the moment: queues, blocks and bytes by tier, transfers, evictions, failures."""
        self._loop.process.refuse_elsewhere()
        metrics = self.metrics
        promoted = {f"promoted_{s}_{t}": int(metrics.promoted_blocks.value(s, t)) for s, t in PROMOTIONS}
        demoted = {f"demoted_{s}_{t}": int(metrics.demoted_blocks.value(s, t)) for s, t in DEMOTIONS}
        decided = {f"decided_{made}_{t}": int(metrics.load_decisions.value(t, made)) for t, made in LOAD_DECISIONS}
        return {
            "running": self._scheduler.running_count,
            "waiting": self._scheduler.waiting_count,
            "preemptions": self._scheduler.preemption_count,
            "streamed": self._scheduler.streamed_count,
            **{f"streamed_{t}_bytes": int(metrics.streamed_bytes.value(t)) for (t,) in SHELVES},
            **self._store.stats(),
            **promoted,
            **demoted,
            **decided,
        }

    def close(self, deadline_s: float = 10.0) -> None:
        """Cancel what runs, deliver final events, write down what waits to be, close the shelves; may be repeated.

        All of that within `deadline_s`: a thread that hangs is left behind with its memory, and NVMe then comes back
        as after a kill. What is not written by half of the time that is left for it stays cold. In a forked child it
        does nothing: all is the parent's.
        """
        if self._closed or not self._loop.process.is_here:
            return
        self._closed = True
        end = time.monotonic() + deadline_s
        ended = self._loop.close(deadline_s * 0.6)
        self._outbox.close(max(0.0, (end - time.monotonic()) / 2))
        if ended:
            if not self._loop.failed:
                self._store.write_down((end - time.monotonic()) / 2)
            self._store.close(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventStream(Iterator[TokenEvent]):
    """Iterator over the events of one request."""

    def __init__(self, handle: RequestHandle, events: queue.SimpleQueue[TokenEvent], process: OwnProcess) -> None:
        self._handle = handle
        self._events = events
        self._process = process
        self._finished = False

    def __next__(self) -> TokenEvent:
        if self._finished:
            raise StopIteration
        self._process.refuse_elsewhere()
        event = self._events.get()
        self._finished = event.finish_reason is not None
        if event.error is not None:
            raise event.error
        return event

    def collect(self) -> Completion:
        """Wait for what is left of the answer and return it whole. Raises ValueError if the stream has ended."""
        if self._finished:
            raise ValueError("collect: this stream has ended or was closed, nothing of the answer is left")
        text: list[str] = []
        token_ids: list[int] = []
        for event in self:
            text.append(event.text)
            token_ids.extend(event.token_ids)
        assert event.finish_reason is not None and event.usage is not None
        usage = event.usage
        origin = usage.origin.as_dict()
        reason = event.finish_reason.value
        return Completion("".join(text), token_ids, reason, usage.prompt_token_count, origin, usage.ttft_s, usage)

    def close(self) -> None:
        """Cancel the request if it is still running."""
        if not self._finished:
            self._finished = True
            self._handle.cancel()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _scheduler_limits(config: EngineConfig) -> SchedulerLimits:
    limits, beside_tokens = config.scheduler, config.scheduler.beside_tokens
    if beside_tokens is None and config.device == "cpu":  # a GPU reads all weights for few tokens as for many
        beside_tokens = BESIDE_TOKENS_CPU
    return SchedulerLimits(limits.step_tokens, limits.sequences_max, beside_tokens)
