"""Reads what config.json says into the parts of a ModelConfig.

Fields are checked here: whatever is missing, of a wrong kind or unsupported becomes a ModelError that names the file
and the field. Of fields that were renamed over time, both names are known.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hetero_api.architectures import (
    ARCHITECTURES,
    REFUSED_ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    Architecture,
    ExpertTraits,
    SlidingLayers,
)
from hetero_api.errors import ModelError
from hetero_api.model_directory import MAX_CONFIG_BYTES, parse_json, read_model_file
from hetero_api.model_parts import (
    Activation,
    DeltaShape,
    ExpertsConfig,
    KvShape,
    LatentShape,
    RopeConfig,
    Routing,
    SlidingAttention,
)
from hetero_api.packed_weights import FIELD, MODELOPT_FILE, PackedWeights
from hetero_api.weight_format import StoredWeights
from hetero_api.wrappers import text_fields

_ACTIVATIONS: Final[Mapping[str, Activation]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn", "proportional")
_EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_K_IS_V: Final = "attention_k_eq_v"
_MLP_KINDS: Final = ("dense", "sparse")
_LINEAR: Final = "linear_attention"
_MAX_WINDOW_LAYERS: Final = 28
_LARGEST: Final[Mapping[str, int]] = {
    "num_hidden_layers": 10_000, **dict.fromkeys(_EXPERT_COUNTS, 65_536), "n_shared_experts": 256,
    "num_attention_heads": 65_536, "num_key_value_heads": 65_536, "vocab_size": 1 << 24,
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"), 65_536),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 65_536), "linear_conv_kernel_dim": 256,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 65_536),
    "num_nextn_predict_layers": 64,
}  # fmt: skip
"""Counts by which lists are made, and far more than any model has."""
_LARGEST_OTHER: Final = 1 << 31
_LARGEST_NUMBER: Final = 1e12
_LARGEST_TOKEN: Final = (1 << 31) - 1
_MAX_END_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The contents of config.json, `source`."""

    fields: Mapping[str, Any]
    source: str

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> HfConfig:
        """Return the fields of the model, or of its text part if it has others, with its architecture's defaults.

        Raises ModelError.
        """
        text = cls(text_fields(config, source), source)
        return cls({**text.traits.defaults, **text.fields}, source)

    @property
    def architecture(self) -> str:
        """Raises ModelError unless it is one of those supported."""
        names = self.fields.get("architectures") or ["(none)"]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise self.error(f"architectures must list names, not {shown(names)}")
        name = names[0]
        if name in REFUSED_ARCHITECTURES:
            raise self.error(f"architecture {name} is not supported: {REFUSED_ARCHITECTURES[name]}")
        if name not in ARCHITECTURES:
            raise self.error(
                f"architecture {name[:80]} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        return name

    @property
    def traits(self) -> Architecture:
        """Traits of the architecture that the file names."""
        return ARCHITECTURES[self.architecture]

    def error(self, problem: str) -> ModelError:
        """Return an error that names the file."""
        return ModelError(f"{self.source}: {problem}")

    def positive(self, *names: str, default: int | None = None) -> int:
        """Return a whole number of at least 1, under the first of its names that is there."""
        name = next((name for name in names if self.fields.get(name) is not None), names[0])
        return self._whole(name, default, at_least=1)

    def soft_cap(self, name: str, *, default: float | None) -> float | None:
        """More than 0; null means none, and so does a field that is not there unless it has a default."""
        value = self.fields.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST_NUMBER:
            raise self.error(f"{name} must be a number of more than 0 or null, not {shown(value)}")
        return float(value)

    def epsilon(self) -> float:
        """Return what norms add to a mean of squares."""
        value = self._number("rms_norm_eps", 1e-6)
        if not 0 <= value <= 1:
            raise self.error(f"rms_norm_eps must be from 0 to 1, not {value}")
        return value

    def begin_token(self) -> int | None:
        """Return the token that prompts begin with; None where there is none."""
        value = self.fields.get("bos_token_id")
        if value is not None and not _is_token(value):
            raise self.error(f"bos_token_id must be a token id or null, not {shown(value)}")
        return value

    def check_supported(self) -> None:
        """Raise ModelError for what changes the model in ways that the worker does not know."""
        if self.fields.get("use_bidirectional_attention") not in (None, False, "vision"):  # vision: tokens of images
            raise self.error("use_bidirectional_attention is set; only causal attention is supported")
        for name, value in self.traits.expects.items():
            if self.fields.get(name, value) != value:
                raise self.error(f"{name} {self.fields[name]!r} is not supported; supported: {value!r}")

    def stored_weights(self) -> StoredWeights:
        """Return the formats of the safetensors files beside config.json."""
        floats = str(self.fields.get("dtype") or self.fields.get("torch_dtype") or "")
        packed = PackedWeights.of_config(self.fields, source=self.source)
        if packed is None:
            return StoredWeights(floats=floats)
        has_experts, num_layers = self.traits.experts is not None, self.positive("num_hidden_layers")
        return packed.stored(num_layers=num_layers, floats=floats, has_experts=has_experts)

    def activation(self) -> Activation:
        """Return the activation of the MLP's gate."""
        if self.traits.activation is not None:
            return self.traits.activation
        name = self.fields.get("hidden_activation") or self.fields.get("hidden_act") or self.traits.hidden_act
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self.error(f"hidden_act {shown(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def rope(self) -> RopeConfig:
        """Return the rotation of layers with full attention."""
        # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
        scaling = self._rope_fields(_FULL) or self._mapping("rope_scaling")
        theta = self._more_than_0(scaling, "rope_theta", self.fields.get("rope_theta") or self.traits.rope_theta)
        rope, share = self._rope(scaling, theta), self._rotary_share(scaling)
        return replace(rope, moving=share) if rope.kind == "proportional" else replace(rope, share=share)

    def max_position(self, rope: RopeConfig) -> int:
        """Return the most positions; YaRN's factor may be set without raising max_position_embeddings."""
        longest = self.positive("max_position_embeddings")
        return max(longest, int(rope.factor * rope.original_max_position)) if rope.kind == "yarn" else longest

    def unrotated_layers(self) -> tuple[int, ...]:
        """Return the layers whose queries and keys are not rotated, ascending."""
        interval = self.traits.no_rope_layer_interval
        if interval is None:
            return ()
        number = self.positive("num_hidden_layers")
        rotated = self.fields.get("no_rope_layers")  # 1 for a layer that is rotated, in spite of its name
        if rotated is None:
            interval = self.positive("no_rope_layer_interval", default=interval)
            return tuple(range(interval - 1, number, interval))
        if not isinstance(rotated, list) or len(rotated) < number:
            raise self.error(f"no_rope_layers must list a 0 or a 1 for each of the {number} layers")
        return tuple(i for i in range(number) if not rotated[i])

    def sliding(self) -> SlidingAttention | None:
        """Return the layers with a sliding window; None where there is none."""
        if not self.fields.get("sliding_window"):
            return None
        if not self.fields.get("use_sliding_window", self.traits.use_sliding_window):
            return None
        layers = self._sliding_layers()
        if not layers:
            return None
        return SlidingAttention(self.positive("sliding_window"), layers, self._sliding_rope())

    def kv_heads(self, number: int, head_dim: int, *, of: int) -> tuple[int, KvShape, SlidingAttention | None]:
        """Return the units of KV heads, the KV heads of layers without a window, and the layers with one.

        `number` KV heads of `head_dim` elements are those of layers with a window, if the layers differ; `of` is the
        number of query heads. Raises ModelError.
        """
        sliding, others = self.sliding(), self._global_kv(number, head_dim)
        for heads in (number, others.heads):
            if of % heads:
                raise self.error(f"num_attention_heads ({of}) is no multiple of num_key_value_heads ({heads})")
        if sliding is None:
            return others.heads, KvShape(1, others.head_dim), None
        units = math.gcd(number, others.heads)
        own, others = KvShape(number // units, head_dim), KvShape(others.heads // units, others.head_dim)
        return units, others, sliding if own == others else replace(sliding, kv=own)

    def _global_kv(self, number: int, head_dim: int) -> KvShape:
        """Return all KV heads of a layer without a window.

        Earlier versions of transformers name them; later ones list the layers that differ.
        """
        if self.traits.global_head_dim is None:
            return KvShape(number, head_dim)
        listed = self.fields.get("per_layer_config")
        if listed is not None:
            fields = self._fields_of_layers(listed)
            own = replace(self, fields={"num_key_value_heads": number, "head_dim": head_dim, **fields})
            return KvShape(own.positive("num_key_value_heads"), own.positive("head_dim"))
        heads = self.positive("num_global_key_value_heads", default=number) if self.fields.get(_K_IS_V) else number
        return KvShape(heads, self.positive("global_head_dim", default=self.traits.global_head_dim))

    def _fields_of_layers(self, listed: Any) -> Mapping[str, Any]:
        """Return the fields that per_layer_config gives to all layers without a window, and to no other."""
        sliding = self._sliding_layers()
        others = [layer for layer in range(self.positive("num_hidden_layers")) if layer not in sliding]
        known = {"num_key_value_heads", "head_dim"}
        try:
            fields = {int(layer): dict(own) for layer, own in listed.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise self.error("per_layer_config must map numbers of layers to fields") from error
        first = fields.get(others[0], {}) if others else {}
        if fields != (dict.fromkeys(others, first) if first else {}) or first.keys() - known:
            raise self.error(f"per_layer_config must give all {_FULL} layers, and no others, the same {sorted(known)}")
        return first

    def layer_input_size(self) -> int:
        """Return the elements of the embedding that a token has for each layer; 0: it has none. Raises ModelError."""
        size = self._whole("hidden_size_per_layer_input", 0, at_least=0)
        rows, vocabulary = self.fields.get("vocab_size_per_layer_input"), self.positive("vocab_size")
        if size and rows is not None and rows != vocabulary:
            raise self.error(
                f"vocab_size_per_layer_input {shown(rows)} is not supported; supported: vocab_size ({vocabulary}), "
                "since ranks hold the same rows of both embeddings"
            )
        return size

    def kv_readers(self, sliding: SlidingAttention | None) -> tuple[int, bool]:
        """Return how many of the last layers read keys and values of earlier ones, and whether their MLPs are wider.

        Raises ModelError where no earlier layer is of a reader's kind.
        """
        number, name = self.positive("num_hidden_layers"), "num_kv_shared_layers"
        readers = self._whole(name, 0, at_least=0)
        if not readers:
            return 0, False
        with_window = set(sliding.layers) if sliding is not None else set()
        kinds = [layer in with_window for layer in range(number)]
        if not set(kinds[number - readers :]) <= set(kinds[: max(0, number - readers)]):
            raise self.error(
                f"{name} ({readers}): the last {readers} of {number} layers read the keys and values of an earlier "
                "layer with the same kind of attention, and there is none"
            )
        is_wide = bool(self.fields.get("use_double_wide_mlp", False))
        if is_wide and self.experts() is not None:
            raise self.error("use_double_wide_mlp is set; it is not supported in a model of experts")
        return readers, is_wide

    def prediction_heads(self) -> int:
        """Return the number of multi-token-prediction heads; those with a vocabulary of their own do not count."""
        traits = self.traits.heads
        if traits is None or self.fields.get("mtp_use_dedicated_embeddings"):
            return 0
        return self._whole(traits.number, traits.default, at_least=0)

    def latent(self) -> LatentShape | None:
        """Return the shape of latent attention; None where attention is the usual one."""
        if not self.traits.is_latent:
            return None
        has_query_rank = self.fields.get("q_lora_rank") is not None
        return LatentShape(
            rank=self.positive("kv_lora_rank"),
            query_rank=self.positive("q_lora_rank") if has_query_rank else None,
            nope_dim=self.positive("qk_nope_head_dim"),
            rope_dim=self.positive("qk_rope_head_dim"),
            value_dim=self.positive("v_head_dim"),
        )

    def delta(self, *, kv_heads: int) -> DeltaShape | None:
        """Return the layers with the gated delta rule; None where there are none.

        Their heads are dealt with the `kv_heads` of attention.
        """
        traits = self.traits.delta
        layers = self._delta_layers(traits.full_attention_interval) if traits is not None else ()
        if traits is None or not layers:
            return None
        key_heads, value_heads = self.positive("linear_num_key_heads"), self.positive("linear_num_value_heads")
        if value_heads % key_heads:
            raise self.error(
                f"linear_num_value_heads ({value_heads}) is no multiple of linear_num_key_heads ({key_heads})"
            )
        if key_heads < kv_heads:
            raise self.error(
                f"linear_num_key_heads ({key_heads}) is less than num_key_value_heads ({kv_heads}), with which "
                "they are dealt to ranks"
            )
        return DeltaShape(
            layers=layers,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=self.positive("linear_key_head_dim"),
            value_dim=self.positive("linear_value_head_dim"),
            taps=self._whole("linear_conv_kernel_dim", 4, at_least=2),
            by_head=traits.by_head,
        )

    def dense_width(self) -> int:
        """Return the columns of a dense layer's MLP; those of an expert where no layer is dense and none are given."""
        experts = self.experts()
        if experts is None or len(experts.layers) < self.positive("num_hidden_layers"):
            return self.positive("intermediate_size")
        return self.positive("intermediate_size", default=experts.intermediate_size)

    def score_factor(self) -> float:
        """Return what scores of attention are multiplied by for longer contexts, beside their usual scale."""
        scaling = self._rope_fields(_FULL) or self._mapping("rope_scaling")
        rope, mscale = self.rope(), scaling.get("mscale_all_dim")
        if not self.traits.is_latent or rope.kind == "default" or not mscale:
            return 1.0
        return yarn_mscale(rope.factor, self._more_than_0(scaling, "mscale_all_dim", 1.0)) ** 2

    def experts(self) -> ExpertsConfig | None:
        """Return the layers with experts; None where all are dense."""
        traits = self.traits.experts
        has_experts = traits is not None and (traits.enabled is None or bool(self.fields.get(traits.enabled)))
        layers = self._expert_layers(traits) if traits is not None and has_experts else ()
        if traits is None or not layers:
            return None
        number, per_token = self.positive(*_EXPERT_COUNTS), self.positive("num_experts_per_tok", "top_k_experts")
        width, routing = self.positive(traits.intermediate_size), self._routing(traits.routing, number)
        if per_token > number // routing.groups * routing.kept_groups:
            raise self.error(f"num_experts_per_tok ({per_token}) is more than the {number} experts of a layer")
        shared = self._whole("n_shared_experts", 1, at_least=0) * width if traits.has_shared else 0
        if traits.dense_beside:
            shared = self.positive("intermediate_size")
        if traits.shared_intermediate_size is not None:
            shared = self._whole(traits.shared_intermediate_size, None, at_least=0)
        return ExpertsConfig(
            number=number,
            per_token=per_token,
            intermediate_size=width,
            layers=layers,
            names=traits.names,
            routing=routing,
            shared_columns=shared,
            biased=traits.biased,
            norms=traits.norms,
        )

    def _routing(self, default: Routing, number: int) -> Routing:
        groups = self.positive("n_group", default=default.groups)
        kept_groups = self.positive("topk_group", default=default.kept_groups)
        if number % groups or kept_groups > groups:
            raise self.error(f"n_group ({groups}) and topk_group ({kept_groups}) do not fit {number} experts")
        return replace(
            default,
            normalised=bool(self.fields.get("norm_topk_prob", default.normalised)),
            scale=self._number("routed_scaling_factor", default.scale),
            groups=groups,
            kept_groups=kept_groups,
        )

    def end_tokens(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        """Return those of config.json and generation_config.json together, ascending. Raises ModelError."""
        ids: set[int] = set()
        for fields in (self.fields, generation):
            value = fields.get("eos_token_id")
            listed = [value] if isinstance(value, int) else value or []
            if not isinstance(listed, list) or not all(map(_is_token, listed)):
                raise self.error(f"eos_token_id must be a token id or a list of them, not {shown(value)}")
            ids.update(listed)
        if len(ids) > _MAX_END_TOKENS:
            raise self.error(f"eos_token_id must name at most {_MAX_END_TOKENS} tokens, not {len(ids)}")
        return tuple(sorted(ids))

    def _whole(self, name: str, default: int | None, *, at_least: int) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.error(f"{name} must be a whole number of at least {at_least}, not {shown(value)}")
        at_most = _LARGEST.get(name, _LARGEST_OTHER)
        if value > at_most:
            raise self.error(f"{name} must be at most {at_most}, not {shown(value)}")
        return value

    def _number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_NUMBER:
            raise self.error(f"{name} must be a number, not {shown(value)}")
        return float(value)

    def _expert_layers(self, traits: ExpertTraits) -> tuple[int, ...]:
        """All, unless the first ones are dense, some are named as dense, or only every n-th has experts."""
        number, kinds = self.positive("num_hidden_layers"), self.fields.get("mlp_layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != number or {*map(str, kinds)} - set(_MLP_KINDS):
                raise self.error(f"mlp_layer_types must list {' or '.join(_MLP_KINDS)} for each of the {number} layers")
            return tuple(i for i, kind in enumerate(kinds) if kind == _MLP_KINDS[1])
        first = self._whole("first_k_dense_replace", traits.first_k_dense_replace, at_least=0)
        step = self.positive("decoder_sparse_step", default=1)
        dense = self.fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or len(dense) > _LARGEST["num_hidden_layers"]:
            raise self.error(f"mlp_only_layers must list layers, not {shown(dense)}")
        return tuple(i for i in range(first, number) if (i + 1) % step == 0 and i not in dense)

    def _delta_layers(self, interval: int) -> tuple[int, ...]:
        number = self.positive("num_hidden_layers")
        kinds = self._layer_types(number, (_FULL, _LINEAR))
        if kinds is not None:
            return tuple(i for i, kind in enumerate(kinds) if kind == _LINEAR)
        interval = self.positive("full_attention_interval", default=interval)
        return tuple(i for i in range(number) if (i + 1) % interval)

    def _sliding_layers(self) -> tuple[int, ...]:
        number = self.positive("num_hidden_layers")
        kinds = self._layer_types(number, (_FULL, _SLIDING))
        if kinds is not None:
            return tuple(i for i, kind in enumerate(kinds) if kind == _SLIDING)
        match self.traits.sliding:
            case SlidingLayers.ALL:
                return tuple(range(number))
            case SlidingLayers.UPPER:
                return tuple(range(self._whole("max_window_layers", _MAX_WINDOW_LAYERS, at_least=0), number))
            case SlidingLayers.ALL_BUT_EVERY_NTH:
                nth = self.positive("sliding_window_pattern", default=self.traits.sliding_window_pattern)
                return tuple(i for i in range(number) if (i + 1) % nth)
            case SlidingLayers.ALL_BUT_EVERY_NTH_AND_LAST:
                nth = self.positive("sliding_window_pattern", default=self.traits.sliding_window_pattern)
                return tuple(i for i in range(number - 1) if (i + 1) % nth)
            case SlidingLayers.UNROTATED:
                return self.unrotated_layers()
            case SlidingLayers.NONE:
                return ()

    def _layer_types(self, number: int, supported: Sequence[str]) -> Sequence[str] | None:
        """Return the kind of each layer, one of those supported; None where config.json does not say."""
        kinds = self.fields.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != number:
            raise self.error(f"layer_types must list a kind for each of the {number} layers")
        unknown = sorted({str(kind) for kind in kinds} - {*supported})
        if unknown:
            raise self.error(f"layer_types {', '.join(unknown)} are not supported; supported: {', '.join(supported)}")
        return kinds

    def _sliding_rope(self) -> RopeConfig:
        """Where config.json tells both kinds of layers apart, the sliding ones' own; else everybody's."""
        theta = self.fields.get("rope_local_base_freq", self.traits.rope_local_base_freq)
        if theta is None:
            return self.rope()
        own = self._rope_fields(_SLIDING)
        return self._rope(own, self._more_than_0(own, "rope_theta", theta))

    def _rope_fields(self, kind: str) -> Mapping[str, Any]:
        """rope_parameters, or the part of it that is for a kind of layers."""
        parameters = self._mapping("rope_parameters")
        if any(isinstance(parameters.get(name), Mapping) for name in (_FULL, _SLIDING)):
            return _mapping(parameters, kind, self.error)
        return parameters if kind == _FULL else {}

    def _mapping(self, name: str) -> Mapping[str, Any]:
        return _mapping(self.fields, name, self.error)

    def _rope(self, scaling: Mapping[str, Any], theta: float) -> RopeConfig:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if not isinstance(kind, str) or kind not in _ROPE_KINDS:
            raise self.error(f"rope type {shown(kind)} is not supported; supported: {', '.join(_ROPE_KINDS)}")
        if scaling.get("llama_4_scaling_beta"):
            raise self.error(
                "rope field llama_4_scaling_beta is set; scaling queries by their position is not supported"
            )
        if kind == "default":
            return RopeConfig(theta)
        longest = self.positive("max_position_embeddings")
        original = max(1, int(self._more_than_0(scaling, "original_max_position_embeddings", longest)))
        factor = self._more_than_0(scaling, "factor", longest / original if kind == "yarn" else 1.0)
        if kind == "yarn" and theta <= 1:
            raise self.error(f"rope field rope_theta must be more than 1 with yarn, not {theta}")
        rope = RopeConfig(
            theta,
            kind,
            factor=factor,
            low_freq_factor=self._more_than_0(scaling, "low_freq_factor", 1.0),
            high_freq_factor=self._more_than_0(scaling, "high_freq_factor", 4.0),
            original_max_position=original,
            beta_fast=self._more_than_0(scaling, "beta_fast", 32.0),
            beta_slow=self._more_than_0(scaling, "beta_slow", 1.0),
            truncate=bool(scaling.get("truncate", True)),
            amplitude=self._yarn_amplitude(scaling, factor) if kind == "yarn" else 1.0,
        )
        if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise self.error("rope field high_freq_factor must be more than low_freq_factor")
        return rope

    def _yarn_amplitude(self, scaling: Mapping[str, Any], factor: float) -> float:
        usual = yarn_mscale(factor)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            mscale, of_all = (self._more_than_0(scaling, name, 1.0) for name in ("mscale", "mscale_all_dim"))
            usual = yarn_mscale(factor, mscale) / yarn_mscale(factor, of_all)
        usual *= self._more_than_0(scaling, "attn_factor", 1.0)  # as in vLLM and llama.cpp; transformers has it not
        return self._more_than_0(scaling, "attention_factor", usual)

    def _more_than_0(self, scaling: Mapping[str, Any], name: str, default: float) -> float:
        """Return a number of a rotation; what is missing, null or 0 is the default."""
        value = scaling.get(name) or default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"rope field {name} must be a number of more than 0, not {shown(value)}")
        if not 1 / _LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
            raise self.error(f"rope field {name} must be a number of more than 0, not {shown(value)}")
        return float(value)

    def _rotary_share(self, scaling: Mapping[str, Any]) -> float:
        """Return the part of a head that is rotated; earlier versions name it, or a number of elements, at the top."""
        share = scaling.get("partial_rotary_factor", self.fields.get("partial_rotary_factor"))
        if share is None and self.fields.get("rotary_dim") is not None:
            share = self.positive("rotary_dim") / self.positive("head_dim")
        share = self.traits.partial_rotary_factor if share is None else share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise self.error(f"partial_rotary_factor must be more than 0 and at most 1, not {shown(share)}")
        return float(share)


def shown(value: object) -> str:
    """Return a value of a file for an error's text, cut short where it is long or deep."""
    return reprlib.repr(value)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_TOKEN


def _mapping(fields: Mapping[str, Any], name: str, error: Callable[[str], ModelError]) -> Mapping[str, Any]:
    """Return an object of a file; what is missing, null or empty is an empty one."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise error(f"{name} must be an object, not {shown(value)}")
    return value


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return by how much YaRN scales what it rotates, for contexts that are `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_config(path: Path) -> dict[str, Any]:
    """Return the object in a config.json, with ModelOpt's configuration beside it if it has none. Raises ModelError."""
    config, beside = read_json(path), path.with_name(MODELOPT_FILE)
    if config.get(FIELD) or not beside.exists():
        return config
    fields = read_json(beside).get("quantization")
    if not isinstance(fields, Mapping):
        raise ModelError(f"{beside}: quantization must be an object, not {str(fields)[:80]}")
    return {**config, FIELD: {"quant_method": "modelopt", **fields}}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model directory. Raises ModelError."""
    try:
        data = parse_json(read_model_file(path, max_bytes=MAX_CONFIG_BYTES), path)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file; a model directory in Hugging Face format has one") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data
