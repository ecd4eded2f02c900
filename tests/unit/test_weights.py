"""Loading: files found and checked, every tensor in its place, digest of content, bad checkpoints refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier.errors import CheckpointError
from kvtier.models.config import ModelConfig
from kvtier.models.weights import DecoderWeights, load_weights
from tests.tiny import make_checkpoint, write_weights


def load(folder: Path, dtype: torch.dtype | None = None) -> tuple[DecoderWeights, bytes]:
    """The weights of `folder` and their digest."""
    return load_weights(folder, ModelConfig.from_folder(folder), dtype)


def rewrite(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace, add or (None) remove one tensor of a single-file checkpoint."""
    weights = load_file(folder / "model.safetensors")
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    write_weights(folder, weights)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_lands_in_its_place(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, attention_bias=True, mlp_bias=True)
    stored = load_file(folder / "model.safetensors")
    weights, _ = load(folder)
    layer, prefix = weights.layers[1], "model.layers.1."
    qkv = [stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(qkv))
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat([stored[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]))
    gate_up = torch.cat([stored[f"{prefix}mlp.gate_proj.weight"], stored[f"{prefix}mlp.up_proj.weight"]])
    assert torch.equal(layer.gate_up.weight, gate_up)
    assert torch.equal(layer.output.weight, stored[f"{prefix}self_attn.o_proj.weight"])
    assert torch.equal(layer.down.weight, stored[f"{prefix}mlp.down_proj.weight"])
    assert torch.equal(layer.input_norm, stored[f"{prefix}input_layernorm.weight"])
    assert torch.equal(layer.post_norm, stored[f"{prefix}post_attention_layernorm.weight"])
    assert (layer.q_norm is not None) == (family == "qwen3")
    assert (layer.down.bias is not None) == (family == "llama")
    assert (layer.output.bias is not None) == (family != "qwen2")
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, stored["model.norm.weight"])
    assert torch.equal(weights.head, stored["lm_head.weight"])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtypes_convert(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype | None) -> None:
    folder = make_checkpoint(tmp_path, stored=stored)
    weights, _ = load(folder, wanted)
    expected = load_file(folder / "model.safetensors")["model.layers.2.mlp.down_proj.weight"]
    assert weights.layers[2].down.weight.dtype == (wanted or stored)
    assert torch.equal(weights.layers[2].down.weight, expected.to(wanted or stored))


def test_shards_load_like_one_file_and_digest_the_same(tmp_path: Path) -> None:
    one, digest_one = load(make_checkpoint(tmp_path / "one"))
    three, digest_three = load(make_checkpoint(tmp_path / "three", shards=3))
    assert digest_one == digest_three
    for left, right in zip(one.layers, three.layers, strict=True):
        assert torch.equal(left.qkv.weight, right.qkv.weight) and torch.equal(left.down.weight, right.down.weight)


