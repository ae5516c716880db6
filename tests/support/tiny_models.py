"""Tiny random models in Hugging Face format, made on the spot: weights, config and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def save_byte_tokenizer(directory: Path) -> None:
    """tokenizer.json with one token a byte, ids 0 to 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def save_tiny_model(directory: Path, kind: str, **changes: Any) -> Path:
    """A seeded random model of `kind` ("llama", "mistral", "qwen2", "qwen3"), fp32, with 8 KV heads of 16."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    shape: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 319, "initializer_range": 0.2,
    }  # fmt: skip
    configs = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    config = configs[kind](**(shape | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory
