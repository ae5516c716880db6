"""A decoder model's shape, read from a Hugging Face directory's config.json.

The gateway plans with it, the worker builds with it; neither needs transformers for it. One frozen
dataclass covers all supported families: what differs between their members are the switches below, so the model code
has no branch on an architecture's name. A switch that is not mentioned says what Llama does.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hetero_api.architectures import ARCHITECTURES, SUPPORTED_ARCHITECTURES
from hetero_api.errors import ModelError
from hetero_api.gguf_config import read_gguf_config
from hetero_api.gguf_model import gguf_files, gguf_header, gguf_weights
from hetero_api.hf_config import HfConfig, read_config, read_json
from hetero_api.model_directory import MAX_CONFIG_BYTES, may_hold_tensor, read_model_file
from hetero_api.model_parts import (
    NO_ROTATION,
    USUAL_NORMS,
    Activation,
    DeltaShape,
    ExpertsConfig,
    LatentShape,
    NormNames,
    QkNorm,
    RopeConfig,
    RowOrder,
    SlidingAttention,
)
from hetero_api.weight_format import COLUMN_UNIT, FLOAT_WEIGHTS, StoredWeights

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
    """KV heads of each layer, or where layers have different numbers of them, units of KV heads (`kv_heads_a_unit`)."""
    head_dim: int
    """Elements of a key; with `latent`, those of a token in the cache."""
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    """Rotation of layers without a sliding window, unless they are in `unrotated`."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Number to add to a norm's stored weight."""
    norms: NormNames = USUAL_NORMS
    embedding_scale: float = 1.0
    query_scalar: int | None = None
    """Attention scores are divided by its root; None: head_dim."""
    attention_soft_cap: float | None = None
    """Attention scores s become cap · tanh(s / cap)."""
    logit_soft_cap: float | None = None
    """Soft cap of logits."""
    sliding: SlidingAttention | None = None
    unrotated: tuple[int, ...] = ()
    """Layers whose queries and keys are not rotated, ascending."""
    interleaved_rope: bool = False
    """Whether pairs that rotate lie side by side in a stored head."""
    latent: LatentShape | None = None
    """Shape of latent attention, whose "KV heads" are its heads; None: attention is the usual one."""
    score_factor: float = 1.0
    """Factor of attention scores beside the root."""
    has_sinks: bool = False
    """Whether a learned score of each head takes part in the softmax of attention."""
    gated_attention: bool = False
    """Whether attention's results are multiplied by the sigmoid of gates, which are stored beside each query head."""
    delta: DeltaShape | None = None
    """Layers with the gated delta rule in place of attention; None: there are none."""
    fused_gate_up: bool = False
    """Whether a dense layer's gate and up projections are stored as one tensor, gate first."""
    experts: ExpertsConfig | None = None
    kv_heads_a_unit: int = 1
    """KV heads of a layer that ranks have or have not together; see `of_layer`."""
    keys_are_values: bool = False
    """Whether values of layers without a window are what keys are before their norm."""
    value_norm: bool = False
    """Whether each value head is normed, without a weight."""
    layer_scalars: bool = False
    """Whether the residual stream behind a layer is multiplied by a stored number."""
    layer_input_size: int = 0
    """Elements of the embedding that a token has for each layer, beside its usual one; 0: it has none."""
    num_kv_readers: int = 0
    """Last layers, which make no keys and values: they read those of an earlier layer (`kv_layers`)."""
    wide_readers: bool = False
    """Whether dense MLPs of these layers have twice as many columns."""
    makes_kv: bool = True
    """Whether a layer makes keys and values; see `of_layer`."""
    num_prediction_heads: int = 0
    """Multi-token-prediction heads that the files hold behind the layers; see `prediction_head`."""
    follows_states: bool = False
    """Whether the model is such a head: its input is the state of a token behind another model, and the next token."""
    weights: StoredWeights = FLOAT_WEIGHTS

    def of_layer(self, layer: int) -> ModelConfig:
        """Return the configuration whose KV heads are this layer's, where layers differ in them."""
        own, sliding = self, self.sliding
        if sliding is not None and sliding.kv is not None and layer in sliding.layers:
            heads, head_dim = sliding.kv
            own = replace(self, kv_heads_a_unit=heads, head_dim=head_dim, keys_are_values=False)
        if layer < self.num_layers - self.num_kv_readers:
            return own
        return replace(own, makes_kv=False, keys_are_values=False)

    @property
    def prediction_head(self) -> ModelConfig | None:
        """The first multi-token-prediction head, with embedding and output head, as a model of one layer; None: none.

        Its layer is like the last one. Source: DeepSeek-V3's technical report, section 2.2.
        """
        if not self.num_prediction_heads:
            return None
        experts = replace(self.experts, layers=(0,)) if self.experts is not None else None
        return replace(self, num_layers=1, num_prediction_heads=0, follows_states=True, experts=experts, delta=None)

    @property
    def prediction_head_prefixes(self) -> Mapping[str, str]:
        """Beginnings of names of the prediction head's tensors, and what files have for them; see HeadTraits."""
        heads = ARCHITECTURES[self.architecture].heads
        prefixes = heads.prefixes if heads is not None else {}
        return {name: stored.format(layer=self.num_layers) for name, stored in prefixes.items()}

    @property
    def states_width(self) -> int:
        """Elements of the normed embedding and state that a prediction head begins with; 0 for other models."""
        return 2 * self.hidden_size if self.follows_states else 0

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads.

        It is the layer itself, or for readers the last of the others with the same window.
        """
        windows, first_reader = self.windows, self.num_layers - self.num_kv_readers
        last_maker = {windows[layer]: layer for layer in range(first_reader)}
        return tuple(last_maker[window] if i >= first_reader else i for i, window in enumerate(windows))

    @property
    def first_inseparable(self) -> int:
        """First of the layers that one rank must hold together if ranks hold whole layers.

        They read one another's keys and values; where none do, it is the last layer.
        """
        last = self.num_layers - 1
        return min(self.kv_layers[self.num_layers - self.num_kv_readers :]) if self.num_kv_readers else last

    @property
    def made_kv_heads(self) -> int:
        """KV heads of each unit whose keys and values a layer makes; 0: it reads another layer's."""
        return self.kv_heads_a_unit if self.makes_kv else 0

    @property
    def layer_inputs_width(self) -> int:
        """Elements of the embeddings that a token has for all layers together, beside its usual one."""
        return self.num_layers * self.layer_input_size

    @property
    def group_size(self) -> int:
        """Query heads a KV head, or a unit of them."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return self.score_factor / math.sqrt(self.head_dim if self.query_scalar is None else self.query_scalar)

    @property
    def rotary_widths(self) -> tuple[int, ...]:
        """Elements of each layer's table of rotations."""
        if self.latent is not None:
            return (self.latent.rope_dim,) * self.num_layers
        return tuple(self.of_layer(i).head_dim for i in range(self.num_layers))

    @property
    def output_unit(self) -> int:
        """Inputs of attention's output projection that go with one KV head."""
        return self.group_size * self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers with the gated delta rule, ascending."""
        return self.delta.layers if self.delta is not None else ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention, ascending."""
        return tuple(i for i in range(self.num_layers) if i not in self.delta_layers)

    def cached_elements(self, kv_heads: int) -> int:
        """Return the elements that a rank with so many KV heads of a layer caches for a token."""
        if self.latent is not None:
            return self.head_dim if kv_heads else 0
        return 2 * kv_heads * self.made_kv_heads * self.head_dim

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has them; 0: every layer is dense."""
        return self.experts.number if self.experts is not None else 0

    @property
    def expert_columns(self) -> int:
        """Columns of one expert; 0 where there are none."""
        return self.experts.intermediate_size if self.experts is not None else 0

    @property
    def expert_unit(self) -> int:
        """Columns of an expert that stay together where experts are dealt in slices; the last ones may be fewer.

        No slice cuts a group that is quantised at load, so that weights are the same numbers in every placement.
        """
        made = self.weights.of_experts.at_load.layers
        return COLUMN_UNIT if made is None else math.lcm(COLUMN_UNIT, made.group or COLUMN_UNIT)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers that have experts, ascending."""
        return self.experts.layers if self.experts is not None else ()

    @property
    def shared_columns(self) -> int:
        """MLP columns of a layer with experts that serve all tokens; 0: none do."""
        return self.experts.shared_columns if self.experts is not None else 0

    @property
    def mlp_sum_width(self) -> int:
        """Elements of a token in the sum of ranks' MLPs: twice hidden_size where experts add up apart from the rest."""
        return self.hidden_size * (1 if self.experts is None or self.experts.norms is None else 2)

    def mlp_columns(self, layer: int) -> int:
        """Return the MLP columns of a layer that serve all tokens."""
        return self.shared_columns if layer in self.expert_layers else self.dense_columns[layer]

    @property
    def dense_columns(self) -> dict[int, int]:
        """MLP columns of each layer without experts."""
        sparse, first_reader = set(self.expert_layers), self.num_layers - self.num_kv_readers
        wide = self.intermediate_size * (2 if self.wide_readers else 1)
        dense = (layer for layer in range(self.num_layers) if layer not in sparse)
        return {layer: wide if layer >= first_reader else self.intermediate_size for layer in dense}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where a token attends to all before it."""
        sliding = self.sliding
        return tuple(sliding.window if sliding and i in sliding.layers else None for i in range(self.num_layers))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations of each layer."""
        sliding = self.sliding
        ropes = [sliding.rope if sliding and i in sliding.layers else self.rope for i in range(self.num_layers)]
        return tuple(NO_ROTATION if i in self.unrotated else rope for i, rope in enumerate(ropes))

    @property
    def head_order(self) -> RowOrder:
        """Order in which ranks keep the rows of a query or key head."""
        return RowOrder(self.head_dim, self.rope.rotary_dim(self.head_dim), self.interleaved_rope)

    @property
    def attention_params_per_kv_head(self) -> int:
        """Weights of attention, or of what replaces it, that go with one KV head: in one layer, on average."""
        read = self.num_kv_readers * 2 * self.kv_heads_a_unit * self.head_dim * self.hidden_size
        made = len(self.attention_layers) * self._attention_params_per_head - read
        return (made * self.num_kv_heads + self._delta_parameters) // (self.num_layers * self.num_kv_heads)

    @property
    def _attention_params_per_head(self) -> int:
        latent = self.latent
        if latent is None:
            heads = (2 + self.gated_attention) * self.group_size + 2 * self.made_kv_heads
            return self.hidden_size * self.head_dim * heads
        queries = (latent.query_rank or self.hidden_size) * latent.query_dim
        return queries + latent.by_head_elements + self.hidden_size * latent.value_dim

    @property
    def _delta_parameters(self) -> int:
        """Number of parameters of all layers with the gated delta rule, but for their MLPs and norms of the stream."""
        delta = self.delta
        if delta is None:
            return 0
        return len(delta.layers) * (delta.key_heads * delta.params_per_head(self.hidden_size) + delta.value_dim)

    @property
    def attention_params_beside(self) -> int:
        """Weights of attention, in one layer, that every rank with KV heads has."""
        latent = self.latent
        return 0 if latent is None else self.hidden_size * ((latent.query_rank or 0) + latent.cached_dim)

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
        attention = sum(self.of_layer(i)._attention_parameters for i in self.attention_layers)
        norms = len(self.delta_layers) * self._norm_parameters
        layers = attention + self._delta_parameters + norms + self._mlp_parameters
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        joined = self.states_width * (self.hidden_size + 1)
        return layers + embeddings + self.hidden_size + self._layer_input_parameters + joined

    @property
    def _layer_input_parameters(self) -> int:
        """Number of parameters of embeddings for each layer, and of their projections and norms."""
        size, hidden = self.layer_input_size, self.hidden_size
        if not size:
            return 0
        return self.layer_inputs_width * (self.vocab_size + hidden) + size + self.num_layers * (2 * size + 1) * hidden

    @property
    def _norm_parameters(self) -> int:
        """Number of parameters of a layer's norms of the residual stream."""
        return (2 + len(self.norms.sums)) * self.hidden_size

    @property
    def _attention_parameters(self) -> int:
        """Number of parameters of a layer's attention and norms."""
        attention = self._attention_params_per_head * self.num_kv_heads + self.attention_params_beside
        if self.keys_are_values:
            attention -= self.hidden_size * self.num_kv_heads * self.kv_heads_a_unit * self.head_dim
        biases = self.qkv_bias * self._qkv_width + self.o_bias * self.hidden_size
        sinks = self.num_heads * self.has_sinks
        norms = self._norm_parameters + self._qk_norm_parameters
        return attention + biases + sinks + norms + self.layer_scalars

    @property
    def _qkv_width(self) -> int:
        """Number of a layer's biases of attention's inputs, if it has them."""
        if self.latent is None:
            queries = (1 + self.gated_attention) * self.num_heads
            kv_heads = self.num_kv_heads * self.made_kv_heads
            return (queries + (1 if self.keys_are_values else 2) * kv_heads) * self.head_dim
        return (self.latent.query_rank or 0) + self.latent.cached_dim

    @property
    def _qk_norm_parameters(self) -> int:
        """Number of parameters of one layer's norms of queries and keys."""
        if self.latent is not None:
            return (self.latent.query_rank or 0) + self.latent.rank
        if self.qk_norm is None:
            return 0
        kv_heads = self.num_kv_heads * self.made_kv_heads
        return self.head_dim * (1 + self.makes_kv if self.qk_norm == "head" else self.num_heads + kv_heads)

    @property
    def _mlp_parameters(self) -> int:
        """Number of parameters of all layers' MLPs: dense ones, and experts with their routers."""
        dense = self.dense_columns
        columns = sum(dense.values())
        biases = self.mlp_bias * (2 * columns + len(dense) * self.hidden_size)
        return self.mlp_params_per_column * columns + biases + len(self.expert_layers) * self._sparse_parameters

    @property
    def _sparse_parameters(self) -> int:
        """Number of parameters of one layer's experts, shared ones and router."""
        experts = self.experts
        if experts is None:
            return 0
        biases = experts.biased * (2 * experts.intermediate_size + self.hidden_size)
        router = self.hidden_size + experts.routing.biased + experts.routing.corrected + experts.routing.scaled
        shared = self.mlp_params_per_column * experts.shared_columns + self.hidden_size * experts.has_shared_gate
        norms = self.hidden_size * (experts.routing.scaled + (3 if experts.norms is not None else 0))
        return experts.number * (self.params_per_expert + biases + router) + shared + norms

    def quantized(self, quantization: str, group: int | None = None) -> ModelConfig:
        """With its weights quantised at load: "none", "int8" or "int4", the last in groups of so many inputs.

        Raises ModelError for what is not known, and for a checkpoint that is quantised already.
        """
        return replace(self, weights=self.weights.quantized(quantization, group))

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read `directory`/config.json (and generation_config.json for more end tokens, and a GGUF file's header).

        GGUF files without a config.json beside them say everything by themselves. Raises ModelError, which names the
        file and the field, when something is missing or unsupported.
        """
        path, files = directory / CONFIG_FILE, gguf_files(directory)
        generation = directory / "generation_config.json"
        extra = read_json(generation) if generation.exists() else {}
        divisors: tuple[float, ...] = ()
        if files and not path.exists():
            config, divisors = read_gguf_config(files)
            model = cls.from_hf(config, generation=extra, source=f"{files[0]} as a {CONFIG_FILE}")
        else:
            model = cls.from_hf(read_config(path), generation=extra, source=str(path))
        if model.num_prediction_heads and (files or not may_hold_tensor(directory, model._head_norm)):
            model = replace(model, num_prediction_heads=0)  # many conversions leave them out
        return model._in_gguf(files, divisors) if files else model

    @property
    def _head_norm(self) -> str:
        """Name of a tensor that files with prediction heads have."""
        return f"{self.prediction_head_prefixes['model.norm.']}weight"

    def _in_gguf(self, files: tuple[Path, ...], divisors: tuple[float, ...]) -> ModelConfig:
        """Return the same model in GGUF files, whose norms include the offset. Raises ModelError."""
        if divisors and len(divisors) != self.rope.rotary_dim(self.head_dim) // 2:
            raise ModelError(f"{files[0]}: has {len(divisors)} divisors of frequencies for heads of {self.head_dim}")
        weights = gguf_weights(gguf_header(files))
        return replace(self, weights=weights, norm_offset=0.0, rope=replace(self.rope, divisors=divisors))

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None, source: str = CONFIG_FILE
    ) -> ModelConfig:
        """From the contents of config.json. Raises ModelError."""
        fields = HfConfig.of(config, source)
        config, traits = fields.fields, fields.traits
        fields.check_supported()
        num_heads, hidden = fields.positive("num_attention_heads"), fields.positive("hidden_size")
        latent = fields.latent()
        num_kv_heads = num_heads if latent else fields.positive("num_key_value_heads", default=num_heads)
        attention_bias = bool(config.get("attention_bias", traits.attention_bias))
        has_qk_norm = bool(config.get("use_qk_norm", traits.use_qk_norm))
        head_dim = fields.positive("head_dim", default=traits.head_dim or hidden // num_heads)
        query_scalar = fields.positive("query_pre_attn_scalar", default=head_dim)
        num_kv_heads, (kv_heads_a_unit, head_dim), sliding = fields.kv_heads(num_kv_heads, head_dim, of=num_heads)
        rope = fields.rope()
        own_dim = sliding.kv.head_dim if sliding is not None and sliding.kv is not None else head_dim
        num_kv_readers, wide_readers = fields.kv_readers(sliding)
        for dim in (latent.rope_dim,) if latent else (head_dim, own_dim):
            if (rotated := rope.rotary_dim(dim)) % 2 or not rotated:
                raise fields.error(f"{rotated} elements of a head are rotated, which must be an even number of them")
        if latent is not None:
            head_dim, query_scalar = latent.cached_dim, latent.query_dim
        return cls(
            architecture=fields.architecture,
            num_layers=fields.positive("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=fields.dense_width(),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=fields.positive("vocab_size"),
            max_position=fields.max_position(rope),
            rms_norm_eps=fields.epsilon(),
            rope=rope,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", traits.tie_word_embeddings)),
            qkv_bias=attention_bias if traits.biased_qkv is None else traits.biased_qkv,
            o_bias=attention_bias and traits.biased_output,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=traits.qk_norm if has_qk_norm else None,
            eos_token_ids=fields.end_tokens(generation or {}),
            bos_token_id=fields.begin_token(),
            activation=fields.activation(),
            norm_offset=traits.norm_offset,
            norms=traits.norms,
            embedding_scale=hidden**0.5 if traits.scaled_embedding else 1.0,
            query_scalar=query_scalar,
            attention_soft_cap=fields.soft_cap("attn_logit_softcapping", default=traits.attn_logit_softcapping),
            logit_soft_cap=fields.soft_cap("final_logit_softcapping", default=traits.final_logit_softcapping),
            sliding=sliding,
            unrotated=fields.unrotated_layers(),
            interleaved_rope=bool(config.get("rope_interleave", traits.interleaved_rope)),
            latent=latent,
            score_factor=fields.score_factor(),
            has_sinks=traits.has_sinks,
            gated_attention=traits.is_gated,
            delta=fields.delta(kv_heads=num_kv_heads),
            fused_gate_up=traits.fused_gate_up,
            experts=fields.experts(),
            kv_heads_a_unit=kv_heads_a_unit,
            keys_are_values=bool(config.get("attention_k_eq_v", False)) and traits.global_head_dim is not None,
            value_norm=traits.value_norm,
            layer_scalars=traits.layer_scalars,
            layer_input_size=fields.layer_input_size(),
            num_kv_readers=num_kv_readers,
            wide_readers=wide_readers,
            num_prediction_heads=fields.prediction_heads(),
            weights=fields.stored_weights(),
        )


def model_fingerprint(directory: Path) -> str:
    """sha256 of config.json, or of what GGUF files say in its place: ranks and gateway must look at the same model.

    Raises ModelError.
    """
    files = () if (directory / CONFIG_FILE).exists() else gguf_files(directory)
    if files:
        return hashlib.sha256(json.dumps(read_gguf_config(files), sort_keys=True).encode()).hexdigest()
    try:
        return hashlib.sha256(read_model_file(directory / CONFIG_FILE, max_bytes=MAX_CONFIG_BYTES)).hexdigest()
    except FileNotFoundError as error:
        raise ModelError(f"{directory / CONFIG_FILE}: {error.strerror}") from error
