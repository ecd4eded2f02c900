"""Memory of weights: side by side, none over another, in mappings for which huge pages are asked."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

from kvtier.attention.reference import ReferenceAttention
from kvtier.errors import CheckpointError
from kvtier.models import huge_tensors
from kvtier.models.decoder import load_decoder
from kvtier.models.huge_tensors import CACHE_LINE_BYTES, HUGE_PAGE_BYTES, HugeTensors
from kvtier.models.ops import TorchOps
from tests.tiny import make_checkpoint

SHAPES = ((3, 5), (7,), (100, 33), (1, 1), (64, 1024), (2000, 7))


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Mappings of which several are needed."""
    monkeypatch.setattr(huge_tensors, "CHUNK_BYTES", 1 << 16)
    return 1 << 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_tensor_lies_over_another_and_all_outlive_their_maker(dtype: torch.dtype) -> None:
    maker = HugeTensors()
    made = [maker.empty(*shape, dtype=dtype) for shape in SHAPES]
    del maker
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    gc.collect()
    for number, (tensor, shape) in enumerate(zip(made, SHAPES, strict=True)):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % CACHE_LINE_BYTES == 0 and bool((tensor == number).all())
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in made)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_a_tensor_larger_than_a_mapping_has_one_of_its_own_and_the_next_begins_another(chunk_bytes: int) -> None:
    maker = HugeTensors()
    large = maker.empty(HUGE_PAGE_BYTES + chunk_bytes, dtype=torch.bfloat16)
    small = maker.empty(5, dtype=torch.bfloat16)
    large.fill_(1.0), small.fill_(2.0)
    assert bool((large == 1.0).all()) and bool((small == 2.0).all())


def test_huge_pages_are_asked_for_all_large_weights(tmp_path: Path) -> None:
    decoder = load_decoder(make_checkpoint(tmp_path / "tiny", "llama"), "float32", 16, ReferenceAttention(), TorchOps())
    weights = decoder._weights
    tensors = [weights.embedding, weights.head, weights.norm]
    for layer in weights.layers:
        tensors += [layer.qkv.weight, layer.output.weight, layer.gate_up.weight, layer.down.weight, layer.input_norm]
    advised = mappings_with_huge_pages()
    for tensor in tensors:
        assert any(start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for start, end in advised)


def mappings_with_huge_pages() -> list[tuple[int, int]]:
    """Address ranges of this process that were advised so."""
    found: list[tuple[int, int]] = []
    start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            start, end = (int(part, 16) for part in word.split("-"))
        elif word == "VmFlags:" and "hg" in rest:
            found.append((start, end))
    return found


def test_where_there_is_no_memory_an_error_says_how_much_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_tensors, "CHUNK_BYTES", 1 << 60)
    with pytest.raises(CheckpointError, match=r"no memory for weights, .* more"):
        HugeTensors().empty(3, dtype=torch.float32)
