"""Compiles the Triton-language programs for a GPU of compute capability 9.0 that need not be there, and counts reads.

What is compiled is what `TritonKernelAttention` starts for a layout: programs, constants and options are taken from its
calls. A program of its own, since a process that interprets them cannot compile them. Run by
equivalence/test_triton_kernel.py. `compile_programs.py all`: whatever scripts/check_gpu compiles, which takes minutes.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.attention import AttentionBatch, triton_kernel
from kvtier.attention import triton_programs as programs
from kvtier.attention.triton_kernel import TritonKernelAttention
from kvtier.block import KVLayout

CAPABILITY = 90
SHARED_BYTES_MAX = 227 << 10
"""What one program may have there."""
OPTIONS = ("enable_fp_fusion", "num_stages")
LLAMA = (4, 8, 128, 32)


class Starts:
    """Stands for a program, and keeps what it is started with."""

    def __init__(self, program: triton.JITFunction, found: dict[str, Any]) -> None:
        self._program = program
        self._found = found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._keep

    def _keep(self, *values: object, **named: object) -> None:
        program = self._program
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(program.arg_names, values, strict=False)) | named
        signature, constants, hints = {}, {}, {}
        for place, name in enumerate(program.arg_names):
            value = given[name]
            if name in named:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + str(triton.runtime.jit.mangle_type(value)).removeprefix("*")
                hints[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and name not in programs.COUNTS:
                    hints[(place,)] = [["tt.divisibility", 16]]
        says = ", ".join(f"{name} {value}" for name, value in constants.items() if name.isupper())
        self._found[f"{program.__name__}({says})"] = (ASTSource(program, signature, constants, hints), options)


def start(shape: tuple[int, int, int, int], dtype: str) -> None:
    """Start what there is for passes of one and of many queries, over one segment and several, split and whole."""
    group, kv_heads, head_dim, block_tokens = shape
    layout, kind = KVLayout(2, kv_heads, head_dim, block_tokens, dtype), getattr(torch, dtype)
    for blocks, tokens in itertools.product((512 // block_tokens, 1100 // block_tokens), (1, 40)):
        q, k = (torch.zeros(tokens, heads, head_dim, dtype=kind) for heads in (group * kv_heads, kv_heads))
        int32s = [torch.tensor(values, dtype=torch.int32) for values in ([0, tokens], [500], [0] * tokens)]
        table = torch.zeros(1, blocks, dtype=torch.int64)
        batch = AttentionBatch(table, int32s[0], int32s[1], torch.zeros(tokens, dtype=torch.int64), int32s[2])
        backend = TritonKernelAttention()
        backend.append(k, k, batch, layout, 1)
        backend.attend(q, batch, layout, 1, 0.1, None)
    triton_kernel.gather(table[0, :1], 4096, torch.zeros(1, 8192, dtype=torch.uint8))


def main() -> None:
    """A line for each program; an error of the compiler ends it. Status 1: one takes more shared memory than fits."""
    found: dict[str, Any] = {}
    for name in ("append", "attend", "join", "gather"):
        setattr(programs, name, Starts(getattr(programs, name), found))
    start(LLAMA, "bfloat16")
    if sys.argv[1:] == ["all"]:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
        from gpu.correctness import CASES

        for case in {case[:5] for cases in CASES for case in cases}:
            start(case[:4], case[4])
    worst = 0
    for name, (source, options) in found.items():
        began = time.monotonic()
        kernel = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
        ptx, shared = str(kernel.asm["ptx"]), int(kernel.metadata.shared)
        copies = [int(size, 0) for size in re.findall(r"cp\.async\.\w+\.shared\.global.*?, (0x\w+|\d+)", ptx)]
        vectors, addresses = copies.count(16), copies.count(8)
        reads = len(re.findall(r"ld\.global[.\w]*\.v4\.b32", ptx))
        narrow = len(copies) - vectors - addresses + len(re.findall(r"ld\.global[.\w]*\.b16", ptx))
        says = f"{vectors} copies of 16 bytes, {addresses} of 8, {narrow} narrower reads, {reads} of 16"
        print(f"{name}: {says}; {shared >> 10} KiB shared, {time.monotonic() - began:.0f} s", flush=True)
        worst = max(worst, shared)
    sys.exit(int(worst > SHARED_BYTES_MAX))


if __name__ == "__main__":
    main()
