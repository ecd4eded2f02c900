"""A client that goes away stops costing: its request ends and its blocks serve others.

A request may end by itself before its client has gone: how fast the model is, the machine decides. So each test has
several rounds, and one in which clients were sooner must show what it is about.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable

import tritonclient.grpc as grpc
from conftest import MODEL, handed_over, settled, total, wait

from kvtier.client import Client
from kvtier.serving import TritonServer

ENDLESS = json.dumps({"temperature": 0, "ignore_eos": True})
LONG = 1000
"""Tokens of an answer that takes long and fills most of the tiny HBM."""
ROUNDS = 8


class Round:
    """What ends from now on; nothing is under way."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._before = settled(server)
        self._handed = handed_over(server)

    def wait_for(self, requests: int) -> None:
        """Until the engine has so many requests, or has had."""
        wait(lambda: handed_over(self._server) >= self._handed + requests)

    def end(self, requests: int) -> tuple[int, int, int]:
        """Once so many requests have ended: how many were cancelled, how many were not, and the tokens of all."""
        after = settled(self._server, self._handed + requests)

        def grown(name: str, **labels: str) -> int:
            return int(total(after[name], **labels) - total(self._before[name], **labels))

        cancelled = grown("kvtier_requests_total", outcome="cancelled")
        whole = grown("kvtier_requests_total", outcome="length")
        assert cancelled + whole == requests == grown("kvtier_requests_total")
        return cancelled, whole, grown("kvtier_generated_tokens_total")


def shows(attempt: Callable[[], bool]) -> bool:
    return any(attempt() for _ in range(ROUNDS))


def assert_no_block_is_missing(client: Client) -> None:
    request = {"input_ids": [250] * 100, "max_tokens": LONG, "sampling_parameters": ENDLESS}
    whole = list(client.infer(request, timeout_s=120))
    assert len(whole[0].outputs["output_ids"]) == LONG, "the blocks of the cancelled requests are missing"


def test_closing_a_grpc_stream_frees_its_blocks(tiny: TritonServer, client: Client) -> None:
    request = {"text_input": "tell me", "stream": True, "max_tokens": LONG, "sampling_parameters": ENDLESS}

    def all_four_cancelled() -> bool:
        this = Round(tiny)
        streams = [client.infer(request, timeout_s=120) for _ in range(4)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()
        cancelled, _, _ = this.end(4)
        return cancelled == 4

    assert shows(all_four_cancelled)
    assert_no_block_is_missing(client)


def send(server: TritonServer, client: Client, inputs: dict[str, object]) -> grpc.InferenceServerClient:
    """Send a request on a connection of its own and do not wait for anything."""
    connection = grpc.InferenceServerClient(server.grpc_url)
    connection.start_stream(lambda **_: None)
    connection.async_stream_infer(MODEL, [client._tensor(name, value) for name, value in inputs.items()])
    return connection


def test_whole_answers_running_and_queued_are_cancelled_too(tiny: TritonServer, client: Client) -> None:
    """No two of the requests fit HBM at once: of those cancelled one was running at most, the others waited."""
    tokens = 500
    requests = [
        {"input_ids": [number] * 700, "stream": False, "max_tokens": tokens, "sampling_parameters": ENDLESS}
        for number in range(7, 19)
    ]

    def one_running_and_another_queued_are_cancelled() -> bool:
        this = Round(tiny)
        connections = [send(tiny, client, request) for request in requests]
        this.wait_for(len(requests))
        for connection in connections:
            connection.stop_stream(cancel_requests=True)
            connection.close()
        cancelled, whole, generated = this.end(len(requests))
        return cancelled >= 2 and generated > whole * tokens

    assert shows(one_running_and_another_queued_are_cancelled)
    assert_no_block_is_missing(client)


def test_closing_generate_stream_ends_its_request(tiny: TritonServer) -> None:
    body = {"text_input": "tell me", "stream": True, "max_tokens": LONG, "sampling_parameters": ENDLESS}

    def it_is_cancelled() -> bool:
        this = Round(tiny)
        connection = http.client.HTTPConnection("localhost", tiny.ports.http, timeout=60)
        connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        assert response.read(10).startswith(b"data:")
        response.close()
        connection.close()
        cancelled, _, _ = this.end(1)
        return cancelled == 1

    assert shows(it_is_cancelled)
