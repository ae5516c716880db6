"""Shapes of models that are measured. Values of their weights matter only for which experts tokens choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hetero_api.model_config import ModelConfig

EMBEDDING_SCALE: Final = 4.0
"""Standard deviation of embeddings of models with experts: tokens then differ in every layer, and choose experts about
as evenly as a trained model's. With the scale of other weights all tokens of a prompt choose the same dozen."""
_QWEN3: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def _qwen3(**fields: Any) -> ModelConfig:
    return ModelConfig.from_hf({**_QWEN3, **fields})


QWEN3_06B: Final = _qwen3(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
)
QWEN3_8B: Final = _qwen3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)
QWEN3_30B_A3B: Final = ModelConfig.from_hf(
    json.loads((Path(__file__).parents[2] / "examples/models/qwen3-30b-a3b.json").read_text(encoding="utf-8"))
)
QWEN3_32B: Final = _qwen3(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64)
TINY: Final = _qwen3(
    hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=512, max_position_embeddings=2048,
)  # fmt: skip
"""To see that the program runs."""
TINY_MOE: Final = ModelConfig.from_hf({
    **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 2048,
})  # fmt: skip
"""The same, with experts."""
