"""The Triton-language programs, run by their interpreter on the CPU: the cases of test_attention.py, fewer and smaller.

What only a GPU can show is left to scripts/check_gpu; that they compile for one, in 16-byte reads, is shown here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_attention import TOLERANCE, Chat, batch_of, check_close, run_pass, scale_of

from kvtier.attention import make_backend
from kvtier.attention.reference import ReferenceAttention
from kvtier.block import KVLayout
from kvtier.errors import ConfigError

triton = pytest.importorskip("triton", reason="triton is not installed")

from kvtier.attention import triton_kernel, triton_programs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
COMPILE = Path(__file__).parent.parent / "compile_programs.py"


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one tile, so that short sequences have several."""
    monkeypatch.setattr(triton_programs, "SEGMENT", triton.language.constexpr(64))


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_tokens", "dtype", "window"),
    [
        (3, 1, 64, 32, "float32", None),
        (4, 2, 24, 8, "bfloat16", 50),
        (8, 1, 80, 16, "float16", None),
        (1, 1, 256, 100, "bfloat16", None),
        (120, 1, 32, 128, "float16", 20),
    ],
)
def test_prefill_is_dense_attention(
    group: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: str, window: int | None
) -> None:
    chat = Chat(
        KVLayout(2, kv_heads, head_dim, block_tokens, dtype), group * kv_heads, 70 if group < 100 else 9, seed=1
    )
    [(out, lse)] = run_pass(make_backend("triton_kernel", 1), [(chat, 0, chat.length)], window)
    check_close(chat, out, lse, window)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", 63), ("float16", 100)])
