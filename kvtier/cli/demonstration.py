"""The quickstart's proof: one long prompt, answered cold, from HBM, from DRAM and from NVMe by a running server.

Blocks are pushed down as in real life, by other prompts; HBM and DRAM are made so small that a few of them do it. Owns
those sizes, the order of the requests and what must hold afterwards. Knows no server process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.table import Table

from kvtier.cli.ledger import QUESTION, ledger
from kvtier.cli.terminal import TIER_NAMES
from kvtier.client import Client, Response

OVERRIDES = {
    "dtype": "float32",  # exact to the bit, however a prompt was computed: the same answer is no luck then
    "tiers.hbm.bytes": "142MiB",  # 100 blocks of 1,440 KiB, 4 of them spare: 3,072 tokens
    "tiers.dram.bytes": "280MiB",  # 198 blocks
    "tiers.dram.staging_bytes": 0,  # nothing here is longer than HBM
    "tiers.nvme.bytes": "1GiB",
    "tiers.nvme.policy": "through",
    "eviction": "lru",
    "sharing": False,  # whatever else runs here: the origins shall be those of the script
}
PROMPT = ledger("Northgate", 107)
"""About 3,000 tokens: 93 full blocks."""
DESCRIPTION = f"""\
A stock list of 107 lines with a note in it, and the question: {QUESTION}
HBM holds about this one prompt ({OVERRIDES["tiers.hbm.bytes"]}), DRAM about two ({OVERRIDES["tiers.dram.bytes"]}).
Other prompts push its blocks down in between."""
FILLERS = [ledger(name, 58) for name in ("Aldwick", "Brimley", "Cotter", "Dunmore", "Eastlea", "Farley")]
"""About 1,650 tokens, 51 full blocks each. Two of them fill HBM, the other four DRAM."""
ANSWER_TOKENS = 24
SHARE_MIN = 0.9
"""Share of the prompt that must come from where it should: the last block and the one being written are computed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One answer to show: its name, the origin it must have, and the prompts that come before it."""

    name: str
    origin: str
    fillers: tuple[str, ...]


STAGES = (
    Stage("cold", "computed", ()),
    Stage("again, from HBM", "hbm", ()),
    Stage("again, from DRAM", "dram", tuple(FILLERS[:2])),
    Stage("again, from NVMe", "nvme", tuple(FILLERS[2:])),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What the client saw of one answer."""

    name: str
    ttft_s: float
    """From sending the request to the first response."""
    prompt_tokens: int
    origin: dict[str, int]
    """Prompt tokens by "hbm", "dram", "nvme" and "computed"."""
    text: str

    def as_json(self) -> dict[str, object]:
        """As the report has it."""
        return {**asdict(self), "ttft_s": round(self.ttft_s, 4)}


def demonstrate(client: Client, tell: Callable[[str], None]) -> list[Run]:
    """Run every stage; `tell` hears what is going on. Raises ServerError."""
    runs = []
    for stage in STAGES:
        for number, filler in enumerate(stage.fillers, 1):
            tell(f"pushing its blocks out of the way: other prompt {number} of {len(stage.fillers)}")
            ask(client, "filler", filler, max_tokens=1)
        tell(f"the prompt {stage.name}")
        runs.append(ask(client, stage.name, PROMPT, ANSWER_TOKENS))
    return runs


def ask(client: Client, name: str, message: str, max_tokens: int, on_text: Callable[[str], None] | None = None) -> Run:
    """One greedy chat answer, streamed; `on_text` gets its pieces as they come."""
    inputs: dict[str, object] = {
        "text_input": message,
        "chat": "true",
        "stream": True,
        "max_tokens": max_tokens,
        "sampling_parameters": '{"temperature": 0}',
        "return_num_input_tokens": True,
    }
    started = time.monotonic()
    ttft_s = 0.0
    pieces: list[str] = []
    last = Response({})
    for last in client.infer(inputs, timeout_s=600):
        ttft_s = ttft_s or time.monotonic() - started
        pieces.append(last.text)
        if on_text is not None:
            on_text(last.text)
    outputs = last.outputs
    origin = {tier: int(outputs[f"prompt_tokens_{tier}"]) for tier in TIER_NAMES}
    return Run(name, ttft_s, int(outputs["num_input_tokens"]), origin, "".join(pieces))


def tokens_from(runs: list[Run]) -> dict[str, int]:
    """Prompt tokens of all runs by tier."""
    return {tier: sum(run.origin[tier] for run in runs) for tier in ("hbm", "dram", "nvme")}


def failures(runs: list[Run]) -> list[str]:
    """What does not hold: an answer that differs from the cold one, or tokens that came from somewhere else."""
    found = []
    for stage, run in zip(STAGES, runs, strict=True):
        if run.text != runs[0].text:
            found.append(f"{run.name}: the answer differs from the cold one: {run.text!r} and {runs[0].text!r}")
        if run.origin[stage.origin] < SHARE_MIN * run.prompt_tokens:
            found.append(
                f"{run.name}: {run.origin[stage.origin]} of {run.prompt_tokens} prompt tokens are "
                f"{'' if stage.origin == 'computed' else 'from '}{TIER_NAMES[stage.origin]}, expected almost all"
            )
    return found


def table(runs: list[Run]) -> Table:
    """The runs side by side: time to the first token, and prompt tokens by origin."""
    result = Table(title=f"one prompt of {runs[0].prompt_tokens:,} tokens, and where they came from")
    result.add_column("")
    for heading in ("first token", "speed-up", *TIER_NAMES.values()):
        result.add_column(heading, justify="right")
    for run in runs:
        counts = [f"{run.origin[tier]:,}" if run.origin[tier] else "" for tier in TIER_NAMES]
        speed_up = f"{runs[0].ttft_s / run.ttft_s:.0f} x" if run is not runs[0] else ""
        result.add_row(run.name, f"{run.ttft_s:.2f} s", speed_up, *counts)
    return result
