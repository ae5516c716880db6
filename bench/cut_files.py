"""Cuts of published models as GGUF files: layers of the real shapes, random weights of 4 bits, no vocabulary.

Shapes are those of examples/models. Linear layers and experts are Q4_0, embedding and head Q8_0, and so are the halves
of latent attention's `kv_b_proj`; norms, biases and routers are F32. Weights are drawn in blocks, so nothing is
quantised, and a file is written tensor by tensor: it may be larger than memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from bench.gpu.shapes import EMBEDDING_SCALE
from bench.home import ROOT
from hetero_api.gguf_file import GgufHeader

CUTS: Final[Mapping[str, str]] = {"gpt-oss-20b": "gpt-oss", "qwen3-30b-a3b": "qwen3moe", "deepseek-v3": "deepseek2"}
"""Models, and their architectures in GGUF."""
ALL_LEAST: Final = ("deepseek-v3",)
"""Models of which a cut has one layer of experts only, since it is so large."""
DENSE_LAYERS: Final = 2
"""Layers before those of experts that a cut of DeepSeek-V3 keeps, of three."""
SEED: Final = 7
SPREAD: Final = 0.02
"""Standard deviation of the weights but the embedding's."""
_POOL_BLOCKS: Final = 1_000_003
"""Blocks that are drawn; tensors of more repeat them. A prime, so that no row of a tensor repeats another's place."""
_DEVIATIONS: Final = {"Q4_0": 4.32, "Q8_0": 73.9}
"""Standard deviations of a block's numbers before its scale: of 4 bits -7 to 7, else -128 to 127, all as likely. With a
-8 their mean would be -0.5, and a matrix would send all tokens in one direction, and so to the same experts."""
_EXPERTS: Final = "_exps.weight"
_EMBEDDING: Final = "token_embd.weight"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor; `shape` as Hugging Face writes it."""

    name: str
    shape: tuple[int, ...]
    kind: str = "Q4_0"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape with bytes in place of values."""
        stored: tuple[int, ...] = gguf.quant_shape_to_byte_shape(self.shape, gguf.GGMLQuantizationType[self.kind])
        return stored

    @property
    def num_bytes(self) -> int:
        """Bytes of it in the file."""
        return math.prod(self.stored_shape)


def published(name: str) -> dict[str, Any]:
    """Return a model's config.json."""
    config: dict[str, Any] = json.loads((ROOT / "examples" / "models" / f"{name}.json").read_text(encoding="utf-8"))
    return config


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a model's first layers; of those that are dense before layers of experts, `DENSE_LAYERS` are left."""
    fields = {**config, "num_hidden_layers": layers}
    if "first_k_dense_replace" in config:
        fields["first_k_dense_replace"] = min(config["first_k_dense_replace"], DENSE_LAYERS)
    if "layer_types" in config:
        fields["layer_types"] = config["layer_types"][:layers]
    return fields


def least_layers(config: Mapping[str, Any]) -> int:
    """Return the layers of the smallest cut, which has one of experts."""
    return int(min(config.get("first_k_dense_replace", 0), DENSE_LAYERS)) + 1


def layers_within(architecture: str, config: Mapping[str, Any], most_bytes: float) -> int:
    """Return how many of a model's layers have so many bytes together; at least one, and one of experts."""
    layers, most = least_layers(config), int(config["num_hidden_layers"])
    while layers < most and size_of(architecture, cut(config, layers + 1)) <= most_bytes:
        layers += 1
    return layers


def size_of(architecture: str, config: Mapping[str, Any]) -> int:
    """Return the bytes of a model's tensors."""
    return sum(tensor.num_bytes for tensor in tensors(architecture, config))


def write(architecture: str, config: Mapping[str, Any], target: Path) -> None:
    """Write the file; it appears when it is whole."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(unfinished, architecture)
    for name, value in metadata(architecture, config).items():
        _ADDERS[type(value)](writer, f"{architecture}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    made = list(tensors(architecture, config))
    for tensor in made:
        kind, dtype = gguf.GGMLQuantizationType[tensor.kind], np.dtype(np.uint8)
        writer.add_tensor_info(tensor.name, tensor.stored_shape, dtype, tensor.num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    weights = _Weights()
    for tensor in made:
        writer.write_tensor_data(weights.of(tensor))
    writer.close()
    os.replace(unfinished, target)


def metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, without the architecture before them."""
    experts = config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "expert_count": experts,
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": width,
        **_yarn(config),
    }
    if architecture == "deepseek2":
        return fields | _latent(config)
    if architecture == "gpt-oss":
        fields["attention.sliding_window"] = config["sliding_window"]
    return fields | dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])


def _yarn(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    if not scaling:
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
    }


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * config["rope_scaling"]["mscale_all_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


_ADDERS: Final[Mapping[type, Any]] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
}


