"""Token embedding, its rows sharded over the ranks."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.memory.loader import Checkpoint, TensorSlice
from hetero_worker.platforms.base import HOST

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ShardedEmbedding:
    """Looks up the rows that this rank holds. Not usable before `load`."""

    def __init__(self, config: ModelConfig, rows: UnitRange) -> None:
        self._source = TensorSlice(EMBEDDING, (config.vocab_size, config.hidden_size), rows=rows)
        self._rows = rows
        self._is_whole = rows.size == config.vocab_size
        self._scale = config.embedding_scale
        self._weight = torch.empty(0)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Once loaded."""
        return math.prod(self._source.shape) * dtype.itemsize

    @property
    def weight(self) -> torch.Tensor:
        """[rows of this rank, hidden]; a tied output head packs it."""
        return self._weight

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._weight,)

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device = HOST) -> None:
        self._weight = torch.empty(self._source.shape, dtype=dtype, device=device)
        checkpoint.read(self._source, self._weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] → [tokens, hidden]: zero where another rank holds the row; the sum over ranks is whole."""
        found = F.embedding(token_ids, self._weight) if self._is_whole else self._own(token_ids)
        # The scale is rounded to the weight's type, as the models were trained.
        return found if self._scale == 1.0 else found.mul_(torch.tensor(self._scale, dtype=found.dtype).item())

    def _own(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self._rows.begin
        foreign = (local < 0) | (local >= self._rows.size)
        found = F.embedding(local.masked_fill_(foreign, 0), self._weight)
        return found.masked_fill_(foreign.unsqueeze(-1), 0.0)


class OutputHead:
    """Logits of this rank's vocabulary rows.

    A tied head is packed from the embedding's rows if this rank's `embedding_rows` are the same, else it reads its own.
    """

    def __init__(
        self, config: ModelConfig, rows: UnitRange, *, embedding_rows: UnitRange, ops: FusedOps = PLAIN_OPS
    ) -> None:
        tied = config.tie_word_embeddings
        source = TensorSlice(EMBEDDING if tied else HEAD, (config.vocab_size, config.hidden_size), rows=rows)
        self._linear = ShardedLinear([source])
        self._shares_rows = tied and rows == embedding_rows
        self._soft_cap = config.logit_soft_cap
        self._ops = ops

    @property
    def shape(self) -> tuple[int, int]:
        return self._linear.shape

    def weight_bytes(self, dtype: torch.dtype, kernel: LinearKernel) -> int:
        """Once loaded, beside the embedding's: 0 when the kernel works on the embedding's own rows."""
        return self._linear.weight_bytes(dtype) if kernel.copies_weight or not self._shares_rows else 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Beside the embedding's."""
        return self._linear.tensors

    def load(
        self,
        checkpoint: Checkpoint,
        embedding: ShardedEmbedding | None,
        *,
        dtype: torch.dtype,
        kernel: LinearKernel,
        device: torch.device = HOST,
    ) -> None:
        """`embedding` is this rank's, loaded, if it has one."""
        if self._shares_rows and embedding is not None:
            self._linear.tie(embedding.weight, kernel)
        else:
            self._linear.load(checkpoint, dtype=dtype, kernel=kernel, device=device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → float32 [rows, vocabulary rows of this rank]."""
        logits = self._linear(hidden).float()
        return logits if self._soft_cap is None else self._ops.capped(logits, self._soft_cap)
