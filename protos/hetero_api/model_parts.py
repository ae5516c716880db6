"""Parts of a model's shape that some models have and others do not: rotations, windows, experts.

ModelConfig is made of them; what reads a config.json (hf_config) makes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""Activation of an MLP's gate; "gelu_tanh" is GELU in its approximation by tanh."""


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
        """Return the head_dim/2 angular frequencies, radians a position."""
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
class SlidingAttention:
    """Layers in which a token attends to the `window` tokens up to and including itself."""

    window: int
    layers: tuple[int, ...]
    """Ascending."""
    rope: RopeConfig
    """Rotation of these layers."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of experts in a checkpoint, below `model.layers.<layer>.`.

    The router is `<block>.gate`, and an expert's parts are `<block>.experts.<number>.<gate, up or down>`.
    """

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers whose MLP is a number of small ones, of which a router chooses some for each token."""

    number: int
    """Experts a layer."""
    per_token: int
    intermediate_size: int
    """Columns of one expert."""
    normalised: bool
    """Whether the chosen ones' weights are scaled to add up to 1."""
    layers: tuple[int, ...]
    """Ascending; the other layers are dense."""
    names: ExpertNames
