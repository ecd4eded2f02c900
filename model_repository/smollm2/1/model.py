"""The door of the Triton server: its requests become ours, our events its responses, our counters its metrics.

Thin: parsing is kvtier.door, everything else the engine. Owns the response senders (FINAL exactly once, always) and
the one thread that talks to Triton's metrics. Triton calls `TritonPythonModel`; no other file imports
`triton_python_backend_utils`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from kvtier import Engine, EngineConfig, InvalidRequest, TokenEvent, Unavailable
from kvtier.config import PATH_KEYS
from kvtier.door import CancelWatch, DoorLimits, DoorRequest, parse_request, response_fields
from kvtier.metrics import Family, Kind, Labels
from kvtier.outbox import merge
from kvtier.session import RequestHandle

_log = logging.getLogger("kvtier.model")

OWN_LEVELS = {"priority_levels": 3, "default_priority_level": 2}
"""Of priority, where config.pbtxt has no batcher that names its own."""
PUBLISH_S = 0.5
PUBLISH_FAILURES_MAX = 10
"""Publications that fail in a row before the engine is reported as down, so that its model is reloaded."""
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
        outputs = model_config["output"]
        self._types = {item["name"]: triton.triton_string_to_numpy(item["data_type"]) for item in outputs}
        with contextlib.ExitStack() as undo:
            self._engine = Engine(EngineConfig.load(folder / "engine.yaml", overrides(model_config, folder)))
            undo.callback(self._engine.close, CLOSE_S)
            self._limits = limits_of(self._engine, model_config)
            self._cancels = CancelWatch()
            undo.callback(self._cancels.close, CLOSE_S)
            self._publisher = Publisher(self._engine, args["model_name"], args["model_instance_name"])
            undo.pop_all()

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
        try:
            self._engine.close(CLOSE_S)
        finally:
            self._cancels.close(CLOSE_S)
            self._publisher.close()

    def _accept(self, request: Any, sender: Any) -> None:
        """Parse and submit. An error leaves no trace, so that the caller may answer it."""
        fields = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = json.loads(request.parameters() or "{}")
        try:
            asked = parse_request(fields, parameters, self._limits)
        except InvalidRequest:
            self._engine.metrics.request_failures.add(1, "invalid")
            raise
        delivery = Delivery(sender, asked, self._tensors)
        delivery.handle = self._engine.submit(asked.request, delivery)
        self._cancels.add(delivery)

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


class Publisher:
    """The one thread that talks to Triton's metrics: two would abort the server.

    Triton's series outlive this process, so counters pass on what was added since the last time, and gauges carry the
    instance, are cleared at the end, and only then let go.
    """

    def __init__(self, engine: Engine, model: str, instance: str) -> None:
        """Start, and return once the first numbers are out; raises RuntimeError if that does not come to pass."""
        self._engine = engine
        self._metrics = engine.metrics
        self._model = model
        self._instance = instance
        self._published: dict[tuple[str, Labels], float] = {}
        self._metrics.keep_observations(OBSERVATIONS_MAX)
        self._failure: Exception | None = None
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self._thread.start()
        if not self._started.wait(CLOSE_S) or self._failure is not None:
            self._stop.set()
            raise RuntimeError(f"the server's metrics take no numbers, {CLOSE_S:g} s long") from self._failure

    def close(self) -> None:
        """Publish the last counts, zero the gauges, end the thread. The engine must be closed."""
        self._metrics.clear_gauges()
        self._stop.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._declare()
            self._publish()
        except Exception as error:
            self._failure = error
            return
        finally:
            self._started.set()
        failure_count = 0
        while True:
            stopped = self._stop.wait(PUBLISH_S)
            try:
                self._publish()
                failure_count = 0
            except Exception:  # what was not passed on is passed on the next time, but for a histogram's values
                failure_count += 1
                if failure_count <= PUBLISH_FAILURES_MAX:
                    _log.exception("metrics could not be published, %d times in a row", failure_count)
                if failure_count == PUBLISH_FAILURES_MAX:
                    self._report_down()
            if stopped:
                return

    def _declare(self) -> None:
        # Kept until this process ends: a family that is let go takes its values with it.
        self._families = [triton_family(family) for family in self._metrics.families]
        self._series = {
            (family.name, labels): created.Metric(labels=self._labels(family, labels), **buckets_of(family))
            for family, created in zip(self._metrics.families, self._families, strict=True)
            for labels in family.label_values
        }

    def _report_down(self) -> None:
        """Numbers that stand still would hide a failed engine: the supervisor shall reload the model."""
        key = (self._metrics.engine_up.family.name, ())
        try:
            self._series[key].set(0.0)
            self._published[key] = 0.0
        except Exception:
            _log.exception("the model must be reloaded, but that cannot be said either")

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
    """Answer a request with an error and FINAL. A bug's text stays in the log.

    The text begins with the name of the gRPC status: nothing else in a stream tells a client which one it is.
    """
    if isinstance(error, InvalidRequest):
        answer = triton.TritonError(f"INVALID_ARGUMENT: {error}", triton.TritonError.INVALID_ARG)
    elif isinstance(error, Unavailable):
        answer = triton.TritonError(f"UNAVAILABLE: {error}", triton.TritonError.UNAVAILABLE)
    else:
        _log.error("a request failed", exc_info=error)
        answer = triton.TritonError("INTERNAL: the server's log tells more", triton.TritonError.INTERNAL)
    final = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    try:
        sender.send(triton.InferenceResponse(error=answer), flags=final)
    except Exception:
        _log.exception("an error could not be sent; its request ends without")
        try:
            sender.send(flags=final)
        except Exception:
            _log.exception("a request could not be ended, unless it had been before")


def limits_of(engine: Engine, model_config: Mapping[str, Any]) -> DoorLimits:
    """What a request to this engine may hold at most."""
    context = min(engine.model_config.context, engine.config.context or engine.model_config.context)
    token_bytes_max = engine.tokenizer.token_bytes_max if engine.tokenizer is not None else 0
    batching = model_config.get("dynamic_batching", OWN_LEVELS)
    levels, default_level = (int(batching.get(key, 0)) for key in ("priority_levels", "default_priority_level"))
    return DoorLimits.of_model(context, token_bytes_max, levels, default_level)


def overrides(model_config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The engine.yaml keys among config.pbtxt's parameters; relative paths are taken from `folder`."""
    values = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    for key in PATH_KEYS:
        if key in values:
            values[key] = str(folder / Path(values[key]).expanduser())
    return values
