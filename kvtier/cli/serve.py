"""`scripts/serve`: the Triton server on a model repository, supervised until a signal ends it.

A server that crashes is started again. Options it does not know go to tritonserver as they are. Knows no torch and no
engine.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from kvtier.cli.paragraphs import Paragraphs
from kvtier.errors import KvtierError
from kvtier.serving import Ports, ServerOptions, TritonServer, Watch
from kvtier.serving.watch import BACKOFF_S, STEADY_S

DESCRIPTION = """\
Starts the Triton server on a model repository and watches it until SIGTERM or Ctrl-C: a model whose process dies or
whose engine fails is loaded again, a server that crashes is started again."""
EPILOG = """\
Every other option goes to tritonserver, for example --model-config-name=vllm or --log-verbose=1.

examples:
  scripts/serve
  scripts/serve --set tiers.hbm.bytes=4GiB --set tiers.nvme.bytes=100GiB
  scripts/serve --http-port 9000 --grpc-port 9001 --metrics-port 9002
"""


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; a second signal ends it at once. The exit status is 0 after a clean stop."""
    server = TritonServer(parse(arguments))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.request_stop())
    crash_count = 0
    while True:
        started = time.monotonic()
        try:
            status = _run(server)
        except KvtierError as error:
            _report(str(error))
            return 0 if server.stop_requested.is_set() else 1
        if server.stop_requested.is_set():
            return 0 if status == 0 else 1
        if status is None or status >= 0:
            _report(f"tritonserver ended on its own with status {status}")
            return 1
        crash_count = 1 if time.monotonic() - started >= STEADY_S else crash_count + 1
        wait_s = BACKOFF_S[min(crash_count, len(BACKOFF_S)) - 1]
        _report(f"tritonserver crashed ({signal.Signals(-status).name}); starting it again in {wait_s:g} s")
        if server.stop_requested.wait(wait_s):
            return 0


def _run(server: TritonServer) -> int | None:
    """Start and watch a server until it ends; its status. Raises ServingError if it does not come up."""
    server.start()
    try:
        _report(f"ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}")
        Watch(server, _report).run()
    finally:
        status = server.stop()
    return status


def parse(arguments: list[str] | None) -> ServerOptions:
    """The options of the command line; exits with a message if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts/serve", description=DESCRIPTION, epilog=EPILOG, formatter_class=Paragraphs, allow_abbrev=False
    )
    parser.add_argument("--root", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="folder of models (default: model_repository)"
    )
    for option, port in (("http", Ports().http), ("grpc", Ports().grpc), ("metrics", Ports().metrics)):
        parser.add_argument(f"--{option}-port", type=int, metavar="N", default=port, help="default: %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of engine.yaml; repeatable"
    )
    parser.add_argument(
        "--exit-timeout-secs",
        type=int,
        metavar="N",
        default=ServerOptions().exit_timeout_s,
        help="how long a stop waits for answers in flight (default: %(default)s)",
    )
    known, extra = parser.parse_known_args(arguments)
    overrides = {}
    for item in known.set:
        key, equals, value = item.partition("=")
        if not equals or not key:
            parser.error(f"--set: must be KEY=VALUE, got {item!r}")
        overrides[key] = value
    return ServerOptions(
        repository=known.model_repository or known.root / "model_repository",
        ports=Ports(known.http_port, known.grpc_port, known.metrics_port),
        overrides=overrides,
        server_directory=known.root / ".cache" / "triton",
        exit_timeout_s=known.exit_timeout_secs,
        extra_arguments=tuple(extra),
    )


def _report(line: str) -> None:
    print(f"kvtier serve: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
