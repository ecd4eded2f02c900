"""One real Triton server as a child process: checked before the start, started with retries, stopped cleanly.

Owns the process, its run folder, its shared memory and its stubs, and cleans up exactly those. Does not restart models:
watch.py does. Knows no torch and no engine.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from kvtier.serving.errors import ServingError
from kvtier.serving.http import ControlClient
from kvtier.serving.locate import arguments_without_gpu, locate
from kvtier.serving.processes import ModelProcess, clean_up, model_processes, server_setup
from kvtier.serving.repository import models_of, overlay

START_ATTEMPTS = 3
POLL_S = 0.1
KILL_AFTER_S = 5
"""A server that is still there so long after its own exit timeout hangs."""
UNLOAD_S = 30.0
"""A model that is still there so long after its unload began hangs."""
LET_GO_S = 5.0
"""A stopping server that has lost all model processes for so long has nothing left to finish."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The three ports of a server."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nobody listens on at this moment."""
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for item in sockets:
                item.bind(("", 0))
            return cls(*(item.getsockname()[1] for item in sockets))

    def check_free(self) -> None:
        """Raise ServingError that names each port somebody already uses, and its option."""
        taken = [f"{option} {port}" for option, port in self._options() if not _can_bind(port)]
        if taken:
            raise ServingError(f"already in use: {', '.join(taken)}; stop what listens there or choose other ports")

    def arguments(self) -> list[str]:
        """As tritonserver wants them."""
        return [f"{option}={port}" for option, port in self._options()]

    def _options(self) -> list[tuple[str, int]]:
        return [("--http-port", self.http), ("--grpc-port", self.grpc), ("--metrics-port", self.metrics)]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to run a server. `overrides` are engine.yaml keys by dotted name, for every engine in the repository."""

    repository: Path = Path("model_repository")
    ports: Ports = field(default_factory=Ports)
    overrides: Mapping[str, str] = field(default_factory=dict)
    server_directory: Path = Path(".cache/triton")
    """Where to look when `tritonserver` is not on PATH."""
    log: Path | None = None
    """File for the server's output; None: the caller's own stdout and stderr."""
    start_timeout_s: float = 600.0
    exit_timeout_s: int = 600
    """How long a stopping server lets answers in flight finish; must cover the longest answer and the unload.

    The default covers 8,000 tokens at 14 a second. A server without requests stops at once whatever this is; what is
    not finished by then is cut: its client gets an error.
    """
    extra_arguments: tuple[str, ...] = ()
    """Passed to tritonserver as they are."""


