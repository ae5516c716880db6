"""RMSNorm. Its weights are held by every rank that needs them: they are replicated by plan."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hetero_worker.memory.loader import Checkpoint, TensorSlice


class RmsNorm:
    """x / rms(x) · weight over the last dimension. Not usable before `load`."""

    def __init__(self, name: str, *, width: int, eps: float) -> None:
        self._source = TensorSlice(name, (width,))
        self._shape = [width]
        self._eps = eps
        self._weight = torch.empty(0)

    @property
    def num_parameters(self) -> int:
        return self._shape[0]

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype) -> None:
        self._weight = torch.empty(self._shape, dtype=dtype)
        checkpoint.read(self._source, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorms:
    """Qwen3's norms of query and key heads, applied to both at once: [tokens, heads + kv_heads, head_dim]."""

    def __init__(self, prefix: str, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        self._sources = {
            TensorSlice(f"{prefix}.q_norm.weight", (head_dim,)): num_heads,
            TensorSlice(f"{prefix}.k_norm.weight", (head_dim,)): num_kv_heads,
        }
        self._head_dim = head_dim
        self._eps = eps
        self._weight = torch.empty(0)

    @property
    def num_parameters(self) -> int:
        return sum(self._sources.values()) * self._head_dim

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype) -> None:
        parts = []
        for source, heads in self._sources.items():
            weight = torch.empty(self._head_dim, dtype=dtype)
            checkpoint.read(source, weight)
            parts.append(weight.expand(heads, -1))
        self._weight = torch.cat(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, [self._head_dim], eps=self._eps).mul_(self._weight)
