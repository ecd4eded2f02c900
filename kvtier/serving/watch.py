"""Watches a running Triton server and reloads models that died: Triton itself never does.

A model is dead when Triton calls it READY but a process of it is gone, or its `kvtier_engine_up` is 0. Called by
`scripts/serve` in its main thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from kvtier.serving.errors import ServingError
from kvtier.serving.http import label, parse_metrics
from kvtier.serving.server import TritonServer

POLL_S = 0.5
CONFIRMATIONS = 2
"""How many polls in a row must agree: an unload by somebody else looks like a death for a moment."""
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits between failed reloads of one model; the last repeats."""


class Watch:
    """The supervising loop of one server. `report` gets one line for each thing that happened."""

    def __init__(self, server: TritonServer, report: Callable[[str], None]) -> None:
        self._server = server
        self._report = report
        self._suspicions: Counter[str] = Counter()
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    def run(self) -> None:
        """Poll until the server is asked to stop or its process ends."""
        while not self._server.stop_requested.wait(POLL_S) and self._server.running():
            self.poll(time.monotonic())

    def poll(self, now: float) -> None:
        """Look once at every model and reload those found dead. `now` is in seconds, monotonic."""
        try:
            ready = self._server.control.ready_models()
            dead = dict(self._dead_models(ready))
        except OSError:
            return
        self._suspicions = Counter({model: self._suspicions[model] + 1 for model in dead})
        for model, reason in dead.items():
            if self._suspicions[model] >= CONFIRMATIONS:
                self._reload(model, reason, now)
        for model in [model for model, retry_at in self._retry_at.items() if retry_at <= now]:
            if model in ready:
                del self._retry_at[model]
            else:
                self._reload(model, "still down", now)

    def _dead_models(self, ready: set[str]) -> Iterator[tuple[str, str]]:
        """Models that say READY and are not, with the reason."""
        control = self._server.control
        ups = parse_metrics(control.metrics()).get("kvtier_engine_up", {})
        processes = Counter(process.model for process in self._server.model_processes())
        for model in sorted(ready):
            if processes[model] < control.process_count(model):
                yield model, "its model process died"
            elif any(value == 0 and label(labels, "model") == model for labels, value in ups.items()):
                yield model, "kvtier_engine_up is 0"

    def _reload(self, model: str, reason: str, now: float) -> None:
        if self._retry_at.get(model, 0.0) > now:
            return
        started = time.monotonic()
        try:
            self._server.reload(model)
        except ServingError as error:
            failures = self._failures.get(model, 0)
            wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            self._failures[model] = failures + 1
            self._retry_at[model] = now + wait_s
            self._report(f"model {model}: {reason}; reload failed, again in {wait_s:g} s: {error}")
            return
        self._failures.pop(model, None)
        self._retry_at.pop(model, None)
        self._report(f"model {model}: {reason}; reloaded in {time.monotonic() - started:.1f} s")
