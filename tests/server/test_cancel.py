"""A client that goes away stops costing: its request ends and its blocks serve others."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import MODEL, metrics, total

from kvtier.client import Client, ServerError
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


def running_and_queued(server: TritonServer) -> tuple[float, float]:
    values = metrics(server)
    return total(values["kvtier_running_requests"]), total(values["kvtier_queued_requests"])


def test_a_whole_answer_and_a_queued_request_are_cancelled_too(tiny: TritonServer, client: Client) -> None:
    before = cancelled(tiny)
    whole = {"text_input": "tell me", "stream": False, "max_tokens": LONG, "sampling_parameters": ENDLESS}
    # Prompts that begin differently and fill most of HBM each: no two of them run at once.
    queued = [{**whole, "input_ids": [number] * 900, "max_tokens": 300} for number in (7, 8, 9)]
    for request in queued:
        del request["text_input"]

    def give_up(request: dict[str, object]) -> str:
        with pytest.raises(ServerError) as caught:
            list(client.infer(request, timeout_s=0.3))
        return caught.value.status

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(give_up, [whole, *queued]))
    assert set(statuses) <= {"DEADLINE_EXCEEDED", "CANCELLED"}
    wait_until_cancelled(tiny, before + 4)
    assert running_and_queued(tiny) == (0, 0)
    answer = list(client.infer({**whole, "max_tokens": LONG}, timeout_s=60))
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
