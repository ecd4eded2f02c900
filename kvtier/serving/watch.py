"""Watches a running Triton server and reloads models that died: Triton itself never does.

A model is dead when Triton calls it READY but a process of it is gone, or its `kvtier_engine_up` is 0. Called by
`scripts/serve` in its main thread.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.serving.errors import ServingError
from kvtier.serving.http import label, parse_metrics
from kvtier.serving.server import TritonServer

POLL_S = 0.5
CONFIRMATIONS = 2
"""How many polls in a row must agree: an unload by somebody else looks like a death for a moment."""
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Wait before a reload by the number of reloads, failed or not, since the model was last steady; the last repeats."""
STEADY_S = 60.0
"""A model that lives so long after a reload is steady: its next death is a first one."""


@dataclass(slots=True)
class _History:
    """The reloads of one model. Times are monotonic seconds."""

    reload_count: int = 0
    """Since the model was last steady."""
    loaded_at: float = -math.inf
    due_at: float = 0.0
    """When the next reload may be tried."""
    down: bool = False
    """The last reload failed."""

    def wait_s(self) -> float:
        return BACKOFF_S[min(self.reload_count, len(BACKOFF_S) - 1)]


class Watch:
    """The supervising loop of one server. `report` gets one line for each thing that happened."""

    def __init__(
        self, server: TritonServer, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` gives seconds."""
        self._server = server
        self._report = report
        self._clock = clock
        self._suspicions: Counter[str] = Counter()
        self._histories: dict[str, _History] = {}

    def run(self) -> None:
        """Poll until the server is asked to stop or its process ends."""
        while not self._server.stop_requested.wait(POLL_S) and self._server.running():
            self.poll()

    def poll(self) -> None:
        """Look once at every model and reload those found dead, at once the first time, then more and more slowly."""
        try:
            ready = self._server.control.ready_models()
            dead = dict(self._dead_models(ready))
        except OSError:
            return
        now = self._clock()
        self._suspicions = Counter({model: self._suspicions[model] + 1 for model in dead})
        for model, history in self._histories.items():
            history.down = history.down and model not in ready
            if history.down and now >= history.due_at:
                self._reload(model, "still down")
        for model, reason in dead.items():
            if self._suspicions[model] == CONFIRMATIONS:
                self._note_death(model, reason, now)
            if self._suspicions[model] >= CONFIRMATIONS and now >= self._histories[model].due_at:
                self._reload(model, reason)

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

    def _note_death(self, model: str, reason: str, now: float) -> None:
        history = self._histories.setdefault(model, _History())
        if now - history.loaded_at >= STEADY_S:
            history.reload_count = 0
        history.due_at = now + history.wait_s()
        if history.wait_s() > 0:
            self._report(
                f"model {model}: {reason}, within {STEADY_S:g} s of its last reload ({history.reload_count} in a row); "
                f"the next one in {history.wait_s():g} s"
            )

    def _reload(self, model: str, reason: str) -> None:
        history = self._histories[model]
        started = self._clock()
        try:
            self._server.reload(model)
        except ServingError as error:
            history.reload_count += 1
            history.due_at = self._clock() + history.wait_s()
            history.down = True
            self._report(f"model {model}: {reason}; reload failed, again in {history.wait_s():g} s: {error}")
            return
        history.reload_count += 1
        history.loaded_at = self._clock()
        history.down = False
        self._report(f"model {model}: {reason}; reloaded in {history.loaded_at - started:.1f} s")
