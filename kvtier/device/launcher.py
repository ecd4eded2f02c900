"""What a device that works on its own time can do for passes: a lane beside them, recordings, gathering slices.

Knows neither models nor sequences. Each device that is not the CPU has one; made at start, used on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from kvtier.device.copies import Lane, make_lane

_log = logging.getLogger(__name__)

Work = Callable[[], None]
"""Gives the current stream something to do, and waits for nothing."""


class Launcher(Protocol):
    """See the module."""

    @property
    def lane(self) -> Lane:
        """Beside the passes, for what they need next."""

    def record(self, work: Work) -> Work:
        """A call that has the device do again, on the same memory, what `work` gives it, with less for the host to do.

        What `work` allocates belongs to the recording. It may be done now already, so it must come to the same if it
        is done twice.
        """

    def gather(self, rows: torch.Tensor, offset: int, target: torch.Tensor) -> None:
        """Give the current stream a copy, into `target` uint8 [row, byte], of the bytes at `rows` int64 [row] + offset.

        Rows lie in any memory that the device reaches. Bytes are a multiple of 4 KiB, addresses of 16.
        """


class CudaLauncher:
    """`Launcher` of a GPU, or of the CPU in its place, which has done all it is given when the call returns."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self.lane = make_lane(place)
        self._pool = torch.cuda.graph_pool_handle() if place.type == "cuda" else None
        """Memory that recordings share: none runs beside another."""

    def record(self, work: Work) -> Work:
        """See `Launcher`. What cannot be recorded is called instead, each time, and that is said."""
        if self._place.type != "cuda":
            return work
        work()  # its kernels are compiled and loaded, which nothing that is recorded may be
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads wait for events of their own meanwhile. The outer block brings the stream back, which a
            # recording that fails does not.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._place)),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError as error:
            _log.warning("decode passes of one shape run without a CUDA graph: %s", str(error).splitlines()[0])
            return work
        return graph.replay

    def gather(self, rows: torch.Tensor, offset: int, target: torch.Tensor) -> None:
        """See `Launcher`."""
        from kvtier.attention.triton_kernel import gather

        gather(rows, offset, target)
