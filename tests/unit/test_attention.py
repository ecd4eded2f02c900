"""One suite for every attention backend, against dense attention in fp64 and against itself, bit for bit.

Rows hold NaN wherever no query may look. Seeds are in the test ids and printed on failure.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch

from kvtier.attention import AttentionBackend, AttentionBatch, make_backend, merge
from kvtier.attention.reference import DTYPES, ReferenceAttention
from kvtier.block import KVLayout
from kvtier.errors import ConfigError
from tests.guarded import guarded

try:
    from kvtier import _native
    from kvtier.attention.native import NativeAttention

    ISAS = _native.supported_isas()
except ImportError:
    ISAS = []

MakeBackend = Callable[[int], AttentionBackend]
BACKENDS: dict[str, MakeBackend] = {"reference": lambda _: ReferenceAttention()}
for name in ISAS:
    BACKENDS[name] = lambda threads, isa=name: NativeAttention(threads, isa)  # type: ignore[misc]

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1.5e-3}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[pytest.param(make, id=name) for name, make in BACKENDS.items()])
def make(request: pytest.FixtureRequest) -> MakeBackend:
    return cast(MakeBackend, request.param)


@dataclass
class Chat:
    """A sequence with all of its q, k, v and rows of NaN to write them into."""

    layout: KVLayout
    heads: int
    length: int
    seed: int
    layer: int = 1
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        random, layout = torch.Generator().manual_seed(self.seed), self.layout
        dtype = DTYPES[layout.dtype]
        shape = (self.length, layout.kv_heads, layout.head_dim)
        self.q = (torch.randn(self.length, self.heads, layout.head_dim, generator=random) * 2).to(dtype)
        self.k, self.v = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
        self.forget()

    def forget(self) -> None:
        """New rows, in another order, full of NaN."""
        layout = self.layout
        blocks = layout.block_count(self.length)
        self.rows = torch.full((blocks, layout.row_bytes // layout.item_bytes), torch.nan, dtype=DTYPES[layout.dtype])
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.table = torch.tensor([self.rows[row].data_ptr() for row in order])

    def dense(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of all positions in fp64."""
        group = self.heads // self.layout.kv_heads
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), k) * scale_of(self.layout)
        gap = torch.arange(self.length)[:, None] - torch.arange(self.length)
        scores = scores.masked_fill((gap < 0) | (gap >= (window or self.length)), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def scale_of(layout: KVLayout) -> float:
    return float(layout.head_dim**-0.5)


def batch_of(pieces: list[tuple[Chat, int, int]]) -> AttentionBatch:
    """A pass over positions begin .. end - 1 of each chat."""
    width = max(len(chat.table) for chat, _, _ in pieces)
    tables = torch.full((len(pieces), width), -1, dtype=torch.int64)
    starts, rows, offsets = [0], [], []
    for i, (chat, begin, end) in enumerate(pieces):
        tables[i, : len(chat.table)] = chat.table
        starts.append(starts[-1] + end - begin)
        positions = torch.arange(begin, end)
        rows.append(chat.table[positions // chat.layout.block_tokens])
        offsets.append(positions % chat.layout.block_tokens)
    lengths = torch.tensor([end for _, _, end in pieces], dtype=torch.int32)
    query_starts = torch.tensor(starts, dtype=torch.int32)
    return AttentionBatch(tables, query_starts, lengths, torch.cat(rows), torch.cat(offsets).int())


def run_pass(
    backend: AttentionBackend, pieces: list[tuple[Chat, int, int]], window: int | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Appends and attends in one pass; out and lse of each piece. q, k, v arrive as views into one fused tensor."""
    layout, layer, heads = pieces[0][0].layout, pieces[0][0].layer, pieces[0][0].heads
    fused = torch.cat([torch.cat((c.q[b:e], c.k[b:e], c.v[b:e]), dim=1) for c, b, e in pieces])
    q, k, v = torch.split(fused, [heads, layout.kv_heads, layout.kv_heads], dim=1)
    batch = batch_of(pieces)
    backend.append(k, v, batch, layout, layer)
    out, lse = backend.attend(q, batch, layout, layer, scale_of(layout), window)
    counts = [end - begin for _, begin, end in pieces]
    return list(zip(torch.split(out, counts), torch.split(lse, counts), strict=True))


def check_close(chat: Chat, out: torch.Tensor, lse: torch.Tensor, window: int | None, begin: int = 0) -> None:
    expected_out, expected_lse = chat.dense(window)
    assert out.dtype == chat.q.dtype and lse.dtype == torch.float32
    tolerance = TOLERANCE[chat.layout.dtype]
    torch.testing.assert_close(out.double(), expected_out[begin:], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse[begin:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_tokens"),
    [
        *((3, 3, 64, 32), (1, 4, 32, 8), (4, 2, 128, 128), (8, 1, 80, 16), (8, 1, 256, 64)),
        *((1, 1, 40, 24), (7, 2, 64, 100), (3, 1, 256, 16), (4, 1, 96, 128), (120, 1, 32, 32)),
    ],
)
def test_prefill_is_dense_attention(
    make: MakeBackend, group: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: str
) -> None:
    layout = KVLayout(2, kv_heads, head_dim, block_tokens, dtype)
    chat = Chat(layout, group * kv_heads, 131, seed=head_dim + group)
    [(out, lse)] = run_pass(make(2), [(chat, 0, chat.length)], None)
    check_close(chat, out, lse, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 63, 64, 100])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(64, 16), (64, 128), (24, 8)])
def test_chunks_and_decode_are_dense_attention(
    make: MakeBackend, dtype: str, window: int | None, head_dim: int, block_tokens: int
) -> None:
    chat = Chat(KVLayout(3, 2, head_dim, block_tokens, dtype), 6, 200, seed=block_tokens)
    backend = make(1)
    cuts = [0, 1, 65, 70, 129, 196, 197, 198, 199, 200]
    results = [run_pass(backend, [(chat, begin, end)], window)[0] for begin, end in itertools.pairwise(cuts)]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    check_close(chat, out, lse, window)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129])
def test_ragged_lengths_share_a_pass(make: MakeBackend, length: int) -> None:
    layout = KVLayout(2, 3, 64, 16, "float32")
    chats = [Chat(layout, 9, n, seed=n) for n in (length, 40, 1)]
    backend = make(2)
    run_pass(backend, [(chats[0], 0, length - 1)] if length > 1 else [(chats[1], 0, 3)], None)
    pieces = [(chats[0], length - 1, length), (chats[1], 0, 40), (chats[2], 0, 1)]
    for (chat, begin, _), (out, lse) in zip(pieces, run_pass(backend, pieces, None), strict=True):
        check_close(chat, out, lse, None, begin)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("seed", range(4))
def test_bits_do_not_depend_on_chunks_batch_threads_or_table(make: MakeBackend, seed: int, window: int | None) -> None:
    print(f"seed {seed}")
    random = torch.Generator().manual_seed(seed)
    block_tokens, head_dim, group = ((16, 64, 3), (8, 32, 1), (128, 64, 4), (32, 40, 8))[seed]
    layout = KVLayout(2, 2, head_dim, block_tokens, "float32")
    chats = [Chat(layout, 2 * group, length, seed=seed * 10 + i) for i, length in enumerate((200, 150, 77))]
    whole = [run_pass(make(1), [(chat, 0, chat.length)], window)[0] for chat in chats]
    for threads in (1, 2, 3) if make(1).name == "native" else (1,):
        for chat in chats:
            chat.forget()
        backend = make(threads)
        done = [0, 0, 0]
        while any(place < chat.length for place, chat in zip(done, chats, strict=True)):
            pieces, indices = [], torch.randperm(3, generator=random).tolist()
            for i in indices:
                longest = (1, 20, 140)[int(torch.randint(3, (), generator=random))]
                step = int(torch.randint(1, longest + 1, (), generator=random))
                if done[i] < chats[i].length:
                    pieces.append((i, done[i], min(done[i] + step, chats[i].length)))
            results = run_pass(backend, [(chats[i], begin, end) for i, begin, end in pieces], window)
            for (i, begin, end), (out, lse) in zip(pieces, results, strict=True):
                assert torch.equal(out, whole[i][0][begin:end]), (seed, threads, i, begin, end)
                assert torch.equal(lse, whole[i][1][begin:end]), (seed, threads, i, begin, end)
                done[i] = end


@pytest.mark.parametrize("window", [None, 650])  # which begins in the middle of span 13
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_long_decode_is_cut_over_threads_without_changing_bits(
    make: MakeBackend, dtype: str, window: int | None
) -> None:
    layout = KVLayout(1, 1, 64, 32, dtype)
    chat = Chat(layout, 3, 1500, seed=5, layer=0)
    run_pass(make(2), [(chat, 0, 1499)], window)
    results = [run_pass(make(threads), [(chat, 1499, 1500)], window)[0] for threads in (1, 2, 3, 8)]
    check_close(chat, *results[0], window, 1499)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_table_split_at_any_block_merges_to_the_whole(make: MakeBackend, dtype: str, parts: int) -> None:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=32, block_tokens=16, dtype=dtype)
    chat = Chat(layout, heads=4, length=100, seed=parts)
    backend = make(1)
    run_pass(backend, [(chat, 0, 100)], None)
    blocks = len(chat.table)
    for inner in itertools.combinations(range(1, blocks), parts - 1):
        outs, lses = [], []
        for begin, end in itertools.pairwise([0, *inner, blocks]):
            length = min(end * 16, 100) - begin * 16
            batch = AttentionBatch(
                tables=chat.table[begin:end].reshape(1, -1),
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
                lengths=torch.tensor([length], dtype=torch.int32),
                append_rows=chat.table[:0],
                append_offsets=torch.zeros(0, dtype=torch.int32),
            )
            out, lse = backend.attend(chat.q[99:], batch, layout, chat.layer, scale_of(layout), None)
            outs.append(out)
            lses.append(lse)
        check_close(chat, *merge(torch.stack(outs), torch.stack(lses)), None, 99)


def test_a_part_that_is_not_seen_weighs_nothing_whatever_it_holds() -> None:
    outs, lses = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    lses[1], outs[1] = -torch.inf, torch.nan
    expected_out, expected_lse = merge(outs[::2], lses[::2])
    out, lse = merge(outs, lses)
    assert torch.equal(out, expected_out) and torch.allclose(lse, expected_lse)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 9, 16, 17])
def test_any_number_of_query_heads_decodes_alone_and_with_its_neighbour(
    make: MakeBackend, group: int, head_dim: int
) -> None:
    chat = Chat(KVLayout(2, 2, head_dim, 32, "bfloat16"), 2 * group, 147, seed=group)
    backend = make(2)
    results = [run_pass(backend, [(chat, *cut)], None)[0] for cut in ((0, 144), (144, 145), (145, 147))]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    check_close(chat, out, lse, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(("begin", "end"), [(0, 100), (66, 71)])  # many rows a tile, and so few that they share a block
def test_later_positions_of_the_same_chunk_do_not_reach_earlier_queries(
    make: MakeBackend, begin: int, end: int, poison: float, dtype: str
) -> None:
    chat = Chat(KVLayout(2, 2, 64, 16, dtype), 6, 100, seed=9)
    run_pass(make(1), [(chat, 0, 66)], None)
    expected = run_pass(make(1), [(chat, begin, end)], None)[0]
    chat.k[70], chat.v[70] = poison, poison
    out, lse = run_pass(make(1), [(chat, begin, end)], None)[0]
    seen = 70 - begin
    assert torch.equal(out[:seen], expected[0][:seen]) and torch.equal(lse[:seen], expected[1][:seen])
    assert out[seen:].isnan().all()


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (40, 8)])
def test_a_bf16_sequence_has_the_same_bits_in_any_batch_on_any_threads(
    make: MakeBackend, head_dim: int, group: int, window: int | None
) -> None:
    layout = KVLayout(2, 2, head_dim, 16, "bfloat16")
    cuts = [(0, 150), (140, 141), (129, 134), (60, 61), (0, 33)]
    chats = [Chat(layout, 2 * group, end, seed=i) for i, (_, end) in enumerate(cuts)]
    pieces = [(chat, *cut) for chat, cut in zip(chats, cuts, strict=True)]
    for chat, begin, _ in pieces:
        if begin:
            run_pass(make(1), [(chat, 0, begin)], window)
    alone = [run_pass(make(2), [piece], window)[0] for piece in pieces]
    for threads in (1, 2, 3, 8):
        together = run_pass(make(threads), pieces, window)
        for (out, lse), (expected_out, expected_lse) in zip(together, alone, strict=True):
            assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse), threads


def test_positions_left_of_every_window_are_not_read(make: MakeBackend) -> None:
    chat = Chat(KVLayout(2, 2, 64, 16, "float32"), 6, 200, seed=4)
    backend = make(2)
    run_pass(backend, [(chat, 0, 196)], 30)
    chat.table[:10] = -4096  # blocks of positions 0 .. 159 are gone: reading them would end the process
    out, lse = run_pass(backend, [(chat, 196, 200)], 30)[0]
    check_close(chat, out, lse, 30, 196)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(64, 16), (80, 128), (24, 128)])
def test_nothing_beside_rows_and_queries_is_touched(
    make: MakeBackend, head_dim: int, block_tokens: int, dtype: str
) -> None:
    layout = KVLayout(1, 1, head_dim, block_tokens, dtype)
    assert layout.row_bytes == layout.slice_payload_bytes, "there would be room behind a row"
    chat = Chat(layout, 5, 131, seed=head_dim, layer=0)
    rows = [guarded(row) for row in chat.rows]
    chat.table = torch.tensor([row.data_ptr() for row in rows])
    backend = make(2)
    backend.append(guarded(chat.k), guarded(chat.v), batch_of([(chat, 0, 131)]), layout, 0)
    for begin, end, window in ((0, 131, None), (129, 131, None), (130, 131, 40)):
        batch = batch_of([(chat, begin, end)])
        out, lse = backend.attend(guarded(chat.q[begin:end]), batch, layout, 0, scale_of(layout), window)
        check_close(chat, out, lse, window, begin)


def test_append_touches_its_own_places_only(make: MakeBackend) -> None:
    layout = KVLayout(3, 2, 24, 8, "bfloat16")
    chat = Chat(layout, 2, 13, seed=1, layer=2)
    make(1).append(chat.k[3:12], chat.v[3:12], batch_of([(chat, 3, 12)]), layout, 2)
    written = 0
    for position in range(3, 12):
        row = int(chat.table[position // 8]) + 2 * layout.slice_bytes
        for kv, source in enumerate((chat.k, chat.v)):
            for head in range(2):
                offset = kv * layout.value_offset + head * layout.head_bytes + position % 8 * 24 * 2
                expected = source[position, head].contiguous().view(torch.uint8).numpy().tobytes()
                assert ctypes.string_at(row + offset, 48) == expected
                written += 24
    assert int((~chat.rows.isnan()).sum()) == written


def test_scores_far_beyond_the_range_of_exp_stay_finite(make: MakeBackend) -> None:
    chat = Chat(KVLayout(2, 1, 64, 16, "float32"), 2, 150, seed=3)
    chat.q *= 300
    [(out, lse)] = run_pass(make(1), [(chat, 0, 150)], None)
    expected_out, expected_lse = chat.dense(None)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("group", [1, 8])
def test_of_bf16_scores_too_large_for_a_difference_of_one_the_largest_still_weighs_one(
    make: MakeBackend, group: int
) -> None:
    chat = Chat(KVLayout(2, 1, 64, 16, "bfloat16"), group, 150, seed=3)
    chat.k *= 1e10
    backend = make(2)
    results = [run_pass(backend, [(chat, *cut)], None)[0] for cut in ((0, 149), (149, 150))]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    expected_out, expected_lse = chat.dense(None)
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0.0)


def test_a_name_chooses_the_backend(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_backend("reference", 1).name == "reference"
    with pytest.raises(ConfigError, match="quick"):
        make_backend("quick", 1)
    if ISAS:
        assert make_backend("auto", 1).name == make_backend("native", 1).name == "native"
    monkeypatch.setitem(sys.modules, "kvtier.attention.native", None)  # as on a machine where it was not built
    with caplog.at_level(logging.WARNING):
        assert make_backend("auto", 1).name == "reference"
    assert "not built" in caplog.text
    with pytest.raises(ConfigError, match="not built"):
        make_backend("native", 1)


@pytest.mark.skipif(not ISAS, reason="the native module was not built")
def test_a_cpu_that_the_kernels_have_no_vectors_for_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backend("auto", 1, 64)
    if ISAS[0] != "plain":
        assert not caplog.records
    monkeypatch.setattr(_native, "supported_isas", lambda: ["plain"])
    for name in ("auto", "native"):
        caplog.clear()
        assert make_backend(name, 1, 64).name == "native"
        assert ["plain C++" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(not ISAS, reason="kvtier._native was not built")
@pytest.mark.parametrize("head_dim", [4, 20, 100, 1032])
def test_heads_that_the_kernels_do_not_take_are_attended_in_torch(
    head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="dim"):
        _native.Rows(_native.Type.float32, 1, head_dim, 16, 0, 0, 0)
    with caplog.at_level(logging.WARNING):
        assert make_backend("auto", 1, head_dim).name == "reference"
    assert f"not {head_dim}" in caplog.text
    with pytest.raises(ConfigError, match=f"not {head_dim}.*auto"):
        make_backend("native", 1, head_dim)
    assert all(make_backend(name, 1, 128).name == "native" for name in ("auto", "native"))


@pytest.mark.skipif(not ISAS, reason="kvtier._native was not built")
def test_native_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="mmx"):
        NativeAttention(1, "mmx")
    with pytest.raises(ValueError, match="threads"):
        NativeAttention(0)
    chat = Chat(KVLayout(2, 1, 64, 16, "float32"), 2, 3, seed=0)
    chat.layout = replace(chat.layout, head_dim=12)
    with pytest.raises(ValueError, match="dim"):
        NativeAttention(1).attend(chat.q[..., :12], batch_of([(chat, 0, 3)]), chat.layout, 0, 1.0, None)
