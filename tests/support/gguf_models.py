"""Tiny checkpoints of Hugging Face as GGUF files, as llama.cpp's conversion writes them, by the gguf package.

Names of tensors are those of the package's own table, so this shares nothing with what reads the files.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+\.weight)")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": ("first_k_dense_replace",),
}
_OF_EXPERTS = ("qwen3moe", "glm4moe", "gpt-oss", "minimax-m2", "deepseek2", "qwen3next", "qwen35moe")
_OF_DELTA_RULE = ("qwen3next", "qwen35", "qwen35moe")
_TILED = ("qwen35", "qwen35moe")


def write_gguf_model(
    source: Path,
    target: Path,
    architecture: str,
    *,
    kind: Callable[[str, Array], str] = lambda _name, _data: "F32",
    split_max_tensors: int = 0,
    whole_heads: bool = False,
    fields: Mapping[str, Any] = MappingProxyType({}),
    tokens: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Write the checkpoint in the directory `source` as `target`, or its parts of some tensors each.

    `kind`: type of each tensor. `whole_heads`: latent attention's kv_b_proj stays whole, as in earlier files.
    `fields`: metadata besides, without the architecture before them. `tokens`: texts of some tokens.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=split_max_tensors)
    for name, value in (metadata_of(config, architecture, whole_heads=whole_heads) | dict(fields)).items():
        _add(writer, f"{architecture}.{name}", value)
    writer.add_token_list([tokens.get(number, f"<{number}>") for number in range(config["vocab_size"])])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    tensors = load_file(source / "model.safetensors")
    for name, data in _stored(tensors, config, architecture, whole_heads=whole_heads):
        chosen = gguf.GGMLQuantizationType[kind(name, data)]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(data), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_one_matrix(target: Path, kind: str, *, rows: int, columns: int) -> None:
    """Write a llama file with nothing but a down projection. Where the gguf package packs none, bytes are random."""
    random, chosen = np.random.default_rng(5), gguf.GGMLQuantizationType[kind]
    try:
        data = gguf.quantize(random.normal(0, 0.1, (rows, columns)).astype(np.float32), chosen)
    except NotImplementedError:
        values, size = gguf.GGML_QUANT_SIZES[chosen]
        data = random.integers(0, 128, (rows, columns // values * size), dtype=np.uint8)
        data[:, 1::2] &= 0x3F  # no float16 that is none, nor a large one
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_tensor("blk.0.ffn_down.weight", data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def metadata_of(config: Mapping[str, Any], architecture: str, *, whole_heads: bool = False) -> dict[str, Any]:
    """Fields without the architecture before them."""
    found: dict[str, Any] = {}
    for field, names in _FIELDS.items():
        known = [config[name] for name in names if config.get(name) is not None]
        if known:
            found[field] = known[0]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    found["rope.freq_base"] = float(rope["rope_theta"])
    if sliding := config["rope_parameters"].get("sliding_attention"):
        found["rope.freq_base_swa"] = float(sliding["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if name in rope}
    if "partial_rotary_factor" in rope and architecture != "gemma4":
        found["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    if architecture in _OF_EXPERTS:
        found["expert_feed_forward_length"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    if architecture in ("glm4moe", "minimax-m2", "deepseek2"):
        found["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "minimax-m2":
        found["rope.dimension_count"] = config.get("rotary_dim") or config["head_dim"]
    if architecture == "deepseek2":
        found |= _latent_fields(config, whole_heads=whole_heads)
    if architecture in _OF_DELTA_RULE:
        found["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        found["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    if architecture == "gemma4":
        found |= _gemma4_fields(config)
    return found


def _gemma4_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = next(iter(config["per_layer_config"].values()))
    fields = {
        "attention.sliding_window_pattern": slides,
        "attention.key_length": own["head_dim"],
        "attention.value_length": own["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "rope.dimension_count": own["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }
    if (heads := own.get("num_key_value_heads")) is not None:
        fields["attention.head_count_kv"] = [config["num_key_value_heads"] if slid else heads for slid in slides]
    if config["enable_moe_block"]:
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config.get("use_double_wide_mlp"):
        width, readers = config["intermediate_size"], config["num_kv_shared_layers"]
        fields["feed_forward_length"] = [width] * (len(slides) - readers) + [2 * width] * readers
    return fields


def _latent_fields(config: Mapping[str, Any], *, whole_heads: bool) -> dict[str, Any]:
    rotated, rank, value = config["qk_rope_head_dim"], config["kv_lora_rank"], config["v_head_dim"]
    query = config["qk_nope_head_dim"] + rotated
    fields = {"rope.dimension_count": rotated}
    if whole_heads:
        return fields | {"attention.key_length": query, "attention.value_length": value}
    scaling = config["rope_parameters"].get("mscale_all_dim")
    return (
        fields
        | ({"rope.scaling.yarn_log_multiplier": 0.1 * scaling} if scaling else {})
        | {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": query,
            "attention.value_length_mla": value,
        }
    )


def _stored(
    tensors: Tensors, config: Mapping[str, Any], architecture: str, *, whole_heads: bool
) -> Iterator[tuple[str, Array]]:
    """Names and contents as GGUF has them."""
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    experts: dict[str, dict[int, Array]] = defaultdict(dict)
    for name, data in tensors.items():
        if (expert := _EXPERT.fullmatch(name)) is not None:
            experts[f"{expert[1]}.{expert[3]}"][int(expert[2])] = data
            continue
        for published, content in _changed(name, data, config, architecture, whole_heads=whole_heads):
            yield _named(names, published), content
    for name, entries in experts.items():
        yield _named(names, name), np.stack([entries[number] for number in range(len(entries))])
    if config["rope_parameters"].get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_divisors(config)
    if architecture == "gemma4":
        yield "rope_freqs.weight", _gemma4_divisors(config)


def _named(names: gguf.TensorNameMap, published: str) -> str:
    if published.startswith("blk."):
        return published
    found = names.get_name(published, try_suffixes=(".weight", ".bias"))
    assert found is not None, published
    return found


def _changed(
    name: str, data: Array, config: Mapping[str, Any], architecture: str, *, whole_heads: bool
) -> Iterator[tuple[str, Array]]:
    """One tensor as the conversion renames, splits, turns or permutes it."""
    if architecture in ("llama", "smollm3", "mistral3") and ".self_attn." in name:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        yield name, _interleaved(data, config[heads]) if heads else data
    elif architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        yield name, data + 1
    elif architecture == "gemma4":
        yield _gemma4_name(name), data
    elif architecture in _OF_DELTA_RULE and "experts" not in name:
        yield from _of_delta_rule(name, data, config, tiled=architecture in _TILED)
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), data
    elif name.endswith(".sinks"):
        yield f"{name}.weight", data
    elif name.endswith("kv_b_proj.weight") and not whole_heads:
        yield from _halves_by_head(name, data, config)
    elif ".experts." in name:
        yield from _unstacked(name, data)
    else:
        yield name, data


def _gemma4_name(name: str) -> str:
    layer = f"blk.{name.split('.')[2]}"
    if name.endswith("router.scale"):
        return f"{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"{layer}.ffn_down_exps.scale"
    return name if name.endswith(".weight") else f"{name}.weight"


def _of_delta_rule(name: str, data: Array, config: Mapping[str, Any], *, tiled: bool) -> Iterator[tuple[str, Array]]:
    """Norms, and tensors of the gated delta rule; `tiled`: value heads in the order of their numbers in key heads."""
    if tiled and ".linear_attn." in name:
        data = _tiled(name, data, config)
    if name.endswith("A_log"):
        yield name, -np.exp(data)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), data
    elif name.endswith("conv1d.weight"):
        yield name, data.squeeze()
    elif name.endswith("norm.weight"):
        yield name, data if name.endswith("linear_attn.norm.weight") else data + 1
    elif name.endswith("in_proj_qkvz.weight"):
        yield from _divided(name, data, config)
    else:
        yield name, data


def _tiled(name: str, data: Array, config: Mapping[str, Any]) -> Array:
    keys, values, dim = (config[f"linear_{field}"] for field in ("num_key_heads", "num_value_heads", "value_head_dim"))

    def reordered(rows: Array) -> Array:
        heads = rows.reshape(keys, values // keys, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    part = name.removesuffix(".weight").rpartition(".")[2]
    if part == "out_proj":
        return np.ascontiguousarray(reordered(data.T).T)
    if part in ("in_proj_qkv", "conv1d"):
        first = len(data) - values * dim
        return np.concatenate([data[:first], reordered(data[first:])])
    return reordered(data) if part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias") else data


def _divided(name: str, data: Array, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Qwen3-Next's projection, which is stored by key heads, as two of all heads."""
    keys, key, dim = (config[f"linear_{field}"] for field in ("num_key_heads", "key_head_dim", "value_head_dim"))
    value = config["linear_num_value_heads"] // keys * dim
    by_head = data.reshape(keys, -1, data.shape[1])
    parts = [part.reshape(-1, data.shape[1]) for part in np.split(by_head, [key, 2 * key, 2 * key + value], axis=1)]
    yield name.replace("qkvz", "qkv"), np.concatenate(parts[:3])
    yield name.replace("qkvz", "z"), parts[3]


