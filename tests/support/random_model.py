"""A small random Llama written without transformers: for machines that have none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 320
NUM_LAYERS = 4
NUM_KV_HEADS = 8
INTERMEDIATE_SIZE = 320


@dataclass(frozen=True, slots=True)
class _Shape:
    hidden: int = 128
    heads: int = 16
    head_dim: int = 16


def save_random_llama(directory: Path, *, seed: int = 0) -> Path:
    """Seeded, float32: 4 layers, 8 KV heads of 16, 320 MLP columns and vocabulary rows."""
    shape = _Shape()
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": shape.head_dim,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(shape, torch.Generator().manual_seed(seed)), directory / "model.safetensors")
    return directory


def _weights(shape: _Shape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.2

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(shape.hidden, generator=generator)

    query, key = shape.heads * shape.head_dim, NUM_KV_HEADS * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, shape.hidden),
        "lm_head.weight": matrix(VOCAB_SIZE, shape.hidden),
        "model.norm.weight": norm(),
    }
    for i in range(NUM_LAYERS):
        prefix = f"model.layers.{i}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": matrix(query, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(key, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(key, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(shape.hidden, query),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(shape.hidden, INTERMEDIATE_SIZE),
        }
    return weights
