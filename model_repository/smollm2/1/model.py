"""The door of the Triton server: its requests become ours, our events its responses, our counters its metrics.

Thin: parsing is kvtier.door, everything else the engine. Owns the response senders (FINAL exactly once, always), the
thread that looks for cancelled clients and the one thread that talks to Triton's metrics. Triton calls
`TritonPythonModel`; no other file imports `triton_python_backend_utils`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from kvtier import Engine, EngineConfig, InvalidRequest, TokenEvent, Unavailable
from kvtier.config import PATH_KEYS
from kvtier.door import DoorRequest, parse_request, response_fields
from kvtier.metrics import Family, Kind, Labels
from kvtier.outbox import merge
from kvtier.session import RequestHandle

_log = logging.getLogger("kvtier.model")

CANCEL_POLL_S = 0.05
"""How often clients are asked whether they have gone."""
CANCEL_SHARE = 0.05
"""Share of one thread that asking may take (about 22 us a request)."""
PUBLISH_S = 0.5
OBSERVATIONS_MAX = 2000
"""Histogram observations kept between two publications (about 15 us each)."""
CLOSE_S = 20.0


class TritonPythonModel:
    """What Triton's Python backend calls, always from one thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine. An error here is the server's answer to the load."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        folder = (Path(args["model_repository"]) / args["model_version"]).resolve()
        model_config = json.loads(args["model_config"])
        self._batched = model_config["max_batch_size"] > 0
        self._types = {
            item["name"]: triton.triton_string_to_numpy(item["data_type"]) for item in model_config["output"]
        }
        self._default_level = int(model_config["dynamic_batching"]["default_priority_level"])
        self._engine = Engine(EngineConfig.load(folder / "engine.yaml", overrides(model_config, folder)))
        self._publisher = Publisher(self._engine, args["model_name"], args["model_instance_name"])
        self._cancels = CancelWatch()

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the engine; its answers leave through its own response sender, later."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except Exception as error:  # the border: whatever happens, the client gets an answer
                send_error(sender, error)

    def finalize(self) -> None:
        """Close the engine; requests still running are answered as cancelled."""
        self._engine.close(CLOSE_S)
        self._cancels.close()
        self._publisher.close()

    def _accept(self, request: Any, sender: Any) -> None:
        """Parse and submit. An error leaves no trace, so that the caller may answer it."""
        fields = {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()}
        parameters = json.loads(request.parameters() or "{}")
        try:
            asked = parse_request(fields, parameters)
        except InvalidRequest:
            self._engine.metrics.request_failures.add(1, "invalid")
            raise
        delivery = Delivery(sender, asked, self._tensors)
        delivery.handle = self._engine.submit(replace(asked.request, priority=self._priority(parameters)), delivery)
        self._cancels.add(delivery)

    def _priority(self, parameters: Mapping[str, object]) -> int:
        """The engine's priority for Triton's level, 0 for the default one. gRPC levels reach the batcher alone."""
        level = parameters.get("priority")
        return level - self._default_level if isinstance(level, int) and level > 0 else 0

    def _tensors(self, fields: Mapping[str, object]) -> list[Any]:
        """Outputs by name as Triton tensors of the configured types, `[1, n]` or `[n]`."""
        tensors = []
        for name, value in fields.items():
            values = value if isinstance(value, list) else [value]
            encoded = [item.encode() if isinstance(item, str) else item for item in values]
            array = np.array(encoded, dtype=self._types[name])
            tensors.append(triton.Tensor(name, array.reshape(1, -1) if self._batched else array))
        return tensors


class Delivery:
    """The way back of one request: the engine's sink, and the owner of FINAL.

    Called by one sender thread (events) and the cancellation thread; the lock keeps them from each other.
    """

    def __init__(self, sender: Any, asked: DoorRequest, tensors: Callable[[Mapping[str, object]], list[Any]]) -> None:
        self.handle: RequestHandle | None = None
        self._sender = sender
        self._asked = asked
        self._tensors = tensors
        self._held: list[TokenEvent] = []
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, event: TokenEvent) -> None:
        """Send an event, or hold it until the last if the client does not stream. A failure ends the request."""
        with self._lock:
            if self._closed:
                return
            try:
                self._deliver(event)
            except Exception as error:
                self._closed = True
                send_error(self._sender, error)
                raise  # the engine cancels the request

    def gone(self) -> bool:
        """Whether there is nothing left to ask about; cancels the request if its client has gone."""
        with self._lock:
            if self._closed:
                return True
            if not self._sender.is_cancelled():
                return False
        assert self.handle is not None
        self.handle.cancel()
        return True

    def _deliver(self, event: TokenEvent) -> None:
        last = event.finish_reason is not None
        self._closed = last
        if event.error is not None:
            send_error(self._sender, event.error)
            return
        if not self._asked.stream:
            self._held.append(event)
            if not last:
                return
            event = merge(self._held)
        response = triton.InferenceResponse(self._tensors(response_fields(self._asked, event)))
        self._sender.send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