def test_digest_follows_content_and_stored_dtype_but_not_the_loaded_dtype(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a")
    _, digest = load(folder)
    assert len(digest) == 32
    assert load(folder, torch.bfloat16)[1] == digest
    assert load(make_checkpoint(tmp_path / "b", stored=torch.float16))[1] != digest
    halves = load_file(make_checkpoint(tmp_path / "c", stored=torch.bfloat16) / "model.safetensors")
    write_weights(tmp_path / "c", {name: tensor.view(torch.float16) for name, tensor in halves.items()})
    same_bytes_other_dtype = load(tmp_path / "c", torch.bfloat16)[1]
    write_weights(tmp_path / "c", halves)
    assert load(tmp_path / "c")[1] != same_bytes_other_dtype
    weights = load_file(folder / "model.safetensors")
    changed = weights["model.layers.0.mlp.down_proj.weight"].clone()
    changed[3, 4] += 1e-3
    rewrite(folder, "model.layers.0.mlp.down_proj.weight", changed)
    assert load(folder)[1] != digest
    left, right = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    weights[left], weights[right] = weights[right], weights[left]
    write_weights(folder, weights)
    assert load(folder)[1] != digest


def test_tied_head_is_the_embedding_unless_a_different_one_is_stored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    weights, digest = load(folder)
    assert weights.head is weights.embedding
    rewrite(folder, "lm_head.weight", weights.embedding.clone())
    again, same_digest = load(folder)
    assert again.head is again.embedding and same_digest == digest
    rewrite(folder, "lm_head.weight", weights.embedding * 2)
    assert torch.equal(load(folder)[0].head, weights.embedding * 2)


def test_progress_counts_every_stored_byte(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, shards=2)
    calls: list[tuple[int, int]] = []
    load_weights(
        folder, ModelConfig.from_folder(folder), torch.bfloat16, lambda done, total: calls.append((done, total))
    )
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    _, digest = load(folder)
    rewrite(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    assert load(folder)[1] == digest


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"1 tensors are missing: model\.norm\.weight"),
        ("model.embed_tokens.weight", None, r"model\.embed_tokens\.weight is missing"),
        ("lm_head.weight", None, r"1 tensors are missing: lm_head\.weight"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), r"have no place in a llama decoder .*q_proj\.bias"),
        ("model.norm.weight", torch.zeros(63), r"model\.norm\.weight has shape \[63\], config\.json makes it \[64\]"),
        ("model.layers.1.self_attn.q_proj.weight", torch.zeros(32, 64), r"shape \[32, 64\].*tensor-parallel"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), r"stored as I8; supported are F32, BF16, F16"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.float64), r"stored as F64"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    folder = make_checkpoint(tmp_path)
    rewrite(folder, name, tensor)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_values_beyond_fp16_are_refused_only_in_fp16(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    rewrite(folder, "model.norm.weight", torch.full((64,), 1e5))
    load(folder, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values beyond float16"):
        load(folder, torch.float16)


def test_a_half_written_file_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (len(content) - 1, len(content) // 2, 20, 0):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
            load(folder)


def test_a_bad_index_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, shards=3)
    index_path = folder / "model.safetensors.index.json"
    text = index_path.read_text()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00003\.safetensors which are missing"):
        load(folder)
    make_checkpoint(folder, shards=3)
    index_path.write_text(text.replace("model-00001-of-00003", "../x/model-00001-of-00003"))
    with pytest.raises(CheckpointError, match="same folder"):
        load(folder)
    index_path.write_text(text.replace("model-00001-of-00003", "model-00003-of-00003"))
    with pytest.raises(CheckpointError, match=r"is not in it though model\.safetensors\.index\.json says so"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "pickle weights are never read"),
        ("consolidated.00.pth", "pickle weights are never read"),
        ("model-rank-0-part-0.safetensors", "tensor-parallel shards"),
        (None, "holds no weights; supported are model.safetensors"),
    ],
)
def test_other_weights_are_refused_unopened(tmp_path: Path, file: str | None, message: str) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    if file is not None:
        (folder / file).write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_other_files_beside_the_weights_do_no_harm(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, shards=2)
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    load(folder)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_checkpoint(tmp_path / "there"))
    with pytest.raises(CheckpointError, match="no such folder"):
        load_weights(tmp_path / "elsewhere", config, None)


def test_the_index_says_which_of_two_files_a_tensor_is_taken_from(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    weights = load_file(folder / "model.safetensors")
    for number in (1, 2):
        write_weights(folder, weights | {"model.norm.weight": torch.full((64,), float(number))})
        (folder / "model.safetensors").rename(folder / f"{number}.safetensors")
    for number in (1, 2):
        places = dict.fromkeys(weights, "1.safetensors") | {"lm_head.weight": "2.safetensors"}
        places["model.norm.weight"] = f"{number}.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        assert torch.equal(load(folder)[0].norm, torch.full((64,), float(number)))
