"""A client that goes away stops costing: its request ends and its blocks serve others."""

from __future__ import annotations

import http.client
import json
import time

import tritonclient.grpc as grpc
from conftest import MODEL, metrics, total

from kvtier.client import Client
from kvtier.serving import TritonServer

ENDLESS = json.dumps({"temperature": 0, "ignore_eos": True})
LONG = 1000
"""Tokens of an answer that takes seconds and fills most of the tiny HBM."""


def cancelled(server: TritonServer) -> float:
    return total(metrics(server)["kvtier_requests_total"], outcome="cancelled")


def wait_until_cancelled(server: TritonServer, count: float) -> None:
    deadline = time.monotonic() + 10
    while cancelled(server) < count:
        assert time.monotonic() < deadline, "the request was not cancelled"
        time.sleep(0.1)
    assert total(metrics(server)["kvtier_running_requests"]) == 0


def test_closing_a_grpc_stream_frees_its_blocks(tiny: TritonServer, client: Client) -> None:
    before = cancelled(tiny)
    request = {"text_input": "tell me", "stream": True, "max_tokens": LONG, "sampling_parameters": ENDLESS}
    streams = [client.infer(request, timeout_s=60) for _ in range(4)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()
    wait_until_cancelled(tiny, before + 4)
    whole = list(client.infer({**request, "stream": False}, timeout_s=60))
    assert len(whole[0].outputs["output_ids"]) == LONG, "the blocks of the cancelled requests are missing"


def send(server: TritonServer, client: Client, inputs: dict[str, object]) -> grpc.InferenceServerClient:
    """Send a request on a connection of its own and do not wait for anything."""
    connection = grpc.InferenceServerClient(server.grpc_url)
    connection.start_stream(lambda **_: None)
    connection.async_stream_infer(MODEL, [client._tensor(name, value) for name, value in inputs.items()])
    return connection


def running_and_queued(server: TritonServer) -> tuple[float, float]:
    values = metrics(server)
    return total(values["kvtier_running_requests"]), total(values["kvtier_queued_requests"])


def test_whole_answers_running_and_queued_are_cancelled_too(tiny: TritonServer, client: Client) -> None:
    before = cancelled(tiny)
    # Prompts that begin differently and fill most of HBM each: no two of them run at once.
    requests = [
        {"input_ids": [number] * 700, "stream": False, "max_tokens": 500, "sampling_parameters": ENDLESS}
        for number in (7, 8, 9, 10)
    ]
    connections = [send(tiny, client, request) for request in requests]
    deadline = time.monotonic() + 20
    while sum(counts := running_and_queued(tiny)) < 4:
        assert time.monotonic() < deadline, counts
        time.sleep(0.05)
    assert counts[0] >= 1 and counts[1] >= 1, "some run and some wait"
    for connection in connections:
        connection.stop_stream(cancel_requests=True)
        connection.close()
    wait_until_cancelled(tiny, before + 4)
    assert running_and_queued(tiny) == (0, 0)
    answer = list(client.infer({**requests[0], "input_ids": [11] * 100, "max_tokens": LONG}, timeout_s=60))
    assert len(answer[0].outputs["output_ids"]) == LONG, "the blocks of the cancelled requests are missing"


def test_closing_generate_stream_ends_its_request(tiny: TritonServer) -> None:
    before = cancelled(tiny)
    connection = http.client.HTTPConnection("localhost", tiny.ports.http, timeout=20)
    body = {"text_input": "tell me", "stream": True, "max_tokens": LONG, "sampling_parameters": ENDLESS}
    connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200
    assert response.read(10).startswith(b"data:")
    response.close()
    connection.close()
    wait_until_cancelled(tiny, before + 1)
