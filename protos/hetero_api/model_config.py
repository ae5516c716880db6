"""A decoder model's shape, read from a Hugging Face directory's config.json.

The gateway plans with it, the worker builds with it; neither needs transformers for it. One frozen
dataclass covers the Llama family: what differs between its members are the switches below (biases, QK
norm, tied embeddings, rope scaling), so the model code has no branch on an architecture's name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_api.errors import ModelError

CONFIG_FILE: Final = "config.json"
SUPPORTED_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    `kind` is "default", "linear" or "llama3". For "linear", frequencies are divided by `factor`. For
    "llama3" (Llama 3.1's `rope_scaling`), low frequencies are divided by `factor`, high ones kept, with a
    smooth step between `low_freq_factor` and `high_freq_factor` of `original_max_position`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """The head_dim/2 angular frequencies, radians a position."""
        base = [self.theta ** -(i / head_dim) for i in range(0, head_dim, 2)]
        if self.kind == "linear":
            return tuple(f / self.factor for f in base)
        if self.kind == "llama3":
            return tuple(self._llama3(f) for f in base)
        return tuple(base)

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder model. Counts are whole-model, not per rank."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_params_per_kv_head(self) -> int:
        """Weights of q, k, v and o that go with one KV head, in one layer."""
        return self.hidden_size * self.head_dim * (2 * self.group_size + 2)

    @property
    def mlp_params_per_column(self) -> int:
        """Weights of gate, up and down that go with one MLP column, in one layer."""
        return 3 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, tied embeddings once, biases and norms included."""
        attention = self.attention_params_per_kv_head * self.num_kv_heads
        qkv_width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        biases = (
            self.qkv_bias * qkv_width
            + self.o_bias * self.hidden_size
            + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        )
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + self.mlp_params_per_column * self.intermediate_size + biases + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read `directory`/config.json (and generation_config.json for more end tokens).

        Raises ModelError, which names the file and the field, when something is missing or unsupported.
        """
        path = directory / CONFIG_FILE
        config = _read_json(path)
        generation = directory / "generation_config.json"
        extra = _read_json(generation) if generation.exists() else {}
        return cls.from_hf(config, generation=extra, source=str(path))

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        generation: Mapping[str, Any] | None = None,
        source: str = CONFIG_FILE,
    ) -> ModelConfig:
        """From the contents of config.json. Raises ModelError."""
        fields = _Fields(config, source)
        architecture = _architecture(config, source)
        num_heads = fields.positive("num_attention_heads")
        hidden = fields.positive("hidden_size")
        num_kv_heads = fields.positive("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{source}: num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{source}: hidden_act {config['hidden_act']!r} is not supported; supported: silu")
        if config.get("quantization_config"):
            raise ModelError(f"{source}: quantization_config is set; quantised checkpoints are not supported yet")
        max_position = fields.positive("max_position_embeddings")
        qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            num_layers=fields.positive("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=fields.positive("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=fields.positive("head_dim", default=hidden // num_heads),
            vocab_size=fields.positive("vocab_size"),
            max_position=_attention_span(config, architecture, max_position),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, max_position, source),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias and not qwen2,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qwen3,
            eos_token_ids=_eos(config, generation or {}),
            bos_token_id=config.get("bos_token_id"),
        )


def model_fingerprint(directory: Path) -> str:
    """sha256 of config.json, hex: ranks and gateway must be looking at the same model."""
    try:
        return hashlib.sha256((directory / CONFIG_FILE).read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"{directory / CONFIG_FILE}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Fields:
    config: Mapping[str, Any]
    source: str

    def positive(self, name: str, *, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.source}: {name} must be a whole number of at least 1, not {value!r}")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file; a model directory in Hugging Face format has one") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data


def _architecture(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{source}: architecture {names[0]} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return str(names[0])


def _attention_span(config: Mapping[str, Any], architecture: str, max_position: int) -> int:
    """Longest sequence for which full attention equals the model's own (a sliding window bounds it)."""
    window = config.get("sliding_window")
    active = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    return min(max_position, int(window)) if window and active else max_position


def _rope(config: Mapping[str, Any], max_position: int, source: str) -> RopeConfig:
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{source}: rope type {kind!r} is not supported; supported: default, linear, llama3")
    if kind == "default":
        return RopeConfig(theta)
    return RopeConfig(
        theta,
        kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings", max_position)),
    )


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
