"""Inputs that layers have beside tokens' embeddings.

The first part is of inputs that each layer has of its own (Gemma 3n and 4 call them per-layer embeddings).

A token's input of a layer is a row of a table for that layer, added to a projection of the token's usual embedding. All
layers' rows lie side by side in one embedding, whose rows are dealt to ranks as those of the usual one. The layer opens
a gate for its input, projects it to the stream's width and adds its norm to the stream. All of this is whole on each
rank that holds heads: it is small, and its results are needed by each holder of the stream.
"""

from __future__ import annotations

from typing import Final

import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.layers.blocks import layer_norm
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import ShardedLinear, joining_linear, whole_linear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.memory.streams import HOST

_SHARE: Final = 2**-0.5
"""Factor of the sum of a row and a projection."""


class _NormedLinear:
    """Linear layers and norms that are loaded together."""

    def __init__(self, linears: tuple[ShardedLinear, ...], *norms: RmsNorm) -> None:
        self._linears = linears
        self._norms = norms

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take; `kernel` None: in the arithmetic type."""
        norms = sum(norm.weight_bytes(dtype) for norm in self._norms)
        return norms + sum(linear.weight_bytes(dtype, kernel) for linear in self._linears)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        norms = (tensor for norm in self._norms for tensor in norm.tensors)
        return *norms, *(tensor for linear in self._linears for tensor in linear.tensors)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read the weights. Raises ModelError."""
        for norm in self._norms:
            norm.load(checkpoint, dtype=dtype, device=device)
        for linear in self._linears:
            linear.load(checkpoint, dtype=dtype, kernel=kernel, device=device)


class LayerInputs(_NormedLinear):
    """Inputs of all layers, of tokens' rows and embeddings."""

    def __init__(self, config: ModelConfig, ops: FusedOps = PLAIN_OPS) -> None:
        self._size, self._ops = config.layer_input_size, ops
        self._projection = whole_linear(config, "model.per_layer_model_projection", config.layer_inputs_width)
        # The projection is divided by the root of its inputs' number before its norm, which only changes eps.
        eps = config.rms_norm_eps * config.hidden_size
        name = "model.per_layer_projection_norm.weight"
        self._norm = RmsNorm(name, width=self._size, eps=eps, offset=config.norm_offset, ops=ops)
        super().__init__((self._projection,), self._norm)

    def __call__(self, found: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return [tokens, layers · size] of rows of the same shape and of embeddings [tokens, hidden]."""
        projected = self._projection(hidden)
        by_layer = projected.view(projected.numel() // self._size, self._size)
        inputs = self._norm(by_layer).view(projected.shape)
        self._ops.add(inputs, found, factor=_SHARE)
        return inputs


class LayerInput(_NormedLinear):
    """One layer's way to make its input a part of the residual stream: gate → projection → norm."""

    def __init__(self, config: ModelConfig, layer: int, ops: FusedOps = PLAIN_OPS) -> None:
        prefix, size = f"model.layers.{layer}", config.layer_input_size
        self._begin, self._end = layer * size, (layer + 1) * size
        self._activation, self._ops = config.activation, ops
        self._gate = whole_linear(config, f"{prefix}.per_layer_input_gate", size)
        self._projection = whole_linear(config, f"{prefix}.per_layer_projection", config.hidden_size, width=size)
        self._norm = layer_norm(config, layer, "post_per_layer_input_norm", ops)
        super().__init__((self._gate, self._projection), self._norm)

    def __call__(self, hidden: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return what to add to the stream [tokens, hidden], of it and all layers' inputs."""
        gated = self._ops.gated(self._gate(hidden), self._activation, inputs[:, self._begin : self._end])
        return self._norm(self._projection(gated))


class JoinedStates(_NormedLinear):
    """Input of a multi-token-prediction head: a projection of the next token's embedding and a token's state, normed.

    Source: DeepSeek-V3's technical report, equation 21. Its checkpoints have the embedding first.
    """

    def __init__(self, config: ModelConfig, ops: FusedOps = PLAIN_OPS) -> None:
        self._ops = ops
        self._norm, self._state_norm = (layer_norm(config, 0, name, ops) for name in ("enorm", "hnorm"))
        self._projection, self._state_projection = (
            joining_linear(config, "model.layers.0.eh_proj", part) for part in range(2)
        )
        super().__init__((self._projection, self._state_projection), self._norm, self._state_norm)

    def __call__(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return new [tokens, hidden] of embeddings and states [tokens, hidden]."""
        joined = self._projection(self._norm(embeddings))
        self._ops.add(joined, self._state_projection(self._state_norm(states)))
        return joined