def test_chunks_and_split_decode_are_dense_attention(dtype: str, window: int | None) -> None:
    chat = Chat(KVLayout(2, 1, 32, 16, dtype), 2, 195, seed=2)
    backend = make_backend("triton_kernel", 1)
    run_pass(ReferenceAttention(), [(chat, 0, 190)], window)
    for begin, end in ((190, 193), (193, 194), (194, 195)):
        [(out, lse)] = run_pass(backend, [(chat, begin, end)], window)
        expected_out, expected_lse = (x[begin:end] for x in chat.dense(window))
        torch.testing.assert_close(out.double(), expected_out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("window", [None, 40])
def test_splitting_chunks_and_batch_change_no_bits(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(2, 1, 32, 32, "float32")
    chats = [Chat(layout, 3, length, seed=length) for length in (140, 67, 5)]
    backend = make_backend("triton_kernel", 1)
    run_pass(ReferenceAttention(), [(chat, 0, chat.length) for chat in chats], window)
    pieces = [(chat, chat.length - 4, chat.length) for chat in chats]
    split = run_pass(backend, pieces, window)
    monkeypatch.setattr(triton_kernel, "PARTS_BYTES_MAX", 0)
    whole = [run_pass(backend, [piece], window)[0] for piece in pieces]
    decoded = run_pass(backend, [(chat, chat.length - 1, chat.length) for chat in chats], window)
    for (out, lse), (other_out, other_lse), (last_out, last_lse) in zip(split, whole, decoded, strict=True):
        assert torch.equal(out, other_out) and torch.equal(lse, other_lse)
        assert torch.equal(out[-1:], last_out) and torch.equal(lse[-1:], last_lse)


@pytest.mark.usefixtures("short_segments")
def test_decode_and_chunks_share_a_pass_over_ragged_lengths() -> None:
    layout = KVLayout(2, 2, 32, 16, "float32")
    chats = [Chat(layout, 6, length, seed=length) for length in (129, 5, 1, 64)]
    backend = make_backend("triton_kernel", 1)
    run_pass(ReferenceAttention(), [(chats[0], 0, 128), (chats[3], 0, 60)], None)
    pieces = [(chats[0], 128, 129), (chats[1], 0, 5), (chats[2], 0, 1), (chats[3], 60, 64)]
    for (chat, begin, _), (out, lse) in zip(pieces, run_pass(backend, pieces, None), strict=True):
        check_close(chat, out, lse, None, begin)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_later_positions_of_the_same_chunk_do_not_reach_earlier_queries(poison: float) -> None:
    chat = Chat(KVLayout(2, 1, 32, 16, "float32"), 2, 40, seed=9)
    backend = make_backend("triton_kernel", 1)
    [(expected_out, expected_lse)] = run_pass(backend, [(chat, 0, 40)], None)
    chat.v[30] = poison
    [(out, lse)] = run_pass(backend, [(chat, 0, 40)], None)
    assert torch.equal(out[:30], expected_out[:30]) and torch.equal(lse, expected_lse)
    assert not out[30:].isfinite().any()
    chat.k[30] = poison
    [(out, lse)] = run_pass(backend, [(chat, 0, 40)], None)
    assert torch.equal(out[:30], expected_out[:30]) and torch.equal(lse[:30], expected_lse[:30])
    assert out[30:].isnan().all()


def test_positions_left_of_every_window_are_not_read() -> None:
    chat = Chat(KVLayout(2, 1, 32, 16, "float32"), 2, 200, seed=4)
    backend = make_backend("triton_kernel", 1)
    run_pass(ReferenceAttention(), [(chat, 0, 199)], 30)
    chat.table[:10] = -4096  # blocks of positions 0 .. 159 are gone: reading them would end the process
    for begin in (198, 199):
        [(out, lse)] = run_pass(backend, [(chat, begin, 200)], 30)
        check_close(chat, out, lse, 30, begin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_append_writes_what_the_reference_writes_and_nothing_else(dtype: str) -> None:
    layout = KVLayout(3, 2, 24, 8, dtype)
    rows = []
    for backend in (ReferenceAttention(), make_backend("triton_kernel", 1)):
        chat = Chat(layout, 2, 27, seed=1, layer=2)
        backend.append(chat.k[3:26], chat.v[3:26], batch_of([(chat, 3, 26)]), layout, 2)
        rows.append(chat.rows.view(torch.uint8))
    assert torch.equal(*rows)


def test_slices_are_gathered_from_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "GATHER_PROGRAMS", 5)  # fewer than pieces, and no divisor of them
    rows = torch.randint(0, 256, (4, 3, 8192), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    target = torch.zeros(4, 8192, dtype=torch.uint8)
    order = [3, 0, 2]
    triton_kernel.gather(torch.tensor([rows[row].data_ptr() for row in order]), 2 * 8192, target[:3])
    assert torch.equal(target[:3], rows[order, 2]) and not target[3].any()


def test_scores_far_beyond_the_range_of_exp_stay_finite() -> None:
    chat = Chat(KVLayout(2, 1, 64, 16, "float32"), 2, 70, seed=3)
    chat.q *= 300
    [(out, lse)] = run_pass(make_backend("triton_kernel", 1), [(chat, 0, 70)], None)
    expected_out, expected_lse = chat.dense(None)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def test_vectors_that_are_not_aligned_are_refused() -> None:
    chat = Chat(KVLayout(2, 1, 20, 16, "bfloat16"), 2, 3, seed=0)
    with pytest.raises(AssertionError, match="16 bytes"):
        make_backend("triton_kernel", 1).attend(
            chat.q, batch_of([(chat, 0, 3)]), chat.layout, 0, scale_of(chat.layout), None
        )


def test_without_a_device_or_the_package_the_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "INTERPRETED", False)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="CUDA device"):
            make_backend("triton_kernel", 1)
    monkeypatch.setitem(sys.modules, "kvtier.attention.triton_kernel", None)
    monkeypatch.delattr("kvtier.attention.triton_kernel", raising=False)
    with pytest.raises(ConfigError, match=r"kvtier\[gpu\]"):
        make_backend("triton_kernel", 1)


def test_the_programs_compile_for_a_gpu_with_reads_of_16_bytes(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^attend\(.*\): (\d+) copies of 16 bytes, \d+ of 8, (\d+) narrower", done.stdout, re.M)
    assert len(found) == 4, done.stdout  # passes of one and of many queries, whole and in segments; addresses have 8
    assert all(int(copies) > 0 and narrow == "0" for copies, narrow in found), done.stdout
    assert re.search(r"gather\(.*: .* 0 narrower reads, [1-9]\d* of 16", done.stdout), done.stdout
