"""Host memory that a CUDA device reads and writes in place: registered (pinned and mapped), by the device's addresses.

Asks the CUDA runtime that torch has loaded, through ctypes, since torch does not pass on cudaHostGetDevicePointer.
Knows no rows; whoever owns the memory (a slab, a staging ring) registers it once per process, after it was allocated.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from kvtier.errors import ConfigError

PORTABLE, MAPPED = 1, 2
"""Flags of cudaHostRegister: pinned for every context; with an address for the device."""


class MappingError(ConfigError):
    """The device cannot have this memory; the message says what the CUDA runtime said, and the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"device: host memory cannot be mapped for it ({reason}); lower tiers.dram.bytes, or set device: cpu"
        )


class Runtime(Protocol):
    """The functions of the CUDA runtime that are used here. Each returns 0 or an error number."""

    def cudaHostRegister(self, address: ctypes.c_void_p, count: ctypes.c_size_t, flags: int) -> int: ...  # noqa: N802

    def cudaHostUnregister(self, address: ctypes.c_void_p) -> int: ...  # noqa: N802

    def cudaHostGetDevicePointer(  # noqa: N802
        self, pointer: ctypes._CArgObject, address: ctypes.c_void_p, flags: int
    ) -> int: ...


def cuda_runtime() -> Runtime:
    """The runtime library of torch's CUDA, with a context made. MappingError where torch has none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise MappingError("torch finds no CUDA device")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:
        library: Runtime = ctypes.CDLL(name)
    except OSError as error:
        raise MappingError(f"{name} cannot be loaded: {error}") from None
    return library


class MappedHost:
    """`length` bytes of host memory from `address` on, registered until `close`."""

    def __init__(self, runtime: Runtime, address: int, length: int) -> None:
        """The memory must have all its pages and outlive this. MappingError if the runtime refuses it."""
        assert address > 0 and length > 0
        self._runtime = runtime
        self._host = ctypes.c_void_p(address)
        self._length = length
        self._device = 0
        _check(runtime.cudaHostRegister(self._host, ctypes.c_size_t(length), PORTABLE | MAPPED), "cudaHostRegister")
        device = ctypes.c_void_p()
        try:
            error = runtime.cudaHostGetDevicePointer(ctypes.byref(device), self._host, 0)
            _check(error, "cudaHostGetDevicePointer")
            if not device.value:
                raise MappingError("cudaHostGetDevicePointer gave no address")
        except MappingError:
            runtime.cudaHostUnregister(self._host)
            raise
        self._device = device.value

    @property
    def address(self) -> int:
        """The device's address of the first byte."""
        return self.device_address(0)

    def device_address(self, offset: int) -> int:
        """The device's address of the byte at `offset`; never the host's by assumption."""
        assert self._device and 0 <= offset < self._length, offset
        return self._device + offset

    def close(self) -> None:
        """Let the memory go. Nothing on the device may use it any more."""
        if self._device:
            self._device = 0
            _check(self._runtime.cudaHostUnregister(self._host), "cudaHostUnregister")


def _check(error: int, function: str) -> None:
    if error:
        raise MappingError(f"{function}: CUDA error {error}")
