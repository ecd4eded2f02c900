"""Compiles the Triton-language programs for a GPU of compute capability 9.0 that need not be there, and counts reads.

A program of its own, since a process that interprets them cannot compile them. Run by unit/test_triton_kernel.py.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.attention import triton_programs as programs

CAPABILITY = 90
POINTERS = {"k": "bf16", "v": "bf16", "q": "bf16", "tables": "i64", "rows": "i64", "lengths": "i32", "offsets": "i32"}
POINTERS |= {"query_starts": "i32", "out": "fp32", "sums": "fp32", "parts": "fp32", "part_sums": "fp32", "lse": "fp32"}
POINTERS |= {"target": "i32"}
LLAMA = {"KV_HEADS": 8, "GROUP": 4, "GROUP_PADDED": 16, "QUERIES": 1, "DECODE": True, "SPLIT": True, "TOKENS": 16}
LLAMA |= {"DIM": 128, "DIM_PADDED": 128, "BLOCK_TOKENS": 32, "DTYPE": tl.bfloat16, "DOT": tl.bfloat16}
LLAMA |= {"VECTOR_BYTES": 256, "HEAD_BYTES": 8192, "VALUE_BYTES": 65536, "ROW_BYTES": 131072}


def assembly(program: triton.JITFunction) -> str:
    """PTX of one program. Every pointer and stride is a multiple of 16, as those of torch's tensors are."""
    signature, constants, hints = {}, {}, {}
    for place, name in enumerate(program.arg_names):
        if name in LLAMA:
            signature[name], constants[name] = "constexpr", LLAMA[name]
        elif name in POINTERS:
            signature[name] = f"*{POINTERS[name]}"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if name in POINTERS or name.endswith("_stride"):
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(program, signature, constants, hints)
    target = GPUTarget("cuda", CAPABILITY, 32)
    return str(triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"])


def main() -> None:
    """One line for each program; an error of the compiler ends it."""
    for program in (programs.append, programs.attend, programs.join, programs.gather):
        ptx = assembly(program)
        copies = [int(size, 0) for size in re.findall(r"cp\.async\.\w+\.shared\.global.*?, (0x\w+|\d+)", ptx)]
        vectors, addresses = copies.count(16), copies.count(8)
        reads = len(re.findall(r"ld\.global[.\w]*\.v4\.b32", ptx))
        narrow = len(copies) - vectors - addresses + len(re.findall(r"ld\.global[.\w]*\.b16", ptx))
        says = f"{vectors} copies of 16 bytes, {addresses} of 8, {narrow} narrower reads, {reads} of 16"
        print(f"{program.__name__}: {says}")


if __name__ == "__main__":
    main()
