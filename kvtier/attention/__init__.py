"""Paged attention: the contract (base.py) and its implementations, chosen by name.

Knows which implementation was built; the runner calls `make_backend` once, on the engine thread.
"""

from __future__ import annotations

import logging

import torch

from kvtier.attention.base import SPAN_TOKENS, AttentionBackend, AttentionBatch, merge
from kvtier.attention.reference import ReferenceAttention
from kvtier.errors import ConfigError

__all__ = ["SPAN_TOKENS", "AttentionBackend", "AttentionBatch", "make_backend", "merge"]

PLAIN = "plain"
"""The kernels that any CPU runs, among `_native.supported_isas()`."""
NAMES = ("auto", "native", "reference", "triton_kernel")


def make_backend(name: str, threads: int, head_dim: int | None = None) -> AttentionBackend:
    """The attention backend called `name`, one of `NAMES`, for heads of `head_dim` if that is known.

    "auto" is native where that was built and takes such heads, else reference.

    Raises ConfigError for another name, and for one that this machine or model cannot have. "triton_kernel" takes
    tensors and rows of a GPU, the others those of the CPU.
    """
    if name not in NAMES:
        raise ConfigError(f'attention backend: "{name}" is not one of {", ".join(NAMES)}')
    if name == "reference":
        return ReferenceAttention()
    if name == "triton_kernel":
        return _triton_kernel()
    try:
        from kvtier import _native
        from kvtier.attention.native import HEAD_DIMS, NativeAttention
    except ImportError as error:
        if name == "native":
            raise ConfigError(
                'attention backend: "native" was not built; install a C++ compiler and kvtier again, or choose "auto"'
            ) from error
        logging.getLogger(__name__).warning(
            "kvtier._native was not built (%s): attention runs in torch, many times slower in decode. "
            "Install a C++ compiler and then kvtier again.",
            error,
        )
        return ReferenceAttention()
    if head_dim is None or head_dim in HEAD_DIMS:
        if _native.supported_isas()[0] == PLAIN:
            logging.getLogger(__name__).warning(
                "this CPU has no vector instructions that the kernels know (AVX2 with FMA and F16C, or AVX-512): they "
                "run in plain C++, several times slower, and as exact"
            )
        return NativeAttention(threads)
    taken = f"kernels take heads of {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}, not {head_dim}"
    if name == "native":
        raise ConfigError(f'attention backend: "native" {taken}; choose "auto", which then runs in torch, slower')
    logging.getLogger(__name__).warning("attention runs in torch, many times slower in decode: the %s", taken)
    return ReferenceAttention()


def _triton_kernel() -> AttentionBackend:
    try:
        from kvtier.attention import triton_kernel
    except ImportError as error:
        raise ConfigError(
            'attention backend: "triton_kernel" needs the package triton, which comes with CUDA builds of torch; '
            "install kvtier[gpu]"
        ) from error
    if not (torch.cuda.is_available() or triton_kernel.INTERPRETED):
        raise ConfigError('attention backend: "triton_kernel" needs a CUDA device, and torch finds none')
    return triton_kernel.TritonKernelAttention()
