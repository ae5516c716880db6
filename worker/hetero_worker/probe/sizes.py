"""How much of a model is built for timing, so that it takes a second and not the model's memory.

What is read in a step comes from memory, not from a cache: between two uses of a weight a step reads all others. So
several copies of a layer are made and gone through in turn, together larger than most caches and no larger than the
model. Of a large model's layer fewer units are made; the cost of a unit is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hetero_api.model_config import ModelConfig

UNIT: Final = 64
"""MLP columns, and vocabulary rows, that are one unit of cost."""
WEIGHT_BYTES: Final = 512 * 1024**2
"""Bytes of all copies of all unit counts together, the head's included."""
_MANY_SHARE: Final = 0.45
"""Share of these bytes for layers with many units; half as much is for those with half as many."""
_HEAD_SHARE: Final = 0.2
_MIN_COPIES: Final = 2


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Units of one copy of a decoder layer. `mlp` and `experts` are 0 where the model has no such layers."""

    heads: int
    mlp: int
    """Units of 64 columns."""
    experts: int

    def bytes(self, config: ModelConfig, *, element_bytes: int) -> int:
        """Return the bytes of its weights."""
        params = (
            self.heads * config.attention_params_per_kv_head
            + self.mlp * UNIT * config.mlp_params_per_column
            + self.experts * config.params_per_expert
        )
        return params * element_bytes

    def halved(self) -> LayerSize:
        """About half the units of each, at least one where there are any."""
        return LayerSize(*(max(1, units // 2) if units else 0 for units in (self.heads, self.mlp, self.experts)))


@dataclass(frozen=True, slots=True)
class ProbeSize:
    """Layers with many units and with about half as many, and how many copies of each; the head's units."""

    many: LayerSize
    few: LayerSize
    copies_of_many: int
    copies_of_few: int
    head: int


def whole_layer(config: ModelConfig) -> LayerSize:
    """Return a layer of all units: of both kinds where the model has dense layers and such with experts."""
    has_dense = len(config.expert_layers) < config.num_layers
    return LayerSize(config.num_kv_heads, config.intermediate_size // UNIT * has_dense, config.num_experts)


def probe_size(config: ModelConfig, element_bytes: int, weight_bytes: int = WEIGHT_BYTES) -> ProbeSize:
    """Return the sizes that fit into about `weight_bytes`; one expert, or two heads, are made in any case."""
    budget = int(weight_bytes * _MANY_SHARE)
    many = _layer_within(config, budget // _MIN_COPIES, element_bytes)
    few = many.halved()
    row_bytes = UNIT * config.hidden_size * element_bytes
    return ProbeSize(
        many=many,
        few=few,
        copies_of_many=_copies(many.bytes(config, element_bytes=element_bytes), budget, config.num_layers),
        copies_of_few=_copies(few.bytes(config, element_bytes=element_bytes), budget // 2, config.num_layers),
        head=max(1, min(config.vocab_size // UNIT, int(weight_bytes * _HEAD_SHARE * 2 / 3) // row_bytes)),
    )


def _layer_within(config: ModelConfig, budget: int, element_bytes: int) -> LayerSize:
    """Return the whole layer if it fits; else each part gets as much, and two heads are made in any case."""
    whole = whole_layer(config)
    if whole.bytes(config, element_bytes=element_bytes) <= budget:
        return whole
    each = budget // (element_bytes * sum(units > 0 for units in (whole.heads, whole.mlp, whole.experts)))
    return LayerSize(
        heads=_fitting(whole.heads, each // config.attention_params_per_kv_head, least=2),
        mlp=_fitting(whole.mlp, each // (UNIT * config.mlp_params_per_column), least=2),
        experts=_fitting(whole.experts, each // config.params_per_expert if whole.experts else 0, least=1),
    )


def _fitting(units: int, fit: int, *, least: int) -> int:
    return min(units, max(least, fit))


def _copies(layer_bytes: int, budget: int, num_layers: int) -> int:
    return max(1, min(num_layers, budget // layer_bytes))
