"""Reads what config.json says into the parts of a ModelConfig.

Fields are checked here: whatever is missing, of a wrong kind or unsupported becomes a ModelError that names the file
and the field. Of fields that were renamed over time, both names are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_api.architectures import (
    ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    Activation,
    Architecture,
    ExpertsConfig,
    RopeConfig,
    SlidingAttention,
    SlidingLayers,
)
from hetero_api.errors import ModelError
from hetero_api.model_directory import MAX_CONFIG_BYTES, parse_json, read_model_file
from hetero_api.packed_weights import PackedWeights
from hetero_api.weight_format import StoredWeights

_ACTIVATIONS: Final[Mapping[str, Activation]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS: Final = ("default", "linear", "llama3")
_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"
_MAX_WINDOW_LAYERS: Final = 28
_LARGEST: Final[Mapping[str, int]] = {
    "num_hidden_layers": 10_000, "num_experts": 65_536, "num_local_experts": 65_536,
    "num_attention_heads": 65_536, "num_key_value_heads": 65_536, "vocab_size": 1 << 24,
}  # fmt: skip
"""Counts by which lists are made, and far more than any model has."""
_LARGEST_OTHER: Final = 1 << 31
_MAX_END_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The contents of config.json, `source`."""

    fields: Mapping[str, Any]
    source: str

    @property
    def architecture(self) -> str:
        """Raises ModelError unless it is one of those supported."""
        names = self.fields.get("architectures") or ["(none)"]
        if names[0] not in ARCHITECTURES:
            raise self.error(
                f"architecture {names[0]} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        return str(names[0])

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
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(f"{name} must be a number of more than 0 or null, not {value!r}")
        return float(value)

    def check_supported(self) -> None:
        """Raise ModelError for what changes the model in ways that the worker does not know."""
        if self.fields.get("use_bidirectional_attention"):
            raise self.error("use_bidirectional_attention is set; only causal attention is supported")

    def stored_weights(self) -> StoredWeights:
        """Return the formats of the safetensors files beside config.json."""
        floats = str(self.fields.get("dtype") or self.fields.get("torch_dtype") or "")
        packed = PackedWeights.of_config(self.fields, source=self.source)
        if packed is None:
            return StoredWeights(floats=floats)
        layers = None if packed.some_are_floats else packed.weights
        return StoredWeights(layers=layers, floats=floats, method=packed.method)

    def activation(self) -> Activation:
        """Return the activation of the MLP's gate."""
        name = self.fields.get("hidden_activation") or self.fields.get("hidden_act") or self.traits.hidden_act
        if name not in _ACTIVATIONS:
            raise self.error(f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def rope(self) -> RopeConfig:
        """Return the rotation of layers with full attention."""
        # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
        scaling = self._rope_fields(_FULL) or self.fields.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or self.fields.get("rope_theta") or self.traits.rope_theta
        return self._rope(scaling, float(theta))

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

    def experts(self) -> ExpertsConfig | None:
        """Return the layers with experts; None where all are dense."""
        names = self.traits.experts
        layers = self._expert_layers() if names is not None else ()
        if names is None or not layers:
            return None
        number, per_token = self.positive("num_local_experts", "num_experts"), self.positive("num_experts_per_tok")
        if per_token > number:
            raise self.error(f"num_experts_per_tok ({per_token}) is more than the {number} experts of a layer")
        return ExpertsConfig(
            number=number,
            per_token=per_token,
            intermediate_size=self.positive(self.traits.moe_intermediate_size),
            normalised=bool(self.fields.get("norm_topk_prob", self.traits.norm_topk_prob)),
            layers=layers,
            names=names,
        )

    def end_tokens(self, generation: Mapping[str, Any]) -> tuple[int, ...]:
        """Return those of config.json and generation_config.json together, ascending. Raises ModelError."""
        ids: set[int] = set()
        for fields in (self.fields, generation):
            value = fields.get("eos_token_id")
            listed = [value] if isinstance(value, int) else value or []
            if not isinstance(listed, list) or not all(isinstance(each, int) for each in listed):
                raise self.error(f"eos_token_id must be a token id or a list of them, not {str(value)[:40]}")
            ids.update(listed)
        if len(ids) > _MAX_END_TOKENS:
            raise self.error(f"eos_token_id must name at most {_MAX_END_TOKENS} tokens, not {len(ids)}")
        return tuple(sorted(ids))

    def _whole(self, name: str, default: int | None, *, at_least: int) -> int:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.error(f"{name} must be a whole number of at least {at_least}, not {value!r}")
        at_most = _LARGEST.get(name, _LARGEST_OTHER)
        if value > at_most:
            raise self.error(f"{name} must be at most {at_most}, not {value}")
        return value

    def _expert_layers(self) -> tuple[int, ...]:
        """All, unless some are named as dense or only every n-th has experts."""
        step = self.positive("decoder_sparse_step", default=1)
        dense = self.fields.get("mlp_only_layers") or ()
        number = self.positive("num_hidden_layers")
        return tuple(i for i in range(number) if (i + 1) % step == 0 and i not in dense)

    def _sliding_layers(self) -> tuple[int, ...]:
        number = self.positive("num_hidden_layers")
        kinds = self.fields.get("layer_types")
        if kinds is not None:
            self._check_layer_types(kinds, number)
            return tuple(i for i, kind in enumerate(kinds) if kind == _SLIDING)
        match self.traits.sliding:
            case SlidingLayers.ALL:
                return tuple(range(number))
            case SlidingLayers.UPPER:
                return tuple(range(self._whole("max_window_layers", _MAX_WINDOW_LAYERS, at_least=0), number))
            case SlidingLayers.ALL_BUT_EVERY_NTH:
                nth = self.positive("sliding_window_pattern", default=self.traits.sliding_window_pattern)
                return tuple(i for i in range(number) if (i + 1) % nth)
            case SlidingLayers.NONE:
                return ()

    def _check_layer_types(self, kinds: Any, number: int) -> None:
        if not isinstance(kinds, list) or len(kinds) != number:
            raise self.error(f"layer_types must list a kind for each of the {number} layers")
        unknown = sorted({str(kind) for kind in kinds} - {_FULL, _SLIDING})
        if unknown:
            raise self.error(f"layer_types {', '.join(unknown)} are not supported; supported: {_FULL}, {_SLIDING}")

    def _sliding_rope(self) -> RopeConfig:
        """Where config.json tells both kinds of layers apart, the sliding ones' own; else everybody's."""
        theta = self.fields.get("rope_local_base_freq", self.traits.rope_local_base_freq)
        if theta is None:
            return self.rope()
        own = self._rope_fields(_SLIDING)
        return self._rope(own, float(own.get("rope_theta") or theta))

    def _rope_fields(self, kind: str) -> Mapping[str, Any]:
        """rope_parameters, or the part of it that is for a kind of layers."""
        parameters = self.fields.get("rope_parameters") or {}
        if any(isinstance(parameters.get(name), Mapping) for name in (_FULL, _SLIDING)):
            return parameters.get(kind) or {}
        return parameters if kind == _FULL else {}

    def _rope(self, scaling: Mapping[str, Any], theta: float) -> RopeConfig:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in _ROPE_KINDS:
            raise self.error(f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
        if kind == "default":
            return RopeConfig(theta)
        original = scaling.get("original_max_position_embeddings") or self.positive("max_position_embeddings")
        return RopeConfig(
            theta,
            kind,
            factor=float(scaling.get("factor", 1.0)),
            low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_max_position=int(original),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model directory. Raises ModelError."""
    try:
        data = parse_json(read_model_file(path, max_bytes=MAX_CONFIG_BYTES), path)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file; a model directory in Hugging Face format has one") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return data
