"""`kvtier smoke`: one request to a running server; the exit status says whether it works. Knows no engine."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvtier.cli.terminal import TIER_NAMES, messages, reported
from kvtier.errors import KvtierError

STATUS_FAILED = 1


def smoke(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's gRPC address, HOST:PORT.")] = "localhost:8001",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the served model.")] = "smollm2",
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to ask.")] = "Say hello.",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer.")] = 16,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="For all of it.")] = 60.0,
) -> None:
    """Send one request to a running server. Status 0: it answers; 1: it does not, and the message says why.

    Examples:

      [bold]kvtier smoke[/]

      [bold]kvtier smoke gpu7:8001 --model llama --prompt "A river?" && echo works[/]
    """
    with reported(STATUS_FAILED):
        answer = ask(address_of(url), model, prompt, max_tokens, timeout_s)
    typer.echo(answer)


def address_of(url: str) -> str:
    """HOST:PORT from what a person may type. Raises KvtierError for an HTTP address: the client speaks gRPC."""
    scheme, separator, rest = url.rpartition("://")
    if separator and scheme != "grpc":
        raise KvtierError(
            f"{url}: the client speaks gRPC; give HOST:PORT, port 8001 unless the server was told otherwise"
        )
    host, _, port = rest.rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise KvtierError(f"{url}: must be HOST:PORT, such as localhost:8001")
    return f"{host}:{port}"


def ask(address: str, model: str, prompt: str, max_tokens: int, timeout_s: float) -> str:
    """The text of a greedy answer; tells its cost on stderr. Raises KvtierError if the server falls short."""
    from kvtier.client import Client  # needs the optional tritonclient

    inputs: dict[str, object] = {
        "text_input": prompt,
        "stream": True,
        "max_tokens": max_tokens,
        "sampling_parameters": '{"temperature": 0}',
        "return_finish_reason": True,
    }
    started = time.monotonic()
    first_s = None
    pieces = []
    last: dict[str, object] = {}
    with Client(address, model, timeout_s) as client:
        for response in client.infer(inputs, timeout_s=timeout_s):
            first_s = first_s if first_s is not None else time.monotonic() - started
            pieces.append(response.text)
            last = response.outputs
    if first_s is None or "finish_reason" not in last:
        raise KvtierError(f"{address}: {model} ended its answer without a finish_reason: it is not a kvtier model")
    origin = ", ".join(f"{shown} {last.get(f'prompt_tokens_{name}', 0)}" for name, shown in TIER_NAMES.items())
    messages().print(f"[dim]{model} at {address}: first token after {first_s:.2f} s; prompt tokens: {origin}[/]")
    return "".join(pieces)
