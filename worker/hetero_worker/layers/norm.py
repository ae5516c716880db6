"""RMSNorm. Its weights are held by every rank that needs them: they are replicated by plan.

Some models store a weight less an offset (`ModelConfig.norm_offset`), so that it is near 0. What is multiplied with is
then near 1, where bfloat16 is too coarse for it: such weights are kept, and such norms computed, in float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hetero_worker.memory.loader import Checkpoint, TensorSlice
from hetero_worker.platforms.base import HOST


class RmsNorm:
    """x / rms(x) · weight over the last dimension. Not usable before `load`."""

    def __init__(self, name: str, *, width: int, eps: float, offset: float = 0.0) -> None:
        self._source = TensorSlice(name, (width,))
        self._shape = [width]
        self._eps = eps
        self._offset = offset
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
        return self._shape[0] * _kept_dtype(dtype, self._offset).itemsize

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device = HOST) -> None:
        self._weight = _read(checkpoint, self._source, dtype=dtype, offset=self._offset).to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self._weight.dtype:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        return F.rms_norm(x.to(self._weight.dtype), self._shape, self._weight, self._eps).to(x.dtype)


class HeadNorms:
    """Norms of query and key heads, applied to both at once: [tokens, heads + kv_heads, head_dim]."""

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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.to(self._weight.dtype), [self._head_dim], eps=self._eps)
        return normed.mul_(self._weight).to(x.dtype)


def _kept_dtype(dtype: torch.dtype, offset: float) -> torch.dtype:
    return torch.float32 if offset else dtype


def _read(checkpoint: Checkpoint, source: TensorSlice, *, dtype: torch.dtype, offset: float) -> torch.Tensor:
    weight = torch.empty(source.shape, dtype=_kept_dtype(dtype, offset))
    checkpoint.read(source, weight)
    return weight.add_(offset) if offset else weight
