"""A decoder model's shape, read from a Hugging Face directory's config.json.

The gateway plans with it, the worker builds with it; neither needs transformers for it. One frozen
dataclass covers all supported families: what differs between their members are the switches below, so the model code
has no branch on an architecture's name. A switch that is not mentioned says what Llama does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hetero_api.architectures import SUPPORTED_ARCHITECTURES, Activation, ExpertsConfig, RopeConfig, SlidingAttention
from hetero_api.errors import ModelError
from hetero_api.gguf_file import gguf_of, gguf_weights
from hetero_api.hf_config import HfConfig, read_json
from hetero_api.model_directory import MAX_CONFIG_BYTES, read_model_file
from hetero_api.weight_format import FLOAT_WEIGHTS, StoredWeights

__all__ = ["CONFIG_FILE", "SUPPORTED_ARCHITECTURES", "ModelConfig", "RopeConfig", "model_fingerprint"]

CONFIG_FILE: Final = "config.json"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder model. Counts are whole-model, not per rank."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """MLP columns of a dense layer."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    """Rotation of layers without a sliding window."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Number to add to a norm's stored weight."""
    post_norms: bool = False
    """Whether a layer's halves are normed once more before they are added to the residual stream."""
    embedding_scale: float = 1.0
    query_scalar: int | None = None
    """Attention scores are divided by its root; None: head_dim."""
    attention_soft_cap: float | None = None
    """Attention scores s become cap · tanh(s / cap)."""
    logit_soft_cap: float | None = None
    """Soft cap of logits."""
    sliding: SlidingAttention | None = None
    experts: ExpertsConfig | None = None
    weights: StoredWeights = FLOAT_WEIGHTS

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return 1 / math.sqrt(self.head_dim if self.query_scalar is None else self.query_scalar)

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has them; 0: every layer is dense."""
        return self.experts.number if self.experts is not None else 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers that have experts, ascending."""
        return self.experts.layers if self.experts is not None else ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where a token attends to all before it."""
        sliding = self.sliding
        return tuple(sliding.window if sliding and i in sliding.layers else None for i in range(self.num_layers))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations of each layer."""
        sliding = self.sliding
        return tuple(sliding.rope if sliding and i in sliding.layers else self.rope for i in range(self.num_layers))

    @property
    def attention_params_per_kv_head(self) -> int:
        """Weights of q, k, v and o that go with one KV head, in one layer."""
        return self.hidden_size * self.head_dim * (2 * self.group_size + 2)

    @property
    def mlp_params_per_column(self) -> int:
        """Weights of gate, up and down that go with one MLP column, in one layer."""
        return 3 * self.hidden_size

    @property
    def params_per_expert(self) -> int:
        """Weights of one expert, in one layer; 0 where there are none."""
        return self.mlp_params_per_column * self.experts.intermediate_size if self.experts is not None else 0

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, tied embeddings once, biases and norms included."""
        attention = self.attention_params_per_kv_head * self.num_kv_heads
        qkv_width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        biases = self.qkv_bias * qkv_width + self.o_bias * self.hidden_size
        norms = (4 if self.post_norms else 2) * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layers = self.num_layers * (attention + biases + norms) + self._mlp_parameters
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return layers + embeddings + self.hidden_size

    @property
    def _mlp_parameters(self) -> int:
        """Number of parameters of all layers' MLPs: dense ones, and experts with their routers."""
        biases = self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        dense = self.mlp_params_per_column * self.intermediate_size + biases
        sparse = self.num_experts * (self.params_per_expert + self.hidden_size)
        number = len(self.expert_layers)
        return (self.num_layers - number) * dense + number * sparse

    def quantized(self, quantization: str, group: int | None = None) -> ModelConfig:
        """With its weights quantised at load: "none", "int8" or "int4", the last in groups of so many inputs.

        Raises ModelError for what is not known, and for a checkpoint that is quantised already.
        """
        return replace(self, weights=self.weights.quantized(quantization, group))

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read `directory`/config.json (and generation_config.json for more end tokens, and a GGUF file's header).

        Raises ModelError, which names the file and the field, when something is missing or unsupported.
        """
        path = directory / CONFIG_FILE
        config = read_json(path)
        generation = directory / "generation_config.json"
        extra = read_json(generation) if generation.exists() else {}
        model = cls.from_hf(config, generation=extra, source=str(path))
        gguf = gguf_of(directory)
        return model if gguf is None else replace(model, weights=gguf_weights(gguf))

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, source: str = CONFIG_FILE
    ) -> ModelConfig:
        """From the contents of config.json. Raises ModelError."""
        fields = HfConfig(config, source)
        traits = fields.traits
        fields.check_supported()
        num_heads, hidden = fields.positive("num_attention_heads"), fields.positive("hidden_size")
        num_kv_heads = fields.positive("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise fields.error(
                f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})"
            )
        attention_bias = bool(config.get("attention_bias", False))
        head_dim = fields.positive("head_dim", default=traits.head_dim or hidden // num_heads)
        return cls(
            architecture=fields.architecture,
            num_layers=fields.positive("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=fields.positive("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=fields.positive("vocab_size"),
            max_position=fields.positive("max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=fields.rope(),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", traits.tie_word_embeddings)),
            qkv_bias=traits.biased_qkv or attention_bias,
            o_bias=attention_bias and not traits.biased_qkv,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=traits.qk_norm,
            eos_token_ids=fields.end_tokens(generation or {}),
            bos_token_id=config.get("bos_token_id"),
            activation=fields.activation(),
            norm_offset=traits.norm_offset,
            post_norms=traits.post_norms,
            embedding_scale=hidden**0.5 if traits.scaled_embedding else 1.0,
            query_scalar=fields.positive("query_pre_attn_scalar", default=head_dim),
            attention_soft_cap=fields.soft_cap("attn_logit_softcapping", default=traits.attn_logit_softcapping),
            logit_soft_cap=fields.soft_cap("final_logit_softcapping", default=traits.final_logit_softcapping),
            sliding=fields.sliding(),
            experts=fields.experts(),
            weights=fields.stored_weights(),
        )


def model_fingerprint(directory: Path) -> str:
    """sha256 of config.json, hex: ranks and gateway must be looking at the same model."""
    try:
        return hashlib.sha256(read_model_file(directory / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)).hexdigest()
    except OSError as error:
        raise ModelError(f"{directory / CONFIG_FILE}: {error.strerror}") from error
