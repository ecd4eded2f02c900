"""The few HTTP calls that supervising a Triton server takes: readiness, model index, load, unload, metrics.

Talks to this host only, through the standard library. Called by server.py and watch.py.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtier.serving.errors import ServingError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ControlClient:
    """One Triton server's HTTP endpoints. Every call is one short connection.

    All raise OSError when nobody answers, or the answer is not what the endpoint promises: a server that is busy or
    stopping may say anything.
    """

    host: str
    http_port: int
    metrics_port: int
    timeout_s: float = 5.0

    def ready(self) -> bool:
        """Whether the server and all its models say they are ready."""
        return self._call("GET", "/v2/health/ready")[0] == 200

    def version(self) -> str:
        """The server's version, such as `2.51.0`."""
        return self._read("GET", "/v2", lambda answer: str(answer["version"]))

    def ready_models(self) -> set[str]:
        """Names of the models that Triton calls READY."""
        return self._read(
            "POST",
            "/v2/repository/index",
            lambda answer: {str(item["name"]) for item in answer if item.get("state") == "READY"},
            b'{"ready": true}',
        )

    def check_loaded(self) -> None:
        """Raise ServingError, with the reasons, if the server that answers could not load models."""
        failed = self._read("POST", "/v2/repository/index", _failures)
        if reasons := [f"{name} cannot be loaded: {reason}" for name, reason in failed.items() if reason]:
            raise ServingError("; ".join(reasons))
        if failed:
            raise ServingError(f"not loaded: {', '.join(failed)}; the server's own lines say why")

    def process_count(self, model: str) -> int:
        """How many model processes a ready model must have: its instances, 0 unless the Python backend runs it."""
        return self._read("GET", f"/v2/models/{model}/config", _process_count)

    def load(self, model: str, timeout_s: float) -> None:
        """Load a model and wait for it. Raises ServingError with the server's text when it refuses."""
        self._control(model, "load", timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        """Unload a model; returns when the server has begun."""
        self._control(model, "unload", timeout_s)

    def metrics(self) -> str:
        """The metrics page."""
        status, page = self._call("GET", "/metrics", port=self.metrics_port)
        if status != 200:
            raise ConnectionError(f"the Triton server answers /metrics with status {status}")
        return page

    def _control(self, model: str, verb: str, timeout_s: float) -> None:
        status, body = self._call("POST", f"/v2/repository/models/{model}/{verb}", b"{}", timeout_s=timeout_s)
        if status != 200:
            raise ServingError(f"{verb} of {model} was refused: {body.strip()}")

    def _read(self, method: str, path: str, value_of: Callable[[Any], Value], body: bytes | None = None) -> Value:
        """What `value_of` finds in the JSON of a good answer. Raises ConnectionError for any other."""
        status, text = self._call(method, path, body)
        if status != 200:
            raise ConnectionError(f"the Triton server answers {path} with status {status}")
        try:
            return value_of(json.loads(text))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConnectionError(f"broken answer of the Triton server to {path}: {error!r}") from None

    def _call(
        self, method: str, path: str, body: bytes | None = None, port: int | None = None, timeout_s: float | None = None
    ) -> tuple[int, str]:
        timeout = self.timeout_s if timeout_s is None else timeout_s
        connection = http.client.HTTPConnection(self.host, self.http_port if port is None else port, timeout=timeout)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"broken answer from the Triton server: {error!r}") from None
        finally:
            connection.close()


def parse_metrics(page: str) -> dict[str, dict[str, float]]:
    """A Prometheus page as `{metric name: {label text: value}}`; label text is what stands between the braces.

    Lines that are no series are passed over.
    """
    parsed: dict[str, dict[str, float]] = {}
    for match in re.finditer(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE):
        with contextlib.suppress(ValueError):
            parsed.setdefault(match[1], {})[match[2] or ""] = float(match[3])
    return parsed


def label(text: str, name: str) -> str:
    """The value of one label in a label text; empty if it is not there."""
    match = re.search(rf'(?:^|,){name}="([^"]*)"', text)
    return match[1] if match else ""


def _failures(index: Any) -> dict[str, str]:
    """Reasons by model, without where in the code they arose; "" where there is none, as for a broken config.pbtxt."""
    states = [(str(item["name"]), item.get("state", ""), item.get("reason", "")) for item in index]
    failed = {name: reason for name, state, reason in states if state in ("", "UNAVAILABLE") and reason != "unloaded"}
    return {name: reason.split("\n\nAt:\n")[0].removeprefix("Internal: ") for name, reason in failed.items()}


def _process_count(config: Any) -> int:
    if config.get("backend") != "python":
        return 0
    return sum(int(group["count"]) * max(1, len(group.get("gpus", []))) for group in config["instance_group"])
