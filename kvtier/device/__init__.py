"""Where an engine's weights lie and its passes run: the CPU, or a CUDA device that no GPU has proved yet.

`base` is the seam that the engine knows. The rest is what a GPU needs besides kernels: rows in its memory, host memory
that it can reach, copies, a decode graph. All but `mapped` works on the CPU, too, so that tests hold it to bytes.
"""

from __future__ import annotations

from kvtier.device.base import Device
from kvtier.device.cuda import CudaDevice
from kvtier.device.host import HostDevice

__all__ = ["Device", "make_device"]


def make_device(name: str) -> Device:
    """The device that the configuration calls `name`. ConfigError if it is not there."""
    return HostDevice() if name == "cpu" else CudaDevice.find(name)
