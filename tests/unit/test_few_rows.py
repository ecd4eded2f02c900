"""Linear layers of few bf16 rows, by every kernel that this CPU has for them: right to one rounding, and the same bits
of a row in any company and on any number of threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from kvtier.attention import make_backend
from kvtier.models.ops import NativeOps, make_ops
from tests.guarded import guarded

try:
    from kvtier import _native

    ISAS = _native.supported_isas()
except ImportError:
    ISAS = []

ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65)
SHAPES = ((32, 16), (96, 80), (576, 960), (1536, 576), (2816, 112), (12384, 48), (40, 24))
"""(in, out); the last one fits no tile and stays torch's."""

FEW_ROWS_MAX = {isa: _native.Kernels(1, isa).few_rows_max for isa in ISAS}
FEW_ISAS = [isa for isa in ISAS if FEW_ROWS_MAX[isa]]
"""Those with a kernel of their own for few bf16 rows; this CPU may have none."""


def make(isa: str, threads: int) -> NativeOps:
    return NativeOps(_native.Kernels(threads, isa))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


@pytest.fixture(scope="module", params=FEW_ISAS or ["auto"])
def isa(request: pytest.FixtureRequest) -> str:
    if not ISAS:
        pytest.skip("kvtier._native was not built")
    return cast(str, request.param)


@pytest.fixture(scope="module")
def few_isa(isa: str) -> str:
    if not FEW_ISAS:
        pytest.skip("this CPU has neither a matrix unit nor dot products for bf16")
    return isa


@pytest.fixture(scope="module", params=[1, 3])
def ops(request: pytest.FixtureRequest, isa: str) -> NativeOps:
    return make(isa, request.param)


def bound(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in fp64; half a unit in the last of 8 bits of it, plus what fp32 sums of terms that cancel lose."""
    exact = x.double() @ weight.double().T
    return exact, exact.abs() * 2**-8 + (x.double().abs() @ weight.double().abs().T) * 2**-20


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_linear_of_few_bf16_rows_is_right_to_one_rounding(ops: NativeOps, rows: int, inner: int, outer: int) -> None:
    x, weight, bias = normal(rows, inner + 32)[:, :inner], normal(outer, inner, seed=1), normal(outer)
    exact, slack = bound(x, weight)
    found = ops.linear(x, weight, None)
    assert found.dtype == torch.bfloat16 and found.shape == (rows, outer)
    assert bool(((found.double() - exact).abs() <= slack).all())
    assert torch.equal(ops.linear(x, weight, bias), found + bias)


@pytest.mark.parametrize("inner", [*range(32, 385, 32), 1568, 3104, 6176])
def test_linear_few_takes_every_step_of_in_dim(few_isa: str, inner: int) -> None:
    ops, limit = make(few_isa, 2), FEW_ROWS_MAX[few_isa]
    x, weight = normal(limit, inner), normal(48, inner, seed=1)
    for rows in range(1, limit + 1):
        exact, slack = bound(x[:rows], weight)
        assert bool(((ops.linear(x[:rows], weight, None).double() - exact).abs() <= slack).all()), rows


@pytest.mark.parametrize(("inner", "outer"), [*SHAPES[:6], (160, 1008)])
def test_a_bf16_row_has_the_same_bits_in_any_small_company_and_on_any_threads(
    few_isa: str, inner: int, outer: int
) -> None:
    x, weight = normal(FEW_ROWS_MAX[few_isa], inner), normal(outer, inner, seed=1)
    together = make(few_isa, 1).linear(x, weight, None)
    for threads in (1, 2, 3, 5):
        ops = make(few_isa, threads)
        for rows in range(1, len(x) + 1):
            for start in {0, len(x) - rows, (len(x) - rows) // 2}:
                part = ops.linear(x[start : start + rows], weight, None)
                assert torch.equal(part, together[start : start + rows]), (threads, rows, start)


@pytest.mark.parametrize("gap", [1, 7, 64])
def test_linear_few_reads_strided_rows_and_weights_that_start_anywhere(few_isa: str, gap: int) -> None:
    limit, (inner, outer) = FEW_ROWS_MAX[few_isa], (160, 80)
    x, weight = normal(limit, inner), normal(outer, inner, seed=1)
    wide = torch.full((limit, gap + inner + gap), torch.nan, dtype=torch.bfloat16)
    wide[:, gap : gap + inner] = x
    store = torch.full((gap + outer * inner + gap,), torch.nan, dtype=torch.bfloat16)
    moved = store[gap : gap + outer * inner].view(outer, inner)
    moved.copy_(weight)
    ops = make(few_isa, 2)
    for rows in (1, 2, 3, 5, limit):
        found = ops.linear(wide[:rows, gap : gap + inner], moved, None)
        assert torch.equal(found, ops.linear(x[:rows], weight, None))


@pytest.mark.parametrize(("inner", "outer"), [(32, 16), (160, 80), (3104, 48)])
def test_linear_few_reads_nothing_beside_rows_and_weights(few_isa: str, inner: int, outer: int) -> None:
    limit, ops = FEW_ROWS_MAX[few_isa], make(few_isa, 2)
    x, weight = normal(limit, inner), normal(outer, inner, seed=1)
    expected, kept = ops.linear(x, weight, None), guarded(weight)
    for rows in (1, 2, 3, 7, limit):
        assert torch.equal(ops.linear(guarded(x[:rows]), kept, None), expected[:rows])


def test_a_bf16_row_that_is_not_a_number_spoils_no_other(few_isa: str) -> None:
    limit, ops = FEW_ROWS_MAX[few_isa], make(few_isa, 2)
    x, weight = normal(limit, 96), normal(48, 96, seed=1)
    clean = ops.linear(x, weight, None)
    for bad in (0, limit // 2, limit - 1):
        spoilt = x.clone()
        spoilt[bad, 5] = torch.nan
        found = ops.linear(spoilt, weight, None)
        others = torch.arange(limit) != bad
        assert bool(found[bad].isnan().all()) and torch.equal(found[others], clean[others])


def test_linear_few_refuses_what_does_not_fit_its_tiles(ops: NativeOps) -> None:
    limit = ops.kernels.few_rows_max
    for rows, inner, outer in ((0, 32, 16), (limit + 1, 32, 16), (1, 33, 16), (1, 32, 17), (1, 0, 16)):
        with pytest.raises(ValueError, match="linear_few takes"):
            ops.kernels.linear_few(0, 0, 0, 0, rows, inner, outer)


@pytest.mark.skipif(not ISAS, reason="kvtier._native was not built")
def test_few_rows_have_a_kernel_only_where_the_isa_and_the_cpu_have_one() -> None:
    assert not {"avx512", "avx2", "plain"} & set(FEW_ISAS)
    assert FEW_ROWS_MAX.get("amx", 64) == 64
    assert FEW_ROWS_MAX.get("avx512_bf16", 16) == 16
    if "avx512" in ISAS:
        assert ("avx512_bf16" in ISAS) == ("avx512_bf16" in Path("/proc/cpuinfo").read_text().split())
    chosen = make_ops(make_backend("auto", 1))
    assert isinstance(chosen, NativeOps) and chosen.kernels.few_rows_max == FEW_ROWS_MAX[ISAS[0]]
