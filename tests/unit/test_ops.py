"""Every implementation of the small operations: right against fp64, and row by row the same bits in any company.

Linear layers of few bf16 rows have kernels of their own and so tests of their own: test_few_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from kvtier.models.ops import NativeOps, Ops, TorchOps

try:
    from kvtier import _native

    ISAS = _native.supported_isas()
except ImportError:
    ISAS = []

MakeOps = Callable[[int], Ops]
ALL_OPS: dict[str, MakeOps] = {"torch": lambda _: TorchOps()}
for name in ISAS:
    ALL_OPS[name] = lambda threads, isa=name: NativeOps(_native.Kernels(threads, isa))  # type: ignore[misc]

EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=[pytest.param(make, id=name) for name, make in ALL_OPS.items()])
def make(request: pytest.FixtureRequest) -> MakeOps:
    return cast(MakeOps, request.param)


@pytest.fixture(autouse=True)
def _keep_torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    epsilon = EPSILON[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=epsilon, atol=epsilon)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("dim", [64, 576, 100, 3, 1000])
def test_rmsnorm(make: MakeOps, dtype: torch.dtype, dim: int) -> None:
    x, weight = normal(7, dim, dtype=dtype), normal(dim, dtype=dtype)
    check(make(2).rmsnorm(x, weight, 1e-5, dtype), exact_norm(x, weight, 1e-5))
    assert torch.equal(x, normal(7, dim, dtype=dtype))


def test_rmsnorm_of_heads_within_a_fused_projection_and_from_a_wider_residual(make: MakeOps) -> None:
    ops, fused = make(1), normal(5, 3 * 64 + 32)
    heads, weight = fused[:, :192].view(5, 3, 64), normal(64)
    check(ops.rmsnorm(heads, weight, 1e-6, torch.float32), exact_norm(heads, weight, 1e-6))
    halves = weight.half()
    found = ops.rmsnorm(fused[:, :64], halves, 1e-6, torch.float16)
    assert found.dtype == torch.float16
    check(found, exact_norm(fused[:, :64], halves, 1e-6))


@pytest.mark.parametrize(
    ("residual_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_add_rmsnorm_adds_in_place_and_norms_the_rounded_sum(
    make: MakeOps, residual_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    residual, update, weight = normal(6, 100, dtype=residual_dtype), normal(6, 100, dtype=dtype, seed=1), normal(100)
    expected = residual + update
    returned, normed = make(2).add_rmsnorm(residual, update, weight.to(dtype), 1e-5)
    assert (
        returned is residual and residual.dtype == residual_dtype and torch.equal(residual, expected.to(residual_dtype))
    )
    assert normed.dtype == dtype
    check(normed, exact_norm(residual, weight.to(dtype), 1e-5))


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("dim", [64, 40, 8])
def test_rope_rotates_views_in_place(make: MakeOps, dtype: torch.dtype, dim: int) -> None:
    fused = normal(5, 7 * dim, dtype=dtype)
    before = fused.clone()
    q, k = fused[:, : 4 * dim].view(5, 4, dim), fused[:, 4 * dim : 6 * dim].view(5, 2, dim)
    angles = normal(5, dim // 2) * 100
    make(1).rope(q, k, angles.cos(), angles.sin())
    cos, sin = (torch.cat((x, x), dim=-1).double()[:, None] for x in (angles.cos(), angles.sin()))
    for found, source in ((q, before[:, : 4 * dim]), (k, before[:, 4 * dim : 6 * dim])):
        x = source.view(5, -1, dim).double()
        left, right = x.chunk(2, dim=-1)
        check(found, x * cos + torch.cat((-right, left), dim=-1) * sin)
    assert torch.equal(fused[:, 6 * dim :], before[:, 6 * dim :])


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("inter", [1536, 100, 5])
def test_silu_mul(make: MakeOps, dtype: torch.dtype, inter: int) -> None:
    gate_up = normal(4, 2 * inter, dtype=dtype) * 20
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, -90.0])
    found = make(2).silu_mul(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    epsilon = EPSILON[dtype]
    torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=epsilon, atol=epsilon)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize(("inner", "outer"), [(64, 64), (576, 192), (1536, 70), (33, 5), (200, 1)])
def test_linear(make: MakeOps, dtype: torch.dtype, inner: int, outer: int) -> None:
    fused = normal(21, inner + 8, dtype=dtype)
    x, weight, bias = fused[:, :inner], normal(outer, inner, dtype=dtype), normal(outer, dtype=dtype)
    expected = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    for b in (None, bias):
        added = torch.zeros(outer) if b is None else b
        found = make(2).linear(x, weight, b)
        assert found.dtype == dtype
        slack = EPSILON[dtype] * (expected.abs() + added.double().abs()) + terms * 2**-20
        assert bool(((found.double() - expected - added.double()).abs() <= slack).all())


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("outer", [5, 72, 3000])
def test_wide_linear_is_the_product_as_it_is_rounded(make: MakeOps, dtype: torch.dtype, outer: int) -> None:
    ops, weight = make(2), normal(outer, 96, dtype=dtype)
    weight[outer // 2, 3] = torch.inf
    weight[0, 0] = torch.nan
    for rows in (0, 1, 7, 70):
        x = normal(rows, 96, dtype=dtype)
        found = ops.wide_linear(x, weight)
        assert found.dtype == torch.float32 and found.shape == (rows, outer)
        torch.testing.assert_close(found, ops.linear(x, weight, None).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 100, 1536])
def test_bits_of_a_row_do_not_depend_on_the_others_or_on_threads(make: MakeOps, dim: int) -> None:
    x, residual, weight, angles = normal(300, dim), normal(300, dim, seed=1), normal(dim), normal(300, dim // 2)
    matrix, bias = normal(72, dim), normal(72)

    def compute(ops: Ops, rows: slice) -> list[torch.Tensor]:
        q, k = (y[rows].clone().view(-1, 1, dim) for y in (x, residual))
        ops.rope(q, k, angles[rows].cos(), angles[rows].sin())
        return [
            *(q, k, ops.silu_mul(x[rows]), ops.rmsnorm(x[rows], weight, 1e-5, torch.float32)),
            *ops.add_rmsnorm(residual[rows].clone(), x[rows], weight, 1e-5),
            *(ops.linear(x[rows], matrix, None), ops.linear(x[rows], matrix, bias)),
        ]

    together = compute(make(1), slice(0, 300))
    for threads in (1, 3):
        ops = make(threads)
        for begin, end in ((0, 1), (17, 18), (299, 300), (3, 5), (40, 43), (100, 115), (1, 18), (0, 33), (10, 300)):
            for whole, part in zip(together, compute(ops, slice(begin, end)), strict=True):
                assert torch.equal(whole[begin:end], part), (threads, begin, end)


def test_torch_rows_keep_their_bits_when_torch_has_two_threads() -> None:
    x, weight, gate_up = normal(300, 1536), normal(576, 1536), normal(300, 2 * 1000)
    torch.set_num_threads(2)
    ops = TorchOps()
    product, silu = ops.linear(x, weight, None), ops.silu_mul(gate_up)
    for begin, end in ((0, 1), (5, 8), (9, 65), (30, 200)):
        assert torch.equal(ops.linear(x[begin:end], weight, None), product[begin:end])
        assert torch.equal(ops.silu_mul(gate_up[begin:end]), silu[begin:end])


@pytest.mark.skipif(not ISAS, reason="kvtier._native was not built")
def test_many_calls_from_a_pool_whose_threads_fall_asleep_and_wake() -> None:
    kernels = _native.Kernels(4)
    ops, x = NativeOps(kernels), normal(200, 1024)
    first = ops.silu_mul(x)
    for i in range(300):
        assert torch.equal(ops.silu_mul(x), first)
        if i % 50 == 0:
            normal(1000, 1000)  # long enough for the threads to sleep
