"""The steps of check_gpu by name, in the order in which they are worth their time.

What a step needs is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpu.found import Line, Speed

if TYPE_CHECKING:
    from gpu.machine import Machine
    from gpu.speed import Geometry


class Scene(NamedTuple):
    """Where steps run."""

    machine: Machine
    geometry: Geometry
    folder: Path
    """For files; it stays from step to step."""
    few: bool
    """A rehearsal."""

    @classmethod
    def make(cls, folder: Path, context: int, rehearse: bool) -> Scene:
        """`context`: tokens of a sequence on a GPU."""
        from gpu.machine import Machine
        from gpu.speed import Geometry

        machine = Machine.rehearsal() if rehearse else Machine.cuda()
        return cls(machine, Geometry.tiny() if rehearse else Geometry.llama(context), folder, rehearse)


Step = Callable[[Scene], Iterable[Line | Speed]]


def _machine(scene: Scene) -> Iterable[Line]:
    yield Line("machine", True, f"{scene.machine.name}; {scene.geometry.says}")


def _copies(scene: Scene) -> Iterable[Speed]:
    from gpu.speed import copies

    return copies(scene.machine, scene.geometry)


def _kernels(place: int) -> Step:
    def step(scene: Scene) -> Iterable[Line]:
        from gpu.correctness import check

        return check(scene.machine, place, scene.few)

    return step


def _bits(scene: Scene) -> Iterable[Line]:
    from gpu.correctness import check_bits

    return check_bits(scene.machine, scene.few)


def _resident(scene: Scene) -> Iterable[Speed]:
    from gpu.speed import resident

    return resident(scene.machine, scene.geometry)


def _mapped(scene: Scene) -> Iterable[Speed]:
    from gpu.speed import mapped

    return mapped(scene.machine, scene.geometry)


def _nvme(scene: Scene) -> Iterable[Line | Speed]:
    from gpu.speed import from_nvme

    return from_nvme(scene.machine, scene.geometry, scene.folder)


def _prefill(scene: Scene) -> Iterable[Speed]:
    from gpu.prefill import measure_prefill

    return measure_prefill(scene.machine, scene.geometry)


def _engines(scene: Scene) -> Iterable[Line]:
    from gpu.engines import check_engines

    return check_engines(scene.machine, scene.folder, scene.few)


def _engine(place: str, plain: bool = False) -> Step:
    def step(scene: Scene) -> Iterable[Speed]:
        from gpu.engines import measure_engine

        return [measure_engine(scene.machine, scene.folder, scene.few, place, plain)]

    return step


STEPS: dict[str, Step] = {
    "machine": _machine,
    "copies": _copies,
    "kernels, as of Llama 3.1 8B": _kernels(0),
    "kernels, mapped DRAM": _kernels(1),
    "decode from HBM": _resident,
    "decode from DRAM": _mapped,
    "decode from NVMe": _nvme,
    "prefill from DRAM": _prefill,
    "engines beside the CPU": _engines,
    "engine, HBM": _engine("HBM"),
    "engine, DRAM": _engine("DRAM"),
    "engine, NVMe": _engine("NVMe"),
    "engine, HBM, plain": _engine("HBM", plain=True),
    "engine, DRAM, plain": _engine("DRAM", plain=True),
    "kernels, heads of 64": _kernels(2),
    "kernels, heads of 80": _kernels(3),
    "kernels, heads of 256": _kernels(4),
    "kernels, bits": _bits,
}
