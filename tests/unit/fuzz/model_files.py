"""Targets that read files of a model: each from a directory in memory that holds only what the bytes say."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import struct
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hetero_api.errors import ModelError
from hetero_api.gguf_model import gguf_files, gguf_header
from hetero_api.model_config import ModelConfig
from hetero_api.model_directory import ADAPTER_CONFIG
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_worker.adapters.peft_files import LoraAdapter
from hetero_worker.checkpoints.gguf_store import open_gguf
from hetero_worker.checkpoints.safetensors_store import SafetensorsStore
from hetero_worker.checkpoints.sampled_digests import sampled_digests
from hetero_worker.checkpoints.store import TensorSlice
from tests.support.gguf_models import add_tokenizer
from tests.support.mutations import use_config
from tests.unit.fuzz.target import Target, changed_json

_LARGEST_READ: Final = 1 << 22
_BYTES: Final = tuple((byte,) for byte in range(256))
CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": [2],
    "torch_dtype": "float32", "sliding_window": None, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
_MORE: Final[tuple[dict[str, Any], ...]] = (
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8,
     "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8,
     "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh"},
    {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
     "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
     "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
    {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
     "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}},
    {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                             "version": "gemm"}},
    {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                             "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                                 "type": "int", "num_bits": 4, "strategy": "group", "group_size": 32,
                                 "symmetric": True, "dynamic": False}}}}},
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}},
)  # fmt: skip


@cache
def directory(name: str) -> Path:
    """Return a folder in memory that goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read_config(data: bytes) -> None:
    folder = directory("config")
    (folder / "config.json").write_bytes(data)
    use_config(ModelConfig.from_directory(folder))


def _configs() -> Iterator[bytes]:
    for more in ({}, *_MORE):
        yield json.dumps(CONFIG | more).encode()


def _read_gguf(data: bytes) -> None:
    folder = directory("gguf")
    (folder / "model.gguf").write_bytes(data)
    sampled_digests(folder)
    use_config(ModelConfig.from_directory(folder))
    TextTokenizer.from_directory(folder).encode("a bc")
    store = open_gguf(folder)
    assert store is not None
    for name, shape in _parts(folder):
        part = TensorSlice(name, shape)
        if store.format_of(name) is None:
            store.floats(part)
        else:
            store.quantized(part).dequantized()


def _parts(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield our names of a Llama's tensors, and their shapes as far as they are small."""
    tensors = gguf_header(gguf_files(folder)).tensors
    names = {
        "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }  # fmt: skip
    for stored, name in names.items():
        if stored in tensors and tensors[stored].num_bytes < _LARGEST_READ:
            yield name, tensors[stored].shape


def _ggufs() -> Iterator[bytes]:
    for model, kind in (("gpt2", gguf.GGMLQuantizationType.F32), ("llama", gguf.GGMLQuantizationType.Q8_0)):
        path = directory("seed") / "seed.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        _add_fields(writer, model)
        numbers = np.random.default_rng(0)
        shapes = {"token_embd.weight": (13, 32), "output_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
                  "blk.0.ffn_down.weight": (32, 64)}  # fmt: skip
        for name, shape in shapes.items():
            values = numbers.standard_normal(shape).astype(np.float32)
            if len(shape) == 1:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path.read_bytes()


def _add_fields(writer: gguf.GGUFWriter, model: str) -> None:
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(13)
    add_tokenizer(writer, model)


def _read_safetensors(data: bytes) -> None:
    folder = directory("safetensors")
    (folder / "model.safetensors").write_bytes(data)
    sampled_digests(folder)
    store = SafetensorsStore(folder)
    for name in ("a", "model.norm.weight"):
        if store.has(name):
            store.slice(name)


def _read_adapter_config(data: bytes) -> None:
    folder = directory("adapter")
    (folder / ADAPTER_CONFIG).write_bytes(data)
    LoraAdapter(folder, {})


def _adapter_configs() -> Iterator[bytes]:
    yield json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_dora": False, "rank_pattern": {}}).encode()


def _safetensors() -> Iterator[bytes]:
    tensors = {"a": torch.arange(12, dtype=torch.float32).view(3, 4), "model.norm.weight": torch.ones(8).bfloat16()}
    yield save(tensors)
    yield save(tensors, metadata={"format": "pt"})


def _changed_safetensors(data: bytes, random_: random.Random) -> bytes:
    """Change the JSON of the header; its length then fits."""
    length = int.from_bytes(data[:8], "little")
    header = changed_json(data[8 : 8 + length], random_)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


_TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "tiktoken.model",
)  # fmt: skip


def _read_tokenizer(data: bytes) -> None:
    """The bytes are JSON of the files' contents, by their names."""
    folder = directory("tokenizer")
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = {"tokenizer.json": data.decode(errors="replace")}
    for name in _TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
        if isinstance(files, dict) and name in files:
            content = files[name] if isinstance(files[name], str) else json.dumps(files[name])
            (folder / name).write_text(content, encoding="utf-8", errors="surrogatepass")
    tokenizer = TextTokenizer.from_directory(folder)
    tokenizer.decode(tokenizer.encode("a bc 🙂"))
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def _tokenizers() -> Iterator[bytes]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    files: dict[str, Any] = {"tokenizer.json": json.loads(tokenizer.to_str())}
    yield json.dumps(files).encode()
    files["tokenizer_config.json"] = {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True,
        "chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}",
    }  # fmt: skip
    yield json.dumps(files).encode()
    words = Tokenizer(models.WordLevel(vocab={"a": 0, "bc": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    yield json.dumps({"tokenizer.json": json.loads(words.to_str()), "chat_template.jinja": "{{ messages }}"}).encode()
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate((*map(bytes, _BYTES), b"ab"))]
    special = {str(len(lines)): {"content": "[BOS]", "special": True}}
    kimi = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": special}
    yield json.dumps({"tiktoken.model": "".join(lines), "tokenizer_config.json": kimi}).encode()


TARGETS: Final = (
    Target("configs", _read_config, (ModelError,), _configs, changed_json),
    Target("adapter-configs", _read_adapter_config, (ModelError,), _adapter_configs, changed_json),
    Target("gguf", _read_gguf, (ModelError,), _ggufs),
    Target("safetensors", _read_safetensors, (ModelError,), _safetensors, _changed_safetensors),
    Target("tokenizers", _read_tokenizer, (ModelError, InvalidRequest), _tokenizers, changed_json),
)