class TritonServer:
    """A running server while the `with` block lasts.

    One thread drives it, and must last as long as it: where that thread ends, even by SIGKILL of its process, the
    server gets SIGTERM. Only `request_stop` may come from other threads.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.ports = options.ports
        self.grpc_url = f"localhost:{options.ports.grpc}"
        self.http_url = f"http://localhost:{options.ports.http}"
        self.metrics_url = f"http://localhost:{options.ports.metrics}/metrics"
        self.control = ControlClient("localhost", options.ports.http, options.ports.metrics)
        self.prefix = f"kvtier_{uuid.uuid4().hex[:12]}_"
        """What the names of this server's shared memory regions begin with."""
        self.process: subprocess.Popen[bytes] | None = None
        self.stop_requested = threading.Event()
        self._reloaded = False
        self._folder: Path | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Check, start, and return once every model is ready.

        A server that aborts on its own is started again, up to `START_ATTEMPTS` times. Raises ServingError when the
        start is impossible, refused, too slow or stopped by `request_stop`; nothing is left behind then.
        """
        self._reloaded = False
        installation = locate(self.options.server_directory)
        installation.check()
        models_of(self.options.repository)
        self.ports.check_free()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="kvtier-serve-"))
            command = self._command(installation.binary, installation.assemble_backends(self._folder))
            environment = installation.environment()
            for attempt in range(1, START_ATTEMPTS + 1):
                self._launch(command, environment)
                exit_status = self._wait_ready()
                if exit_status is None:
                    return
                clean_up(self.prefix)
                if self.stop_requested.is_set():
                    raise ServingError("stopped while starting")
                if exit_status >= 0 or attempt == START_ATTEMPTS:
                    raise ServingError(f"tritonserver ended with status {exit_status} at start{self._reason()}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> int | None:
        """Stop the server, letting answers in flight finish within `exit_timeout_s`; idempotent.

        Returns its exit status, None if it never ran. Removes its run folder, stubs and shared memory.
        """
        status = None
        if self.process is not None:
            if self.process.poll() is None and not self.stop_requested.is_set():
                self.process.terminate()
            status = self._wait_ended(self.process)
            clean_up(self.prefix)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._log is not None:
            self._log.close()
            self._log = None
        return status

    def request_stop(self) -> None:
        """Ask the server to stop and return at once; asked again, kill it. Safe in a signal handler and any thread."""
        again = self.stop_requested.is_set()
        self.stop_requested.set()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    def running(self) -> bool:
        """Whether the server process lives."""
        return self.process is not None and self.process.poll() is None

    def model_processes(self) -> list[ModelProcess]:
        """The live stubs of this server."""
        return model_processes(self.prefix)

    def reload(self, model: str) -> None:
        """Unload and load a model: the one thing that brings a dead model process back. Raises ServingError.

        A server that never ends the unload (2.51 does so once a client has cancelled a request that had ended) loses
        the model's processes after `UNLOAD_S`.
        """
        self._reloaded = True
        try:
            self.control.unload(model, UNLOAD_S)
            deadline = time.monotonic() + UNLOAD_S
            while (left := self._processes_of(model)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            for process in left:
                process.kill()
            self.control.load(model, self.options.start_timeout_s)
        except OSError as error:
            raise ServingError(f"the Triton server does not answer: {error}") from None

    def _processes_of(self, model: str) -> list[ModelProcess]:
        return [process for process in self.model_processes() if process.model == model]

    def _command(self, binary: Path, backends: Path) -> list[str]:
        repository = self.options.repository
        if self.options.overrides:
            assert self._folder is not None
            repository = overlay(repository, self.options.overrides, self._folder / "models")
        extra = self.options.extra_arguments
        return [
            str(binary),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self.prefix}",
            "--model-control-mode=explicit",
            *([] if any(item.startswith("--load-model") for item in extra) else ["--load-model=*"]),
            "--disable-auto-complete-config",
            "--exit-on-error=false",  # so that it can be asked why; it is stopped then
            f"--exit-timeout-secs={self.options.exit_timeout_s}",
            *self.ports.arguments(),
            *arguments_without_gpu(extra),
            *extra,
        ]

    def _launch(self, command: list[str], environment: dict[str, str]) -> None:
        if self.options.log is not None and self._log is None:
            self._log = self.options.log.open("ab")
        # Its own session: a Ctrl-C reaches us alone, and we decide what the server hears.
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=server_setup(),
        )
        if self.stop_requested.is_set():  # meanwhile, when there was nothing to stop yet
            self.process.terminate()

    def _wait_ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until a stopping server ends, and kill one that hangs; returns its status.

        A model whose process died amid answers is never let go of by the server (2.51), which would wait for it until
        its exit timeout. So once a model was reloaded, a server without model processes is ended: status 0.
        """
        deadline = time.monotonic() + self.options.exit_timeout_s + KILL_AFTER_S
        busy_at = time.monotonic()
        while (now := time.monotonic()) < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_S)
            if not self._reloaded or self.model_processes():
                busy_at = now
            elif now - busy_at >= LET_GO_S:
                process.kill()
                process.wait()
                return 0
        process.kill()
        return process.wait()

    def _wait_ready(self) -> int | None:
        """Wait for readiness; the exit status if the server ended instead."""
        assert self.process is not None
        deadline = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < deadline:
            status = self.process.poll()
            if status is not None:
                return status
            with contextlib.suppress(OSError):
                if self.control.ready():
                    return None
                self.control.check_loaded()
            time.sleep(POLL_S)
        raise ServingError(f"tritonserver was not ready after {self.options.start_timeout_s:g} s{self._reason()}")

    def _reason(self) -> str:
        """What the log says, if it is ours to read."""
        if self.options.log is None or not self.options.log.exists():
            return "; its own lines above say why"
        lines = self.options.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"E\d{4} ", line)] or lines
        return ":\n" + "\n".join(errors[-5:])


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