class CancelWatch:
    """One thread that asks, for every request in flight, whether its client has gone."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-cancel", daemon=True)
        self._thread.start()

    def add(self, delivery: Delivery) -> None:
        """Ask about this request from now on."""
        with self._lock:
            self._deliveries.append(delivery)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        pause_s = CANCEL_POLL_S
        while not self._stop.wait(pause_s):
            started = time.monotonic()
            with self._lock:
                asked, self._deliveries = self._deliveries, []
            left = [delivery for delivery in asked if not delivery.gone()]
            with self._lock:
                self._deliveries += left
            pause_s = max(CANCEL_POLL_S, (time.monotonic() - started) / CANCEL_SHARE)


class Publisher:
    """The one thread that talks to Triton's metrics: two would abort the server.

    Triton's series outlive this process, so counters pass on what was added since the last time, and gauges carry the
    instance, are cleared at the end, and only then let go.
    """

    def __init__(self, engine: Engine, model: str, instance: str) -> None:
        """Start, and return once the first numbers are out."""
        self._engine = engine
        self._metrics = engine.metrics
        self._model = model
        self._instance = instance
        self._published: dict[tuple[str, Labels], float] = {}
        self._metrics.keep_observations(OBSERVATIONS_MAX)
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self._thread.start()
        self._started.wait(CLOSE_S)

    def close(self) -> None:
        """Publish the last counts, zero the gauges, end the thread. The engine must be closed."""
        self._metrics.clear_gauges()
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        # Kept until this process ends: a family that is let go takes its values with it.
        self._families = [triton_family(family) for family in self._metrics.families]
        self._series = {
            (family.name, labels): created.Metric(labels=self._labels(family, labels), **buckets_of(family))
            for family, created in zip(self._metrics.families, self._families, strict=True)
            for labels in family.label_values
        }
        stopped = False
        while True:
            self._publish()
            self._started.set()
            if stopped:
                return
            stopped = self._stop.wait(PUBLISH_S)

    def _publish(self) -> None:
        if not self._stop.is_set():
            self._metrics.engine_up.set(float(self._engine.healthy))
        for sample in self._metrics.snapshot():
            key = (sample.family.name, sample.labels)
            added = sample.value - self._published.get(key, 0.0)
            if sample.family.kind is Kind.HISTOGRAM or (added == 0 and key in self._published):
                continue
            if sample.family.kind is Kind.GAUGE:
                self._series[key].set(sample.value)
            else:
                self._series[key].increment(added)
            self._published[key] = sample.value
        for observation in self._metrics.take_observations():
            self._series[(observation.family.name, observation.labels)].observe(observation.value)

    def _labels(self, family: Family, values: Labels) -> dict[str, str]:
        labels = {"model": self._model, **dict(zip(family.label_names, values, strict=True))}
        return {**labels, "instance": self._instance} if family.kind is Kind.GAUGE else labels


def triton_family(family: Family) -> Any:
    """Declare a family to Triton."""
    kinds = {
        Kind.COUNTER: triton.MetricFamily.COUNTER,
        Kind.GAUGE: triton.MetricFamily.GAUGE,
        Kind.HISTOGRAM: triton.MetricFamily.HISTOGRAM,
    }
    return triton.MetricFamily(name=family.name, description=family.help, kind=kinds[family.kind])


def buckets_of(family: Family) -> dict[str, Any]:
    """The keyword that only histograms take."""
    return {"buckets": list(family.buckets)} if family.kind is Kind.HISTOGRAM else {}


def send_error(sender: Any, error: Exception) -> None:
    """Answer a request with an error and FINAL. A bug's text stays in the log."""
    if isinstance(error, InvalidRequest):
        answer = triton.TritonError(str(error), triton.TritonError.INVALID_ARG)
    elif isinstance(error, Unavailable):
        answer = triton.TritonError(str(error), triton.TritonError.UNAVAILABLE)
    else:
        _log.error("a request failed", exc_info=error)
        answer = triton.TritonError("internal error; the server's log tells more", triton.TritonError.INTERNAL)
    try:
        sender.send(triton.InferenceResponse(error=answer), flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception:  # FINAL was sent before
        _log.exception("an error could not be sent")


def overrides(model_config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The engine.yaml keys among config.pbtxt's parameters; relative paths are taken from `folder`."""
    values = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    for key in PATH_KEYS:
        if key in values:
            values[key] = str(folder / Path(values[key]).expanduser())
    return values
