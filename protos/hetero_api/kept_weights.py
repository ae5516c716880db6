"""Bytes of a model's matrices in a rank's memory, at the widths that it keeps them in.

A rank that has no kernel for a width widens such weights to the arithmetic type. Bytes are counted by units that are
dealt to ranks (a KV head, an MLP column, an expert, a vocabulary row), and once a layer for the rest, so that they are
linear in units. A part takes no more than is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

from hetero_api.model_config import ModelConfig
from hetero_api.weight_format import COLUMN_UNIT, SCALE_BYTES, WIDTH_BYTES, StoredWeights, WeightFormat

FLOAT_BYTES: Final = 4
"""Bytes of what is kept in float32 in any arithmetic type."""


@dataclass(frozen=True, slots=True)
class KeptMatrices:
    """Matrices of one kind in a rank's memory."""

    weights: WeightFormat | None
    """None: floats."""
    float_bytes: int

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a whole row of so many inputs."""
        return inputs * self.float_bytes if self.weights is None else self.weights.row_bytes(inputs)

    def column_bytes(self, outputs: int, *, unit: int) -> Fraction:
        """Return the bytes of one input of each of so many rows, where `unit` of them are dealt together; without
        `row_bytes_beside`.
        """
        if self.weights is None:
            return Fraction(outputs * self.float_bytes)
        weights = self.weights.within(unit)
        scales = Fraction(self._scale_bytes, weights.group) if weights.group else 0
        return outputs * (Fraction(weights.bits, 8) + scales)

    def row_bytes_beside(self, inputs: int, *, unit: int) -> int:
        """Return the bytes of a row that a rank owns some columns of, however many: its one scale, or what pads its
        last group.
        """
        if self.weights is None:
            return 0
        group = self.weights.within(unit).group
        if not group:
            return self._scale_bytes
        return group * self.weights.bits // 8 + self._scale_bytes if inputs % group else 0

    @property
    def _scale_bytes(self) -> int:
        return SCALE_BYTES * (2 if self.weights is not None and self.weights.has_minimum else 1)


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Weights of one rank, or of all that are alike."""

    stored: StoredWeights
    element_bytes: int
    """Bytes of the arithmetic type."""
    bits: frozenset[int] = frozenset()
    """Widths that it keeps, of 16, 8 and 4."""

    @property
    def layers(self) -> KeptMatrices:
        """Linear layers."""
        return self._kept(self.stored.layers)

    @property
    def vocabulary(self) -> KeptMatrices:
        """Embedding and output head."""
        return self._kept(self.stored.vocabulary)

    def head_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a KV head with its group of query heads: rows of q, k and v, and columns of o.

        Of latent attention, matrices that bring a head to the cache's space and back stay floats.
        """
        hidden, width, latent = config.hidden_size, config.output_unit, config.latent
        columns = ceil(width * self.layers.column_bytes(hidden, unit=width))
        if latent is None:
            rows = (1 + config.gated_attention) * config.group_size + 2 * config.made_kv_heads
            return rows * config.head_dim * self.layers.row_bytes(hidden) + columns
        queries = latent.query_dim * self.layers.row_bytes(latent.query_rank or hidden)
        by_head = latent.by_head_elements * self._kept(None).float_bytes
        return queries + by_head + columns

    def delta_head_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a key head of the gated delta rule with its value heads; 0 for a model without.

        Its gates stay floats; the convolution and what decays are float32.
        """
        delta, hidden = config.delta, config.hidden_size
        if delta is None:
            return 0
        values = delta.group * delta.value_dim
        rows = (delta.channels + values) * self.layers.row_bytes(hidden)
        columns = ceil(values * self.layers.column_bytes(hidden, unit=values))
        gates = 2 * delta.group * self._kept(None).row_bytes(hidden)
        return rows + columns + gates + FLOAT_BYTES * (delta.channels * delta.taps + 2 * delta.group)

    def layer_head_bytes(self, config: ModelConfig, layer: int) -> float:
        """Return the bytes of one KV head of a layer, or of the heads of the gated delta rule that go with it."""
        if (delta := config.delta) is None or layer not in delta.layers:
            return self.head_bytes(config.of_layer(layer))
        return self.delta_head_bytes(config) * delta.key_heads / config.num_kv_heads

    def mean_head_bytes(self, config: ModelConfig) -> float:
        """Return the bytes of attention that go with one KV head, as the mean of layers with and without attention."""
        if config.delta is None:
            return self.head_bytes(config)
        return sum(self.layer_head_bytes(config, i) for i in range(config.num_layers)) / config.num_layers

    def column_bytes(self, *, hidden: int) -> int:
        """Return the bytes of an MLP column: rows of gate and up, and a column of down."""
        return 2 * self.layers.row_bytes(hidden) + ceil(self.layers.column_bytes(hidden, unit=COLUMN_UNIT))

    def expert_bytes(self, *, hidden: int, width: int) -> int:
        """Return the bytes of a whole expert."""
        matrices = self._kept(self.stored.of_experts.layers)
        return 2 * width * matrices.row_bytes(hidden) + hidden * matrices.row_bytes(width)

    def expert_slice_bytes(self, columns: int, *, config: ModelConfig) -> int:
        """Return the most bytes of so many columns of an expert that is dealt in slices."""
        matrices, hidden, unit = self._kept(self.stored.of_experts.layers), config.hidden_size, config.expert_unit
        beside = hidden * matrices.row_bytes_beside(config.expert_columns, unit=unit)
        down = ceil(columns * matrices.column_bytes(hidden, unit=unit))
        return 2 * columns * matrices.row_bytes(hidden) + down + beside

    def layer_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a layer, whatever is owned of it: beside columns of o and down, and what compresses."""
        hidden, units = config.hidden_size, {config.of_layer(i).output_unit for i in range(config.num_layers)}
        output = max(self.layers.row_bytes_beside(config.num_kv_heads * unit, unit=unit) for unit in units)
        if (delta := config.delta) is not None:
            inputs, unit = delta.value_heads * delta.value_dim, delta.group * delta.value_dim
            output = max(output, self.layers.row_bytes_beside(inputs, unit=unit))
        widths = {config.intermediate_size, config.shared_columns, *config.dense_columns.values()}
        down = max(self.layers.row_bytes_beside(width, unit=COLUMN_UNIT) for width in widths)
        return hidden * (output + down) + self.compressing_bytes(config) + self._layer_input_bytes(config)

    def layer_inputs_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of the projection from a token's embedding to its inputs of all layers."""
        return config.layer_inputs_width * self.layers.row_bytes(config.hidden_size)

    def joined_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of the two matrices that a prediction head begins with; 0 for other models.

        Quantised checkpoints have them in floats.
        """
        hidden = config.hidden_size
        return 2 * hidden * self._kept(self.stored.at_load.layers).row_bytes(hidden) if config.follows_states else 0

    def _layer_input_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of what makes a layer's input of its own a part of the residual stream."""
        size, hidden = config.layer_input_size, config.hidden_size
        return size * self.layers.row_bytes(hidden) + (hidden * self.layers.row_bytes(size) if size else 0)

    def compressing_bytes(self, config: ModelConfig) -> int:
        """Return the bytes of a layer's matrices of attention that belong to no head."""
        hidden = config.hidden_size
        return config.attention_params_beside // hidden * self.layers.row_bytes(hidden)

    def _kept(self, weights: WeightFormat | None) -> KeptMatrices:
        if weights is not None:
            return KeptMatrices(weights if weights.bits in self.bits else None, self.element_bytes)
        stored = WIDTH_BYTES.get(self.stored.floats, self.element_bytes)
        narrower = stored if 8 * stored in self.bits else self.element_bytes
        return KeptMatrices(None, min(narrower, self.element_bytes))
