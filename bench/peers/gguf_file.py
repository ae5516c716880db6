"""Writes a Llama or Qwen3 checkpoint as a GGUF file in bfloat16, for llama.cpp.

It has no vocabulary: prompts are token ids. Weights stay as they are, bit by bit, but for the order of Llama's query
and key rows: llama.cpp rotates neighbouring dimensions, Hugging Face those half a head apart. Qwen3 is rotated alike in
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from safetensors import safe_open

from hetero_api.model_config import ModelConfig

ARCHITECTURES: Final = {"LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3}
NO_VOCABULARY: Final = "no_vocab"


def write(source: Path, target: Path) -> None:
    """Raises ValueError where the file could not say what the model is."""
    config = ModelConfig.from_directory(source)
    architecture = ARCHITECTURES.get(config.architecture)
    if architecture is None or config.rope.kind != "default" or config.mlp_bias or config.qkv_bias or config.o_bias:
        raise ValueError(f"{source}: written are {', '.join(ARCHITECTURES)} with plain rope and without biases")
    writer = gguf.GGUFWriter(str(target), gguf.MODEL_ARCH_NAMES[architecture])
    _write_shape(writer, config)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    for name, tensor in _tensors(source):
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None:
            raise ValueError(f"{source}: GGUF has no name for {name}")
        _add(writer, found, _reordered(name, tensor, config) if architecture == gguf.MODEL_ARCH.LLAMA else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [heads · head_dim, in] with each head's two halves taken in turn: 0, d/2, 1, d/2 + 1, …"""
    heads = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return heads.transpose(1, 2).reshape(rows.shape)


def _reordered(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    if name.endswith("q_proj.weight"):
        return interleaved(tensor, config.num_heads)
    if name.endswith("k_proj.weight"):
        return interleaved(tensor, config.num_kv_heads)
    return tensor


def _write_shape(writer: Any, config: ModelConfig) -> None:
    fields: tuple[tuple[Callable[[Any], None], Any], ...] = (
        (writer.add_block_count, config.num_layers),
        (writer.add_context_length, config.max_position),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_heads),
        (writer.add_head_count_kv, config.num_kv_heads),
        (writer.add_key_length, config.head_dim),
        (writer.add_value_length, config.head_dim),
        (writer.add_rope_dimension_count, config.head_dim),
        (writer.add_rope_freq_base, config.rope.theta),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_file_type, gguf.LlamaFileType.MOSTLY_BF16),
        (writer.add_tokenizer_model, NO_VOCABULARY),
    )
    for add, value in fields:
        add(value)


def _add(writer: Any, name: str, tensor: torch.Tensor) -> None:
    """Matrices in bfloat16, which numpy does not know, as bytes; vectors in float32, as llama.cpp wants norms."""
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    as_bytes = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)
