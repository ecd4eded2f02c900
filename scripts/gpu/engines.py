"""Whole engines on the device: their tokens and logits beside those of the CPU, and how fast they decode.

One context, wholly in HBM, then with most of it attended in place in DRAM, then with most of it staged from NVMe. What
was streamed is asserted, so that nothing passes for want of it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence as Parts
from pathlib import Path
from typing import NamedTuple

import torch

from gpu.checkpoint import Shape, make_checkpoint
from gpu.correctness import Line
from gpu.machine import Machine
from gpu.speed import Speed
from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout
from kvtier.device import Device, make_device
from kvtier.device.cuda import CudaDevice
from kvtier.runner import RestingPass
from kvtier.sequence import ScheduledSequence

EXACT = Shape(4, 1024, 8, 4, 2816, 8192, 4096, "float32")
FAST = Shape(16, 2048, 16, 4, 5632, 32000, 16384, "bfloat16")
FEW = Shape(4, 32, 2, 1, 64, 300, 256, "float32")
LOGIT_TOLERANCE = 1e-4
"""Of the largest logit, in fp32."""
PLACES = ("HBM", "DRAM", "NVMe")
SPARE_BLOCKS = 2
"""Slots of HBM that a hung disk may keep, with one reader and one writer."""


class Setting(NamedTuple):
    """One request, and the model that answers it."""

    model: Path
    shape: Shape
    block_tokens: int
    prompt_tokens: int
    tokens: int

    @property
    def layout(self) -> KVLayout:
        """Of its rows."""
        shape = self.shape
        return KVLayout(shape.layers, shape.kv_heads, shape.head_dim, self.block_tokens, shape.dtype)

    def config(self, place: str, folder: Path) -> EngineConfig:
        """An engine in which most of the context lies in `place`."""
        layout, blocks = self.layout, self.layout.block_count(self.prompt_tokens + self.tokens)
        slot_bytes = layout.row_bytes + 4096
        values: dict[str, object] = {
            "model": self.model,
            "block_tokens": self.block_tokens,
            "sharing": False,
            "io.readers": 1,
            "io.writers": 1,
            "scheduler.streamed_max": 1,
            "scheduler.streamed_hbm": 1.0,
            "tiers.load": "always",
            "tiers.dram.bytes": 0,
            "tiers.hbm.bytes": 2 * blocks * layout.row_bytes,
        }
        if place != "HBM":
            values["tiers.hbm.bytes"] = (blocks // 4 + 2 + SPARE_BLOCKS) * layout.row_bytes
            values["tiers.dram.bytes"] = 2 * (blocks + 4) * slot_bytes
        if place == "NVMe":
            staging_bytes = 2 * max(1, layout.layers // 8) * blocks * layout.slice_bytes
            dram_bytes = staging_bytes + (blocks // 4 + 1) * slot_bytes
            values |= {
                "tiers.dram.bytes": dram_bytes + dram_bytes // 7 + 4 * layout.row_bytes,  # an eighth is for landing
                "tiers.dram.staging_bytes": staging_bytes,
                "tiers.nvme.bytes": 2 * blocks * slot_bytes + (16 << 20),
                "tiers.nvme.path": folder / "cache",
            }
        return EngineConfig.load(None, values)


class Outcome(NamedTuple):
    """What an engine has answered."""

    token_ids: list[int]
    logits: torch.Tensor
    """fp32 [token, vocab] on the CPU."""
    token_s: float
    """Between two tokens, the median."""
    streamed_bytes: dict[str, int]


def check_engines(machine: Machine, folder: Path, few: bool) -> list[Line]:
    """The device's engines, all of fp32, beside one of the CPU that has everything in HBM."""
    setting = _setting(folder, FEW, 16, 97, 3) if few else _setting(folder, EXACT, 32, 1500, 24)
    expected = _run(setting.config("HBM", folder), setting, make_device("cpu"))
    outcomes = {place: _run(setting.config(place, folder), setting, _device(machine)) for place in PLACES}
    lines = [_compare(place, outcome, expected) for place, outcome in outcomes.items()]
    bits = [outcomes["HBM"].logits.equal(outcomes[place].logits) for place in PLACES[1:]]
    says = ", ".join(f"from {p} {'equal' if e else 'they differ'}" for p, e in zip(PLACES[1:], bits, strict=True))
    return [*lines, Line("engine, fp32 bits of logits beside those from HBM", all(bits), says)]


def measure_engines(machine: Machine, folder: Path, few: bool, limits: dict[str, float]) -> list[Speed]:
    """Decode of one sequence; bytes are K and V of the whole context, wherever they lie. `limits` in GB/s by place."""
    setting = _setting(folder, FEW, 16, 97, 3) if few else _setting(folder, FAST, 32, 8000, 48)
    speeds = []
    for place in PLACES:
        outcome = _run(setting.config(place, folder), setting, _device(machine))
        read_bytes = setting.prompt_tokens * setting.layout.token_bytes
        what = f"engine, most K and V in {place}: {1 / outcome.token_s:.1f} tokens/s"
        speeds.append(Speed(what, read_bytes / outcome.token_s / 1e9, limits[place], f"{place} alone"))
    return speeds


def _setting(folder: Path, shape: Shape, block_tokens: int, prompt_tokens: int, tokens: int) -> Setting:
    model = folder / f"model-{shape.dtype}-{shape.hidden}"
    if not model.exists():
        make_checkpoint(model, shape)
    return Setting(model, shape, block_tokens, prompt_tokens, tokens)


def _device(machine: Machine) -> Device:
    return CudaDevice(machine.device)


def _run(config: EngineConfig, setting: Setting, device: Device) -> Outcome:
    chance = random.Random(1)
    prompt = [chance.randrange(3, setting.shape.vocab) for _ in range(setting.prompt_tokens)]
    params = SamplingParams(max_tokens=setting.tokens, temperature=0.0, ignore_eos=True)
    with Engine(config, device=device) as engine:
        rows, times = _record(engine)
        token_ids = engine.generate([prompt], params)[0].token_ids
        stats = engine.stats()
    gaps = sorted(late - early for early, late in itertools.pairwise(times))
    streamed = {"DRAM": stats["streamed_dram_bytes"], "NVMe": stats["streamed_nvme_bytes"]}
    for place, tier in (("DRAM", "tiers.hbm.bytes"), ("NVMe", "tiers.nvme.path")):
        wanted = config.tiers.nvme.bytes > 0 if place == "NVMe" else config.tiers.dram.bytes > 0
        if wanted and not streamed[place]:
            raise RuntimeError(f"nothing was streamed from {place}: look at {tier}")
    return Outcome(token_ids, torch.cat(rows), gaps[len(gaps) // 2], streamed)


def _record(engine: Engine) -> tuple[list[torch.Tensor], list[float]]:
    """Every row of logits that the engine samples from, from now on, and when it was on the CPU, in seconds."""
    rows: list[torch.Tensor] = []
    times: list[float] = []
    inner, end = engine._runner.logits, engine._runner.end_logits

    def keep(values: torch.Tensor) -> torch.Tensor:
        rows.append(values.cpu().clone())
        times.append(time.monotonic())
        return values

    def logits(parts: Parts[ScheduledSequence]) -> torch.Tensor:
        return keep(inner(parts))

    def end_logits(resting: RestingPass) -> torch.Tensor:
        return keep(end(resting))

    engine._runner.logits = logits  # type: ignore[method-assign]
    engine._runner.end_logits = end_logits  # type: ignore[method-assign]
    return rows, times


def _compare(place: str, found: Outcome, expected: Outcome) -> Line:
    name = f"engine, most K and V in {place}, beside the CPU"
    if found.token_ids != expected.token_ids or found.logits.shape != expected.logits.shape:
        return Line(name, False, f"tokens {found.token_ids}, not {expected.token_ids}")
    finite = expected.logits.isfinite()
    error = float((found.logits - expected.logits)[finite].abs().max() / expected.logits[finite].abs().max())
    streamed = ", ".join(f"{count >> 10} KiB from {tier}" for tier, count in found.streamed_bytes.items() if count)
    right = error <= LOGIT_TOLERANCE
    return Line(name, right, f"tokens equal, logits off by {error:.1e} ({LOGIT_TOLERANCE:.0e}) {streamed}".rstrip())