def _interleaved(data: Array, heads: int) -> Array:
    split = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return split.swapaxes(1, 2).reshape(data.shape)


def _halves_by_head(name: str, data: Array, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    by_head = data.reshape(config["num_attention_heads"], -1, data.shape[1])
    nope = config["qk_nope_head_dim"]
    yield name.replace("kv_b_proj", "k_b_proj"), by_head[:, :nope].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), by_head[:, nope:]


def _unstacked(name: str, data: Array) -> Iterator[tuple[str, Array]]:
    """GPT-OSS's stacks: matrices are turned, and rows of gate and up taken apart."""
    is_bias = name.endswith("_bias")
    stem, kind = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    turned = data if is_bias else data.swapaxes(1, 2)
    if stem.endswith("gate_up_proj"):
        for first, part in enumerate(("gate_proj", "up_proj")):
            yield f"{stem.replace('gate_up_proj', part)}.{kind}", turned[:, first::2]
    else:
        yield f"{stem}.{kind}", turned


def _gemma4_divisors(config: Mapping[str, Any]) -> Array:
    rope, dim = config["rope_parameters"]["full_attention"], next(iter(config["per_layer_config"].values()))["head_dim"]
    divisors: Array = np.full(dim // 2, 1e30, dtype=np.float32)
    divisors[: int(dim * rope["partial_rotary_factor"] / 2)] = 1
    return divisors


def _llama3_divisors(config: Mapping[str, Any]) -> Array:
    rope, dim = config["rope_parameters"], config["head_dim"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, original = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    divisors: Array = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return divisors.astype(np.float32)


def add_tokenizer(writer: gguf.GGUFWriter, model: str) -> None:
    """Add a tokenizer of 13 tokens, of llama.cpp's kind `model`, and a chat template."""
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("smollm")
    space = "\N{LOWER ONE EIGHTH BLOCK}" if model == "llama" else "Ġ"
    tokens = ["<unk>", "<s>", "a", "b", "c", space, f"{space}b", "bc", "<user>", *(f"<0x{i:02X}>" for i in range(4))]
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 1, 1, 1, 1, 1, 1, 4, 6, 6, 6, 6])
    writer.add_token_scores([float(-number) for number in range(len(tokens))])
    writer.add_token_merges([f"{space} b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
