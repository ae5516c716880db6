"""The two halves of a decoder layer on one rank: self-attention over its heads, and a gated MLP over its columns.

Both return a partial sum of the layer's output; ranks' partial sums add up. Each holds its own input norm, since only a
rank that owns a part of the layer computes it. A layer may have an MLP of experts instead (`moe`). Norms of the halves'
outputs, if a model has them, apply to whole sums, so they belong to the layer.
"""

from __future__ import annotations

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.attention.base import AttentionRule, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import down_linear, gate_up_linear, output_linear, qkv_linear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.norm import HeadNorms, ResidualStream, RmsNorm
from hetero_worker.layers.rotary import Rotation
from hetero_worker.memory.streams import HOST


class SelfAttention:
    """norm → fused qkv → head norms → rotation → cache and attention → output projection."""

    def __init__(
        self, config: ModelConfig, layer: int, heads: UnitRange, *, adds_bias: bool, ops: FusedOps = PLAIN_OPS
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._num_kv_heads = heads.size
        self._num_heads = heads.size * config.group_size
        self._head_dim = config.head_dim
        self._rule = AttentionRule(config.attention_scale, config.windows[layer], config.attention_soft_cap)
        self._ops = ops
        self._norm = layer_norm(config, layer, "input_layernorm", ops)
        self._qkv = qkv_linear(config, prefix, heads)
        self._output = output_linear(config, prefix, heads, bias=adds_bias)
        self._head_norms = _head_norms(config, prefix, heads) if config.qk_norm else None

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self._num_kv_heads

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each linear layer."""
        return self._qkv.shape, self._output.shape

    @property
    def window(self) -> int | None:
        """Number of tokens that a row attends to, its own included; None: all."""
        return self._rule.window

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take; `kernel` None: in the arithmetic type."""
        norms = sum(part.weight_bytes(dtype) for part in (self._norm, self._head_norms) if part is not None)
        return norms + sum(part.weight_bytes(dtype, kernel) for part in (self._qkv, self._output))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        parts = (self._norm, self._qkv, self._output, self._head_norms)
        return tuple(tensor for part in parts if part is not None for tensor in part.tensors)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        self._norm.load(checkpoint, dtype=dtype, device=device)
        self._qkv.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        self._output.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        if self._head_norms is not None:
            self._head_norms.load(checkpoint, dtype=dtype, device=device)

    def __call__(
        self, hidden: torch.Tensor, rotation: Rotation, attention: StepAttention, cache: LayerCache
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of hidden states [tokens, hidden]."""
        return self.of_stream(ResidualStream(hidden), rotation, attention, cache)

    def of_stream(
        self, stream: ResidualStream, rotation: Rotation, attention: StepAttention, cache: LayerCache
    ) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream."""
        qkv = self._qkv(stream.normed(self._norm))
        by_head = qkv.view(len(qkv), -1, self._head_dim)
        return self._output(self._attend(by_head, rotation, attention, cache))

    def _attend(
        self, qkv: torch.Tensor, rotation: Rotation, attention: StepAttention, cache: LayerCache
    ) -> torch.Tensor:
        """Return [tokens, heads · head_dim] of [tokens, heads + 2 · kv_heads, head_dim]."""
        norms = self._head_norms.weights if self._head_norms is not None else None
        query = self._ops.rotate_and_write(
            qkv, rotation, num_heads=self._num_heads, norms=norms, cache=cache, slots=attention.slot_mapping
        )
        return attention.attend_written(query, cache, self._rule)


class GatedMlp:
    """norm → fused gate and up → activation(gate) · up → down projection."""

    def __init__(
        self, config: ModelConfig, layer: int, columns: UnitRange, *, adds_bias: bool, ops: FusedOps = PLAIN_OPS
    ) -> None:
        prefix = f"model.layers.{layer}.mlp"
        self._activation = config.activation
        self._ops = ops
        self._norm = mlp_norm(config, layer, ops)
        self._gate_up = gate_up_linear(config, prefix, columns)
        self._down = down_linear(config, prefix, columns, bias=adds_bias)

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each linear layer."""
        return self._gate_up.shape, self._down.shape

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel | None = None) -> int:
        """Return the most bytes that the loaded weights take; `kernel` None: in the arithmetic type."""
        linears = sum(part.weight_bytes(dtype, kernel) for part in (self._gate_up, self._down))
        return self._norm.weight_bytes(dtype) + linears

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weights, except those that a kernel has packed."""
        return tuple(tensor for part in (self._norm, self._gate_up, self._down) for tensor in part.tensors)

    def load(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, kernel: LinearKernel, device: torch.device = HOST
    ) -> None:
        """Read this rank's slices. Raises ModelError."""
        self._norm.load(checkpoint, dtype=dtype, device=device)
        self._gate_up.load(checkpoint, dtype=dtype, kernel=kernel, device=device)
        self._down.load(checkpoint, dtype=dtype, kernel=kernel, device=device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of hidden states [tokens, hidden]."""
        return self.of_stream(ResidualStream(hidden))

    def of_stream(self, stream: ResidualStream) -> torch.Tensor:
        """Return the partial sum [tokens, hidden] of the residual stream."""
        return self._down(self._ops.gated(self._gate_up(stream.normed(self._norm)), self._activation))


def mlp_norm(config: ModelConfig, layer: int, ops: FusedOps = PLAIN_OPS) -> RmsNorm:
    """Return the norm of an MLP's input.

    Models that norm outputs too give the usual name of this norm to an output's.
    """
    name = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return layer_norm(config, layer, name, ops)


def layer_norm(config: ModelConfig, layer: int, name: str, ops: FusedOps = PLAIN_OPS) -> RmsNorm:
    """Return one of a layer's norms of the residual stream's width."""
    return RmsNorm(
        f"model.layers.{layer}.{name}.weight",
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        offset=config.norm_offset,
        ops=ops,
    )


def _head_norms(config: ModelConfig, prefix: str, heads: UnitRange) -> HeadNorms:
    return HeadNorms(
        prefix,
        num_heads=heads.size * config.group_size,
        num_kv_heads=heads.size,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        offset=config.norm_offset,
    )
