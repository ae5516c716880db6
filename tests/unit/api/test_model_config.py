"""config.json of the supported architectures, and of those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig, model_fingerprint

pytestmark = pytest.mark.unit

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_smollm2_has_its_published_size() -> None:
    config = ModelConfig.from_hf(BASE)
    assert config.num_parameters == 134_515_008
    assert (config.head_dim, config.group_size, config.eos_token_ids) == (64, 3, (2,))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, (True, False, False, False)),
        ({"architectures": ["Qwen3ForCausalLM"]}, (False, False, False, True)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({"architectures": ["MistralForCausalLM"]}, (False, False, False, False)),
    ],
)
def test_architectures_are_switches(change: dict[str, Any], expected: tuple[bool, ...]) -> None:
    config = ModelConfig.from_hf(BASE | change)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


def test_a_sliding_window_bounds_the_length() -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    assert ModelConfig.from_hf(mistral).max_position == 4096
    qwen2 = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
    assert ModelConfig.from_hf(qwen2).max_position == 8192


def test_rope_frequencies_equal_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048,
    }  # fmt: skip
    reference_config = LlamaConfig(hidden_size=576, num_attention_heads=9, rope_parameters=scaling)
    reference, _ = ROPE_INIT_FUNCTIONS["llama3"](reference_config, "cpu")
    ours = ModelConfig.from_hf(BASE | {"rope_parameters": scaling}).rope.inverse_frequencies(64)
    assert ours == pytest.approx(reference.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": None}, r"architecture \(none\) is not supported"),
        ({"hidden_size": None}, "hidden_size must be a whole number of at least 1, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"num_key_value_heads": 2}, r"num_attention_heads \(9\) is no multiple of num_key_value_heads \(2\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not supported"),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(BASE | change)


def test_end_tokens_come_from_both_files_and_the_fingerprint_from_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (0, 2)
    before = model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"rms_norm_eps": 1e-6}))
    assert model_fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("{", "cannot be read as JSON"), ("[]", "JSON object")]
)
def test_a_bad_config_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        ModelConfig.from_directory(tmp_path)
