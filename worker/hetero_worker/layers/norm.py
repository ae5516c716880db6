"""RMSNorm. Its weights are held by every rank that needs them: they are replicated by plan.

Some models store a weight less an offset (`ModelConfig.norm_offset`), so that it is near 0. What is multiplied with is
then near 1, where bfloat16 is too coarse for it: such weights are kept, and such norms computed, in float32.
"""

from __future__ import annotations

import torch

from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, HeadWeights
from hetero_worker.platforms.base import HOST


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
        return self._eps

    @property
    def weight(self) -> torch.Tensor:
        """[width], the offset added."""
        return self._weight

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._weight,)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Once loaded."""
        return self._source.shape[0] * _kept_dtype(dtype, self._offset).itemsize

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device = HOST) -> None:
        self._weight = _read(checkpoint, self._source, dtype=dtype, offset=self._offset).to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width], new."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def after_add(self, residual: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """residual += delta, in place, and the norm of that: [rows, width], new."""
        return self._ops.add_rms_norm(residual, delta, self._weight, self._eps)


class HeadNorms:
    """Weights of the norms of query and key heads, of both in one tensor: FusedOps norms as it rotates."""

    def __init__(
        self, prefix: str, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, offset: float = 0.0
    ) -> None:
        self._sources = {
            TensorSlice(f"{prefix}.q_norm.weight", (head_dim,)): num_heads,
            TensorSlice(f"{prefix}.k_norm.weight", (head_dim,)): num_kv_heads,
        }
        self._head_dim = head_dim
        self._eps = eps
        self._offset = offset
        self._weight = torch.empty(0)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Once loaded."""
        return sum(self._sources.values()) * self._head_dim * _kept_dtype(dtype, self._offset).itemsize

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._weight,)

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device = HOST) -> None:
        parts = [
            _read(checkpoint, source, dtype=dtype, offset=self._offset).expand(heads, -1)
            for source, heads in self._sources.items()
        ]
        self._weight = torch.cat(parts).to(device)

    @property
    def weights(self) -> HeadWeights:
        """Once loaded."""
        return HeadWeights(self._weight, self._eps)


def _kept_dtype(dtype: torch.dtype, offset: float) -> torch.dtype:
    return torch.float32 if offset else dtype


def _read(checkpoint: Checkpoint, source: TensorSlice, *, dtype: torch.dtype, offset: float) -> torch.Tensor:
    weight = torch.empty(source.shape, dtype=_kept_dtype(dtype, offset))
    checkpoint.read(source, weight)
    return weight.add_(offset) if offset else weight
