"""Models of given shapes, and the GGUF file of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from bench.peers.gguf_file import interleaved, write
from bench.shapes import EXPERTS, SHAPES, make, tensors
from hetero_api.model_config import ModelConfig

pytestmark = pytest.mark.unit

SMALL = {
    **SHAPES["qwen3-0.6b"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    make(SMALL, folder / "models" / "small", tokenizer=folder)
    return folder / "models" / "small"


@pytest.mark.parametrize(("name", "millions"), [("qwen3-0.6b", 596), ("qwen3-1.7b", 1720), (EXPERTS, 132)])
def test_shapes_have_the_parameters_that_their_names_say(name: str, millions: int) -> None:
    config = ModelConfig.from_hf(SHAPES[name])
    made = sum(torch.Size(tensor.shape).numel() for tensor in tensors(SHAPES[name]))
    assert made == config.num_parameters
    assert made // 10**6 == millions


def test_a_made_model_is_whole_random_and_always_the_same(small: Path, tmp_path: Path) -> None:
    make(SMALL, tmp_path / "again", tokenizer=small)
    assert (small / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    assert ModelConfig.from_directory(small).num_layers == 2
    with safe_open(small / "model.safetensors", framework="pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
        norm = file.get_tensor("model.norm.weight")
    assert embedding.dtype == torch.bfloat16
    assert embedding.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(norm, torch.ones_like(norm))


def test_experts_get_embeddings_that_tell_tokens_apart(small: Path, tmp_path: Path) -> None:
    shape = {**SHAPES[EXPERTS], "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100, "num_experts": 4}
    make(shape, tmp_path / "experts", tokenizer=small)
    with safe_open(tmp_path / "experts" / "model.safetensors", framework="pt") as file:
        scales = [file.get_tensor(f"{name}.weight").float().std().item() for name in ("model.embed_tokens", "lm_head")]
    assert scales == [pytest.approx(4.0, rel=0.1), pytest.approx(0.02, rel=0.1)]


def test_transformers_loads_it(small: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(small, output_loading_info=True)
    model, told = loaded
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.config.hidden_size == 32


def test_a_gguf_has_the_same_bits_and_says_what_it_is(small: Path, tmp_path: Path) -> None:
    write(small, tmp_path / "small.gguf")
    reader = gguf.GGUFReader(str(tmp_path / "small.gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["tokenizer.ggml.model"] == "no_vocab"
    assert (fields["qwen3.vocab_size"], fields["qwen3.block_count"]) == (100, 2)
    assert fields["qwen3.rope.freq_base"] == 1e6
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == len(list(tensors(SMALL)))
    with safe_open(small / "model.safetensors", framework="pt") as file:
        query = file.get_tensor("model.layers.1.self_attn.q_proj.weight")
    assert np.array_equal(found["blk.1.attn_q.weight"].data, query.view(torch.uint8).numpy())
    assert found["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_rows_of_each_head_are_taken_from_its_halves_in_turn() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_what_a_gguf_could_not_say_is_refused(small: Path, tmp_path: Path) -> None:
    biased = tmp_path / "biased"
    biased.mkdir()
    text = (small / "config.json").read_text().replace('"attention_bias": false', '"attention_bias": true')
    (biased / "config.json").write_text(text)
    with pytest.raises(ValueError, match="without biases"):
        write(biased, tmp_path / "biased.gguf")
