"""RMSNorm, and the residual stream whose additions are fused with it.

Every rank that needs a norm holds its weight: norms are replicated by plan. Some models store a weight less an offset
(`ModelConfig.norm_offset`), so that it is near 0. The factor itself is then near 1, where bfloat16 is too coarse for
it: such weights are kept, and such norms computed, in float32.

A half of a layer begins with a norm of the residual stream and ends with an addition to it. Between two halves both are
one operator (`FusedOps.add_rms_norm`): the last addition waits for the next norm, of this layer or the next.
"""

from __future__ import annotations

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, HeadWeights
from hetero_worker.memory.streams import HOST


class RmsNorm:
    """x / rms(x) · weight over the last dimension. Not usable before `load`."""

    def __init__(self, name: str, *, width: int, eps: float, offset: float = 0.0, ops: FusedOps = PLAIN_OPS) -> None:
        self._source = TensorSlice(name, (width,))
        self._eps = eps
        self._offset = offset
        self._ops = ops
        self._weight = torch.empty(0)

    @property
    def eps(self) -> float:
        """Term added to the mean square."""
        return self._eps

    @property
    def weight(self) -> torch.Tensor:
        """The loaded weight [width], with the offset added."""
        return self._weight

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weight."""
        return (self._weight,)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that the loaded weight takes."""
        return self._source.shape[0] * _kept_dtype(dtype, self._offset).itemsize

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device = HOST) -> None:
        """Read the weight. Raises ModelError."""
        self._weight = _read(checkpoint, self._source, dtype=dtype, offset=self._offset).to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x [rows, width], new."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def after_add(self, residual: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Add delta to residual in place, and return the norm of the sum: new [rows, width]."""
        return self._ops.add_rms_norm(residual, delta, self._weight, self._eps)


class HeadNorms:
    """Weights of the norms of query and key heads in one tensor; `FusedOps.rotate` applies them.

    A model may have one weight for each head, or one for the elements of all heads.
    """

    def __init__(self, config: ModelConfig, prefix: str, heads: UnitRange) -> None:
        """`heads`: KV heads of this rank. The model must have norms of queries and keys."""
        dim, order, unit = config.head_dim, config.head_order, config.kv_heads_a_unit
        self.over_all_heads = config.qk_norm == "all heads"
        """Whether a token's query heads, and its key heads, are normed together."""
        self.widths = config.num_heads * dim, config.num_kv_heads * unit * dim
        """Elements of all ranks' query and key heads."""
        self._sources: dict[TensorSlice, int] = {}
        owned = (heads.scaled(config.group_size), *([heads.scaled(unit)] if config.makes_kv else ()))
        for name, width, own in zip(("q", "k"), self.widths, owned, strict=False):
            if self.over_all_heads:
                part = TensorSlice(f"{prefix}.{name}_norm.weight", (width,), rows=own.scaled(dim), order=order)
            else:
                part = TensorSlice(f"{prefix}.{name}_norm.weight", (dim,), order=order)
            self._sources[part] = own.size
        self._head_dim = dim
        self._eps = config.rms_norm_eps
        self._offset = config.norm_offset
        self._with_values = config.value_norm and config.makes_kv
        self._weight = torch.empty(0)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that the loaded weights take."""
        return sum(self._sources.values()) * self._head_dim * _kept_dtype(dtype, self._offset).itemsize

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the loaded weight."""
        return (self._weight,)

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device = HOST) -> None:
        """Read the weight. Raises ModelError."""
        parts = [
            _read(checkpoint, source, dtype=dtype, offset=self._offset).view(-1, self._head_dim).expand(heads, -1)
            for source, heads in self._sources.items()
        ]
        self._weight = torch.cat(parts).to(device)

    def weights(self, mean_squares: torch.Tensor | None = None) -> HeadWeights:
        """Return the loaded weights, with the mean squares [tokens, 2] of norms over all heads."""
        return HeadWeights(self._weight, self._eps, mean_squares, self._with_values)


class ResidualStream:
    """The residual stream `hidden` [tokens, hidden], to which layers add in place."""

    def __init__(self, hidden: torch.Tensor, ops: FusedOps = PLAIN_OPS) -> None:
        self._hidden = hidden
        self._ops = ops
        self._waiting: torch.Tensor | None = None

    def add(self, delta: torch.Tensor) -> None:
        """Add `delta` [tokens, hidden], which must not change until the stream is read or normed."""
        self.settle()
        self._waiting = delta

    def normed(self, norm: RmsNorm) -> torch.Tensor:
        """Return the norm of the stream, new [tokens, hidden]."""
        delta, self._waiting = self._waiting, None
        return norm(self._hidden) if delta is None else norm.after_add(self._hidden, delta)

    def scale(self, factor: float) -> None:
        """Multiply the stream, additions included."""
        deltas = () if self._waiting is None else (self._waiting,)
        self._ops.add(self._hidden, *deltas, factor=factor)
        self._waiting = None

    def settle(self) -> torch.Tensor:
        """Finish all additions, and return the stream."""
        if self._waiting is not None:
            self._ops.add(self._hidden, self._waiting)
            self._waiting = None
        return self._hidden


def _kept_dtype(dtype: torch.dtype, offset: float) -> torch.dtype:
    return torch.float32 if offset else dtype


def _read(checkpoint: Checkpoint, source: TensorSlice, *, dtype: torch.dtype, offset: float) -> torch.Tensor:
    weight = torch.empty(source.shape, dtype=_kept_dtype(dtype, offset))
    checkpoint.read(source, weight)
    return weight.add_(offset) if offset else weight
