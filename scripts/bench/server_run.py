"""The same measurements through gRPC, against a Triton server that this module starts.

The client runs in this process and shares the cores with the server, as its numbers show.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.results import GRPC, ORIGINS, Arrival, Decode, Ttft, decode_limit, decode_rate
from bench.workload import Workload
from kvtier.client import Client
from kvtier.config import IoConfig
from kvtier.door import ORIGIN_OUTPUTS
from kvtier.serving import Ports, ServerOptions, TritonServer

QUIET_S = 0.5
"""After an answer, for its blocks to reach the shelves."""
SHARE = 0.9
"""Of a prompt's tokens: from there on the prompt counts as coming from one origin."""
TIMEOUT_S = 600.0


@contextmanager
def serve(workload: Workload, root: Path, rows: tuple[int, int, int], folder: Path) -> Iterator[Client]:
    """A server with so many rows in HBM, DRAM and NVMe, on free ports, and a client of its one model."""
    hbm, dram, nvme = (count * (workload.layout.row_bytes + 4096) for count in rows)
    overrides = {key: str(value) for key, value in workload.tier_overrides(hbm, dram, nvme, folder).items()}
    options = ServerOptions(
        repository=root / "model_repository",
        ports=Ports.free(),
        overrides=overrides,
        server_directory=root / ".cache" / "triton",
        log=folder.with_suffix(".log"),
    )
    with TritonServer(options) as server, Client(server.grpc_url, "smollm2") as client:
        yield client


def measure_ttft(
    workload: Workload, root: Path, folder: Path, limits_s: dict[str, float], advance: Callable[[int], None]
) -> Iterator[Ttft]:
    """TTFT by origin. HBM holds one prompt and DRAM three, so prompts sent in turn come from everywhere.

    Each answer counts for the origin that nearly all of its prompt came from; mixed ones count for none.
    """
    settings = workload.settings
    rows = workload.layout.block_count(settings.prefix_tokens) + 3
    prompts = workload.prompts(settings.ttft_samples + 4, settings.prefix_tokens)
    samples: dict[str, list[float]] = defaultdict(list)
    proof: dict[str, dict[str, int]] = {}
    hbm_rows = rows + IoConfig().readers + rows // 31  # those that no sequence may count on
    with serve(workload, root, (hbm_rows, 3 * rows, (len(prompts) + 1) * rows), folder) as client:
        _stream(client, workload.prompts(1, settings.prefix_tokens)[0], 1)
        for _ in range(2):
            for index, prompt in enumerate(prompts):
                for sent in (prompt, prompt, prompts[index - 1]):
                    duration_s, _, origin = _stream(client, sent, 1)
                    time.sleep(QUIET_S)
                    most = max(origin, key=lambda name: origin[name])
                    if origin[most] >= SHARE * settings.prefix_tokens:
                        samples[most].append(duration_s)
                        proof[most] = origin
                    advance(1)
    for origin_name in ORIGINS:
        if samples[origin_name]:
            times = tuple(samples[origin_name])
            yield Ttft(GRPC, origin_name, settings.prefix_tokens, times, proof[origin_name], limits_s[origin_name])


def measure_decode(
    workload: Workload, root: Path, folder: Path, read_bytes_s: float, advance: Callable[[int], None]
) -> Iterator[Decode]:
    """Decode rates of all cases, one stream a sequence."""
    settings = workload.settings
    rows = workload.hbm_bytes() // workload.layout.row_bytes
    with serve(workload, root, (rows, rows, rows), folder) as client:
        for batch, context in settings.cases:
            prefixes = workload.prompts(batch, context - 1)
            for prefix in prefixes:
                _stream(client, prefix, 1)
            rates = []
            for _ in range(settings.rounds):
                tokens = workload.last_tokens(batch)
                prompts = [[*prefix, token] for prefix, token in zip(prefixes, tokens, strict=True)]
                rates.append(decode_rate(_together(client, prompts, settings.output_tokens)))
                time.sleep(QUIET_S)
                advance(1)
            kv_bytes = (context + settings.output_tokens // 2) * workload.layout.token_bytes
            yield Decode(
                GRPC, batch, context, tuple(rates), decode_limit(workload.weights_bytes, kv_bytes, batch, read_bytes_s)
            )


def _together(client: Client, prompts: list[list[int]], max_tokens: int) -> list[list[Arrival]]:
    found: list[list[Arrival]] = [[] for _ in prompts]

    def run(index: int) -> None:
        found[index] = _stream(client, prompts[index], max_tokens)[1]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found), "a stream failed; the server's log says why"
    return found


def _stream(client: Client, prompt: list[int], max_tokens: int) -> tuple[float, list[Arrival], dict[str, int]]:
    """Time to the first token, arrivals, and the prompt's tokens by origin."""
    sampling = json.dumps({"temperature": 0, "ignore_eos": True})
    inputs: dict[str, object] = {
        "input_ids": prompt,
        "stream": True,
        "max_tokens": max_tokens,
        "sampling_parameters": sampling,
        "return_kv_cache_reuse_stats": True,
    }
    started = time.perf_counter()
    arrivals: list[Arrival] = []
    origin: dict[str, int] = {}
    for response in client.infer(inputs, timeout_s=TIMEOUT_S):
        tokens = response.outputs.get("output_ids", [])
        arrivals.append((time.perf_counter(), 1 if isinstance(tokens, int) else len(tokens)))
        if all(name in response.outputs for name in ORIGIN_OUTPUTS.values()):
            origin = {key: int(response.outputs[name]) for key, name in ORIGIN_OUTPUTS.items()}
    return arrivals[0][0] - started, arrivals, origin
