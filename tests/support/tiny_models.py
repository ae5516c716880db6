"""Tiny random models that a gateway can serve: a checkpoint of tiny_checkpoints, wider, and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_checkpoints import save_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SERVED_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 320, "head_dim": 16, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 319, "initializer_range": 0.2,
}  # fmt: skip


def save_byte_tokenizer(directory: Path) -> None:
    """tokenizer.json with one token a byte, ids 0 to 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def save_tiny_model(directory: Path, variant: str, **changes: Any) -> Path:
    """A seeded random model of a variant of tiny_checkpoints, fp32, with 8 KV heads of 16."""
    save_tiny(variant, directory, **{**SERVED_SHAPE, **changes})
    save_byte_tokenizer(directory)
    return directory
