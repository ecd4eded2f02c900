"""Whole engines on the device: their tokens and logits beside those of the CPU, and how fast they are.

One context, wholly in HBM, then with most of it attended in place in DRAM, then with most of it staged from NVMe; and
again without graphs for decode passes and without slices brought near for a prefill. What was streamed, replayed and
brought near is counted, so that nothing passes for want of it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Parts
from pathlib import Path
from typing import NamedTuple

import torch

from gpu.checkpoint import Shape, make_checkpoint
from gpu.found import Line, Speed
from gpu.machine import Machine
from gpu.speed import DISK, HBM, PCIE
from kvtier import Engine, EngineConfig, SamplingParams
from kvtier.block import KVLayout
from kvtier.device import Device, make_device
from kvtier.device.cuda import CudaDevice
from kvtier.runner import RestingPass
from kvtier.sequence import ScheduledSequence

EXACT = Shape(4, 4096, 32, 8, 2816, 8192, 4096, "float32")
"""Its kernels are those that were checked first, so that none is compiled again."""
FAST = Shape(16, 2048, 16, 4, 5632, 32000, 16384, "bfloat16")
FEW = Shape(4, 32, 2, 1, 64, 300, 256, "float32")
LOGIT_TOLERANCE = 1e-4
"""Of the largest logit, in fp32."""
LIMITS = {"HBM": HBM, "DRAM": PCIE, "NVMe": DISK}
"""What bounds reading K and V from each place."""
SPARE_BLOCKS = 2
"""Slots of HBM that a hung disk may keep, with one reader and one writer."""


class Setting(NamedTuple):
    """One request, and the model that answers it."""

    model: Path
    shape: Shape
    block_tokens: int
    prompt_tokens: int
    tokens: int
    share: int
    """HBM holds one in so many blocks where the context is larger."""

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
            values["tiers.hbm.bytes"] = (blocks // self.share + 2 + SPARE_BLOCKS) * layout.row_bytes
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
    prefill_s: float
    """To the first token."""
    streamed_bytes: dict[str, int]
    replayed: int
    """Decode passes in graphs."""
    brought: int
    """Slices brought near."""


def check_engines(machine: Machine, folder: Path, few: bool) -> Iterator[Line]:
    """The device's engines, all of fp32, beside one of the CPU that has everything in HBM."""
    setting = _setting(folder, FEW, 16, 97, 3, 4) if few else _setting(folder, EXACT, 32, 1500, 24, 4)
    expected = _run(setting.config("HBM", folder), setting, make_device("cpu"))
    outcomes: dict[str, Outcome] = {}
    for place in LIMITS:
        outcomes[place] = _run(setting.config(place, folder), setting, _device(machine))
        yield compare(f"engine, most K and V in {place}, beside the CPU", outcomes[place], expected)
    plain = _run(setting.config("DRAM", folder), setting, _device(machine, plain=True))
    yield _compare_plain(outcomes["DRAM"], plain)
    others = [place for place in LIMITS if place != "HBM"]
    bits = [outcomes["HBM"].logits.equal(outcomes[place].logits) for place in others]
    says = ", ".join(f"from {p} {'equal' if e else 'they differ'}" for p, e in zip(others, bits, strict=True))
    yield Line("engine, fp32 bits of logits beside those from HBM", all(bits), says)


def measure_engine(machine: Machine, folder: Path, few: bool, place: str, plain: bool) -> Speed:
    """Decode of one sequence, most of which lies in `place`; bytes are K and V of the whole context, wherever."""
    setting = _setting(folder, FEW, 16, 97, 3, 4) if few else _setting(folder, FAST, 32, 8000, 48, 2)
    outcome = _run(setting.config(place, folder), setting, _device(machine, plain))
    read_bytes = setting.prompt_tokens * setting.layout.token_bytes
    prefill = setting.prompt_tokens / outcome.prefill_s
    what = f"engine, most K and V in {place}: {1 / outcome.token_s:.1f} tokens/s, prefill {prefill:.0f}"
    what += ", no graphs, nothing near" if plain else ""
    return Speed(what, read_bytes / outcome.token_s / 1e9, LIMITS[place])


def _setting(folder: Path, shape: Shape, block_tokens: int, prompt_tokens: int, tokens: int, share: int) -> Setting:
    model = folder / f"model-{shape.dtype}-{shape.hidden}"
    if not model.exists():
        make_checkpoint(model.with_suffix(".part"), shape).rename(model)  # it is whole, whenever this is ended
    return Setting(model, shape, block_tokens, prompt_tokens, tokens, share)


def _device(machine: Machine, plain: bool = False) -> Device:
    """`plain`: passes are given to it one operation at a time, and rows read where they are."""
    device = CudaDevice(machine.device)
    if plain:
        device.launcher = None
    return device


def _run(config: EngineConfig, setting: Setting, device: Device) -> Outcome:
    chance = random.Random(1)
    prompt = [chance.randrange(3, setting.shape.vocab) for _ in range(setting.prompt_tokens)]
    params = SamplingParams(max_tokens=setting.tokens, temperature=0.0, ignore_eos=True)
    with Engine(config, device=device) as engine:
        rows, times = _record(engine)
        began = time.monotonic()
        token_ids = engine.generate([prompt], params)[0].token_ids
        stats, runner = engine.stats(), engine._runner
    gaps = sorted(late - early for early, late in itertools.pairwise(times))
    streamed = {"DRAM": stats["streamed_dram_bytes"], "NVMe": stats["streamed_nvme_bytes"]}
    for place, tier in (("DRAM", "tiers.hbm.bytes"), ("NVMe", "tiers.nvme.path")):
        wanted = config.tiers.nvme.bytes > 0 if place == "NVMe" else config.tiers.dram.bytes > 0
        if wanted and not streamed[place]:
            raise RuntimeError(f"nothing was streamed from {place}: look at {tier}")
    replayed = runner.decodes.pass_count if runner.decodes is not None else 0
    brought = runner.near.brought_count if runner.near is not None else 0
    prefill_s = times[0] - began
    return Outcome(token_ids, torch.cat(rows), gaps[len(gaps) // 2], prefill_s, streamed, replayed, brought)


def _record(engine: Engine) -> tuple[list[torch.Tensor], list[float]]:
    """Every row of logits that the engine samples from, from now on, and when it was on the CPU, in seconds."""
    rows: list[torch.Tensor] = []
    times: list[float] = []
    inner, end = engine._runner.logits, engine._runner.end_logits

    def keep(values: torch.Tensor) -> torch.Tensor:
        if len(values):  # a chunk before the last has none
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


def compare(name: str, found: Outcome, expected: Outcome) -> Line:
    """Logits within the tolerance, and tokens equal up to the first whose two best logits are no further apart."""
    limit = LOGIT_TOLERANCE
    pairs = zip(found.token_ids, expected.token_ids, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rows = min(same + 1, len(expected.logits))  # those after it are of other tokens
    if found.logits.shape != expected.logits.shape:
        return Line(name, False, f"logits {tuple(found.logits.shape)}, not {tuple(expected.logits.shape)}")
    wanted, got = expected.logits[:rows], found.logits[:rows]
    finite = wanted.isfinite()
    largest = float(wanted[finite].abs().max())
    error = float((got - wanted)[finite].abs().max()) / largest
    right, says = error <= limit, f"logits off by {error:.1e} ({limit:.0e})"
    if same < len(expected.token_ids):
        best, next_best = wanted[-1].topk(2).values.tolist()
        right &= best - next_best <= 2 * limit * largest
        says = f"token {same} differs, its two best {best - next_best:.1e} apart; {says}"
    streamed = ", ".join(f"{count >> 10} KiB from {tier}" for tier, count in found.streamed_bytes.items() if count)
    return Line(name, right, f"{says} {streamed}".rstrip())


def _compare_plain(found: Outcome, plain: Outcome) -> Line:
    """Passes that were replayed and slices that were brought near, and there must be some, beside none."""
    line = compare("engine, decode in graphs and slices brought near, beside neither", found, plain)
    counted = found.replayed > 0 and found.brought > 0 and plain.replayed == plain.brought == 0
    bits = "equal" if found.logits.equal(plain.logits) else "other"
    says = f"{line.says}; bits {bits}, {found.replayed} passes replayed, {found.brought} slices brought near"
    return line._replace(right=line.right and counted, says=says)