def tensors(architecture: str, config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield all tensors of a model, by llama.cpp's names."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield Tensor(_EMBEDDING, (vocabulary, hidden), "Q8_0")
    yield Tensor("output_norm.weight", (hidden,), "F32")
    yield Tensor("output.weight", (vocabulary, hidden), "Q8_0")
    attention = _latent_attention if architecture == "deepseek2" else _attention
    second = "post_attention_norm" if architecture == "gpt-oss" else "ffn_norm"
    for layer in range(config["num_hidden_layers"]):
        of_layer = [
            Tensor("attn_norm.weight", (hidden,), "F32"),
            Tensor(f"{second}.weight", (hidden,), "F32"),
            *attention(config, architecture),
            *_mlp(config, architecture, layer),
        ]
        yield from (replace(tensor, name=f"blk.{layer}.{tensor.name}") for tensor in of_layer)


def _attention(config: Mapping[str, Any], architecture: str) -> Iterator[Tensor]:
    hidden, dim, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * dim
    shapes = {
        "q": (heads * dim, hidden), "k": (keys, hidden), "v": (keys, hidden), "output": (hidden, heads * dim)
    }  # fmt: skip
    for name, shape in shapes.items():
        yield Tensor(f"attn_{name}.weight", shape)
        if architecture == "gpt-oss":
            yield Tensor(f"attn_{name}.bias", shape[:1], "F32")
    if architecture == "gpt-oss":
        yield Tensor("attn_sinks.weight", (heads,), "F32")
    else:
        yield from (Tensor(f"attn_{name}_norm.weight", (dim,), "F32") for name in "qk")


def _latent_attention(config: Mapping[str, Any], _architecture: str) -> Iterator[Tensor]:
    hidden, heads, rotated = config["hidden_size"], config["num_attention_heads"], config["qk_rope_head_dim"]
    rank, query_rank, value = config["kv_lora_rank"], config["q_lora_rank"], config["v_head_dim"]
    nope = config["qk_nope_head_dim"]
    yield Tensor("attn_q_a.weight", (query_rank, hidden))
    yield Tensor("attn_q_a_norm.weight", (query_rank,), "F32")
    yield Tensor("attn_q_b.weight", (heads * (nope + rotated), query_rank))
    yield Tensor("attn_kv_a_mqa.weight", (rank + rotated, hidden))
    yield Tensor("attn_kv_a_norm.weight", (rank,), "F32")
    yield Tensor("attn_k_b.weight", (heads, rank, nope), "Q8_0")
    yield Tensor("attn_v_b.weight", (heads, value, rank), "Q8_0")
    yield Tensor("attn_output.weight", (hidden, heads * value))


def _mlp(config: Mapping[str, Any], architecture: str, layer: int) -> Iterator[Tensor]:
    hidden, fields = config["hidden_size"], metadata(architecture, config)
    if layer < config.get("first_k_dense_replace", 0):
        yield from _gated("", (), config["intermediate_size"], hidden)
        return
    experts, width = fields["expert_count"], fields["expert_feed_forward_length"]
    yield Tensor("ffn_gate_inp.weight", (experts, hidden), "F32")
    yield from _gated("_exps", (experts,), width, hidden)
    if architecture == "deepseek2":
        yield Tensor("exp_probs_b.bias", (experts,), "F32")
        yield from _gated("_shexp", (), config["n_shared_experts"] * width, hidden)
    if architecture == "gpt-oss":
        yield Tensor("ffn_gate_inp.bias", (experts,), "F32")
        for name, height in (("gate", width), ("up", width), ("down", hidden)):
            yield Tensor(f"ffn_{name}_exps.bias", (experts, height), "F32")


def _gated(suffix: str, stack: tuple[int, ...], width: int, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"ffn_gate{suffix}.weight", (*stack, width, hidden))
    yield Tensor(f"ffn_up{suffix}.weight", (*stack, width, hidden))
    yield Tensor(f"ffn_down{suffix}.weight", (*stack, hidden, width))


class _Weights:
    """Random weights: norms of ones, small biases and routers, blocks of the other kinds."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(SEED)
        self._pools: dict[tuple[str, float], Bytes] = {}

    def of(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return a tensor's content."""
        if tensor.kind != "F32":
            spread = EMBEDDING_SCALE if tensor.name == _EMBEDDING else SPREAD
            pool = self._pools.get((tensor.kind, spread))
            if pool is None:
                pool = self._pools[tensor.kind, spread] = self._drawn(tensor.kind, spread)
            return np.resize(pool, tensor.num_bytes).reshape(tensor.stored_shape)
        if tensor.name.endswith("norm.weight"):
            return np.ones(tensor.shape, dtype=np.float32)
        return self._random.normal(0, SPREAD, tensor.shape).astype(np.float32)

    def _drawn(self, kind: str, spread: float) -> Bytes:
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = self._random.integers(0, 256, (_POOL_BLOCKS, size), dtype=np.uint8)
        if kind == "Q4_0":
            low, high = self._random.integers(1, 16, (2, *blocks.shape), dtype=np.uint8)
            blocks = low | high << 4
        blocks[:, :2] = np.array([spread / _DEVIATIONS[kind]], dtype="<f2").view(np.uint8)
        return blocks.reshape(-1)


@dataclass(frozen=True, slots=True)
class Work:
    """Reads and products of one model's steps, where routing is even."""

    others: int
    """Bytes of weights that are no experts', the head's among them; of the embedding only some rows are read."""
    experts: int
    """Bytes of all experts."""
    share: float
    """Share of a layer's experts that one token chooses."""
    weights: float
    """Weights that a token is multiplied with, but for the head."""

    @classmethod
    def of(cls, file: Path) -> Work:
        """Read it off a file's header."""
        header = GgufHeader.read(file)
        name = header.metadata["general.architecture"]
        number, chosen = (int(header.metadata[f"{name}.expert_{field}"]) for field in ("count", "used_count"))
        others, experts, weights = 0, 0, 0.0
        for tensor_name, tensor in header.tensors.items():
            is_expert = tensor_name.endswith(_EXPERTS)
            others += 0 if is_expert or tensor_name == _EMBEDDING else tensor.num_bytes
            experts += tensor.num_bytes if is_expert else 0
            if tensor_name.startswith("blk."):
                weights += math.prod(tensor.shape) * (chosen / number if is_expert else 1)
        return cls(others, experts, chosen / number, weights)

    def bytes_a_step(self, rows: int) -> float:
        """Return the bytes of weights that a step of so many tokens reads."""
        return self.others + self.experts * (1 - (1 - self.share) ** rows)
