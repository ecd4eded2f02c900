"""Tiny random Hugging Face checkpoints of every supported family, and a byte-level tokenizer to go with them.

Seeded and made in milliseconds, so each test makes what it needs. Written without kvtier or transformers, which both
read it: a mistake here cannot hide one there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
MERGES = ("h e", "i n", "Ġ t", "Ġt he", "e r", "o n", "r e", "Ġ a", "a n", "n d", "Ġa nd", "in g", "o u", "Ġ s", "i s")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    stored: torch.dtype = torch.float32,
    tokenizer: bool = False,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write config.json and the weights (and the tokenizer, if asked) into `folder`; returns it.

    By default 3 layers, hidden 64, 4 heads on 2 KV heads, vocabulary 300 (more than the tokenizer has), context 512.
    `overrides` replace or add fields of config.json; an override of ... (Ellipsis) leaves the field out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(stored).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    if family == "qwen3":
        config["head_dim"] = 16
    if family == "mistral":
        config["sliding_window"] = None
    config.update(overrides)
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, random_weights(config, seed, stored), shards)
    if tokenizer:
        make_tokenizer(folder)
    return folder


def random_weights(config: dict[str, Any], seed: int, stored: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors by their Hugging Face names, scaled so that activations and logits are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    family, hidden, vocab = config["model_type"], int(config["hidden_size"]), int(config["vocab_size"])
    heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
    kv_heads = int(config["num_key_value_heads"] or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, bias: bool = False) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        if bias:
            weights[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.3

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)

    matrix("model.embed_tokens", vocab, hidden)
    weights["model.embed_tokens.weight"] *= 2
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{prefix}.self_attn.{name}_proj", rows * head_dim, hidden, family == "qwen2" or attention_bias)
        matrix(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, attention_bias)
        if family == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
        matrix(f"{prefix}.mlp.gate_proj", inner, hidden, mlp_bias)
        matrix(f"{prefix}.mlp.up_proj", inner, hidden, mlp_bias)
        matrix(f"{prefix}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings"):
        matrix("lm_head", vocab, hidden)
    return {name: tensor.to(stored).contiguous() for name, tensor in weights.items()}


def write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write model.safetensors, or an index and `shards` files."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_tokenizer(folder: Path) -> None:
    """Write tokenizer.json (byte-level BPE: 3 special tokens, 256 bytes, a few merges) and tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
