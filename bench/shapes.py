"""Models to measure with: the demo model, and random weights in the shape of others, made once and kept.

    python -m bench.shapes [NAME ...]

A made model is a Hugging Face directory: config.json, bfloat16 safetensors, the demo model's tokenizer. Its vocabulary
is the shape's own, so the head costs what it costs there; the tokenizer uses the first part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.gpu.shapes import EMBEDDING_SCALE
from bench.home import BenchHome
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory

DEMO: Final = "smollm2-135m"
EXPERTS: Final = "experts-0.1b"
"""A small model of experts: a token chooses 4 of 16 in each layer."""
MANY_EXPERTS: Final = "experts-0.9b"
"""More experts than caches hold: a token chooses 8 of 64 in each layer."""
SEED: Final = 7
SCALE: Final = 0.02
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_QWEN3: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": SCALE,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "use_cache": True,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3_MOE: Final[Mapping[str, Any]] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 64,
    "num_hidden_layers": 8,
    "vocab_size": 49152,
    # With one matrix for both, random weights say the last token again and again.
    "tie_word_embeddings": False,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    EXPERTS: {
        **_QWEN3_MOE,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "moe_intermediate_size": 384,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    MANY_EXPERTS: {
        **_QWEN3_MOE,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
MODELS: Final = (DEMO, *SHAPES)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix of random numbers, or a norm's vector of ones."""

    name: str
    shape: tuple[int, ...]
    scale: float = SCALE
    """Standard deviation."""


def directory_of(name: str, home: BenchHome) -> Path:
    """The model's directory; a made one is made now if it is not there. Raises ValueError or ModelStoreError."""
    if name == DEMO:
        return demo_directory(HeteroHome.from_environment())
    if name not in SHAPES:
        raise ValueError(f"no model {name!r}: one of {', '.join(MODELS)}")
    directory = home.model(name)
    if not directory.is_dir():
        make(SHAPES[name], directory, tokenizer=directory_of(DEMO, home))
    return directory


def make(config: Mapping[str, Any], directory: Path, *, tokenizer: Path) -> None:
    """Write the model; the directory appears when it is whole."""
    import torch
    from safetensors.torch import save_file

    directory.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        tensor.name: torch.ones(tensor.shape, dtype=torch.bfloat16)
        if len(tensor.shape) == 1
        else torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0.0, tensor.scale, generator=generator)
        for tensor in tensors(config)
    }
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        made = Path(folder) / directory.name
        made.mkdir()
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in _TOKENIZER_FILES:
            shutil.copy(tokenizer / name, made / name)
        os.replace(made, directory)


def tensors(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """All of a Qwen3 model, dense or of experts, by Hugging Face's names."""
    hidden, head, experts = config["hidden_size"], config["head_dim"], config.get("num_experts", 0)
    columns = config["moe_intermediate_size" if experts else "intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield Tensor("model.embed_tokens.weight", (config["vocab_size"], hidden), EMBEDDING_SCALE if experts else SCALE)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield Tensor(f"{at}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{at}.self_attn.q_proj.weight", (queries, hidden))
        yield Tensor(f"{at}.self_attn.k_proj.weight", (keys, hidden))
        yield Tensor(f"{at}.self_attn.v_proj.weight", (keys, hidden))
        yield Tensor(f"{at}.self_attn.q_norm.weight", (head,))
        yield Tensor(f"{at}.self_attn.k_norm.weight", (head,))
        yield Tensor(f"{at}.self_attn.o_proj.weight", (hidden, queries))
        yield Tensor(f"{at}.post_attention_layernorm.weight", (hidden,))
        if experts:
            yield Tensor(f"{at}.mlp.gate.weight", (experts, hidden))
        for mlp in [f"{at}.mlp.experts.{number}" for number in range(experts)] or [f"{at}.mlp"]:
            yield Tensor(f"{mlp}.gate_proj.weight", (columns, hidden))
            yield Tensor(f"{mlp}.up_proj.weight", (columns, hidden))
            yield Tensor(f"{mlp}.down_proj.weight", (hidden, columns))
    yield Tensor("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Tensor("lm_head.weight", (config["vocab_size"], hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(SHAPES), help=f"default: {' '.join(SHAPES)}")
    for name in parser.parse_args().names:
        print(directory_of(name, BenchHome.from_environment()))


if __name__ == "__main__":
    main()
