"""A random Llama of 246 million parameters, as a Hugging Face folder and as a GGUF file with the same bf16 weights.

Seeded, so every run and machine has the same. Knows neither kvtier nor llama.cpp; speed does not depend on what a model
has learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 16, 1024, 16, 4, 2816, 32000
HEAD_DIM = HIDDEN // HEADS
CONTEXT = 16384
ROPE_BASE, RMS_EPS = 10000.0, 1e-5
SEED = 20

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_checkpoint(folder: Path) -> Path:
    """Write the folder unless it is there; returns it."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(_weights()), folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCAB,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: whoever finds it finds the weights, too
    return folder


def make_gguf(folder: Path, path: Path) -> Path:
    """Write the folder's weights as GGUF unless the file is there; returns it. Raises ImportError without `gguf`."""
    if path.exists():
        return path
    import gguf

    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
            continue
        raw = _interleaved(name, tensor).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(_gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(path)


def _weights() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(SEED)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return drawn.mul_(columns**-0.5).to(torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(VOCAB, HIDDEN)
    yield "lm_head.weight", matrix(VOCAB, HIDDEN)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd", "lm_head.weight": "output", "model.norm.weight": "output_norm"}
    if name in outer:
        return f"{outer[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleaved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """llama.cpp rotates neighbouring elements of q and k, where Hugging Face rotates the halves of a head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = tensor.shape[0] // HEAD_DIM
    return tensor.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(tensor.shape)
