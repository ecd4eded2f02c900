"""Rows written and attended by the kernels on the device, against dense attention in fp64 on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from gpu.found import Line
from gpu.machine import Machine
from kvtier.attention import AttentionBatch, triton_kernel
from kvtier.block import KVLayout
from kvtier.device.arena import DeviceArena

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1.5e-3}


class Case(NamedTuple):
    """One sequence: its shape, and the cuts at which it is given to the kernels."""

    group: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    window: int | None
    cuts: tuple[int, ...]
    mapped: bool = False
    """Its rows lie in host memory."""


SHAPES = ((4, 8, 128, 32), (1, 4, 64, 8), (8, 1, 80, 16), (3, 3, 256, 128))
"""Query heads for each KV head, KV heads, head_dim, block tokens; the first is that of Llama 3.1 8B."""
MAPPED = [Case(*SHAPES[0], dtype, None, (0, 700, 1400, 1401), mapped=True) for dtype in TOLERANCE]
CASES = [
    [
        Case(*shape, dtype, window, (0, 1100, 1101, 1102))
        for dtype, window in itertools.product(TOLERANCE, (None, 700))
        if shape[2] < 256 or dtype != "float32"  # which takes longest to compile
    ]
    for shape in SHAPES
]
CASES.insert(1, MAPPED)
FEW = [
    [Case(2, 1, 32, 16, "float32", None, (0, 20, 21))],
    [Case(2, 1, 32, 16, "bfloat16", 9, (0, 20, 21), mapped=True)],
    *([] for _ in SHAPES[1:]),
]


def check(machine: Machine, group: int, few: bool) -> Iterator[Line]:
    """The cases of one group."""
    for case in (FEW if few else CASES)[group]:
        yield _check_case(machine, case)


class _Chat:
    """A sequence with all of its q, k and v, and rows on the device or mapped for it."""

    def __init__(self, machine: Machine, case: Case) -> None:
        random = torch.Generator().manual_seed(case.head_dim)
        self.layout = KVLayout(2, case.kv_heads, case.head_dim, case.block_tokens, case.dtype)
        dtype = getattr(torch, case.dtype)
        self.case, self.length, heads = case, case.cuts[-1], case.group * case.kv_heads
        self.q = (torch.randn(self.length, heads, case.head_dim, generator=random) * 2).to(dtype)
        shape = (self.length, case.kv_heads, case.head_dim)
        self.k, self.v = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
        blocks = self.layout.block_count(self.length)
        self.scale = case.head_dim**-0.5
        if case.mapped:
            self.memory = machine.map_host(blocks * self.layout.row_bytes)
            addresses = [self.memory.device_address(slot * self.layout.row_bytes) for slot in range(blocks)]
        else:
            self.arena = DeviceArena(self.layout, blocks, machine.device)
            for slot in range(blocks):
                self.arena.row(slot).fill_(0xFF)  # NaN wherever nothing is written
            addresses = [self.arena.address(slot) for slot in range(blocks)]
        self.table = torch.tensor(addresses)

    def run(self, machine: Machine, cuts: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of the positions between the first and the last cut, a pass for each piece."""
        outs, lses, device = [], [], machine.device
        for begin, end in itertools.pairwise(cuts):
            position = torch.arange(begin, end)
            batch = AttentionBatch(
                self.table[None].to(device),
                torch.tensor([0, end - begin], dtype=torch.int32, device=device),
                torch.tensor([end], dtype=torch.int32, device=device),
                self.table[position // self.layout.block_tokens].to(device),
                (position % self.layout.block_tokens).int().to(device),
            )
            q, k, v = (x[begin:end].to(device) for x in (self.q, self.k, self.v))
            machine.backend.append(k, v, batch, self.layout, 1)
            out, lse = machine.backend.attend(q, batch, self.layout, 1, self.scale, self.case.window)
            outs.append(out.cpu())
            lses.append(lse.cpu())
        return torch.cat(outs), torch.cat(lses)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of all positions in fp64."""
        k, v = (x.double().repeat_interleave(self.case.group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * self.scale
        gap = torch.arange(self.length)[:, None] - torch.arange(self.length)
        scores = scores.masked_fill((gap < 0) | (gap >= (self.case.window or self.length)), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def _check_case(machine: Machine, case: Case) -> Line:
    chat = _Chat(machine, case)
    out, lse = chat.run(machine, case.cuts)
    expected_out, expected_lse = chat.dense()
    limit = TOLERANCE[case.dtype]
    errors = (out.double() - expected_out).abs() / (1 + expected_out.abs())
    error, lse_error = float(errors.max()), float((lse.double() - expected_lse).abs().max())
    where = "mapped DRAM" if case.mapped else "HBM"
    name = (
        f"{where} {case.dtype}, {case.group} x {case.kv_heads} heads of {case.head_dim}, blocks of {case.block_tokens}"
    )
    right = error <= limit and lse_error <= 1e-4  # NaN is not at most anything
    return Line(f"{name}, window {case.window}", right, f"out off by {error:.1e} ({limit:.1e}), lse {lse_error:.1e}")


def check_bits(machine: Machine, few: bool) -> list[Line]:
    """Contexts of several segments in one piece and in many, split and whole, in fp32."""
    chat = _Chat(machine, (FEW if few else CASES)[0][0]._replace(dtype="float32", window=None))
    length = chat.length
    cuts = [0, length // 3, length // 2, length - 2, length - 1, length]
    results = [chat.run(machine, (0, length)), chat.run(machine, cuts)]
    before, triton_kernel.PARTS_BYTES_MAX = triton_kernel.PARTS_BYTES_MAX, 0
    results += [chat.run(machine, (0, length)), chat.run(machine, cuts)]
    triton_kernel.PARTS_BYTES_MAX = before
    same = all(torch.equal(results[0][0], out) and torch.equal(results[0][1], lse) for out, lse in results[1:])
    return [Line("fp32 bits, in chunks and in segments", same, "equal" if same else "they differ")]
