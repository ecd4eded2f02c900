"""The few HTTP calls that supervising a Triton server takes: readiness, model index, load, unload, metrics.

Talks to this host only, through the standard library. Called by server.py and watch.py.
"""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass

from kvtier.serving.errors import ServingError


@dataclass(frozen=True, slots=True)
class ControlClient:
    """One Triton server's HTTP endpoints. Every call is one short connection; raises OSError when nobody answers."""

    host: str
    http_port: int
    metrics_port: int
    timeout_s: float = 5.0

    def ready(self) -> bool:
        """Whether the server and all its models say they are ready."""
        return self._call("GET", "/v2/health/ready")[0] == 200

    def version(self) -> str:
        """The server's version, such as `2.51.0`."""
        return str(json.loads(self._call("GET", "/v2")[1])["version"])

    def ready_models(self) -> set[str]:
        """Names of the models that Triton calls READY."""
        _, body = self._call("POST", "/v2/repository/index", b'{"ready": true}')
        return {item["name"] for item in json.loads(body) if item.get("state") == "READY"}

    def process_count(self, model: str) -> int:
        """How many model processes a ready model must have: its instances, 0 unless the Python backend runs it."""
        status, body = self._call("GET", f"/v2/models/{model}/config")
        config = json.loads(body) if status == 200 else {}
        if config.get("backend") != "python":
            return 0
        return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in config["instance_group"])

    def load(self, model: str, timeout_s: float) -> None:
        """Load a model and wait for it. Raises ServingError with the server's text when it refuses."""
        self._control(model, "load", timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        """Unload a model; returns when the server has begun."""
        self._control(model, "unload", timeout_s)

    def metrics(self) -> str:
        """The metrics page."""
        return self._call("GET", "/metrics", port=self.metrics_port)[1]

    def _control(self, model: str, verb: str, timeout_s: float) -> None:
        status, body = self._call("POST", f"/v2/repository/models/{model}/{verb}", b"{}", timeout_s=timeout_s)
        if status != 200:
            raise ServingError(f"{verb} of {model} was refused: {body.strip()}")

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
    """A Prometheus page as `{metric name: {label text: value}}`; label text is what stands between the braces."""
    parsed: dict[str, dict[str, float]] = {}
    for match in re.finditer(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE):
        parsed.setdefault(match[1], {})[match[2] or ""] = float(match[3])
    return parsed


def label(text: str, name: str) -> str:
    """The value of one label in a label text; empty if it is not there."""
    match = re.search(rf'(?:^|,){name}="([^"]*)"', text)
    return match[1] if match else ""
