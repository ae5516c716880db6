"""Token embedding, its rows sharded over the ranks."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.memory.loader import Checkpoint, TensorSlice

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ShardedEmbedding:
    """Looks up the rows that this rank holds. Not usable before `load`."""

    def __init__(self, config: ModelConfig, rows: UnitRange) -> None:
        self._source = TensorSlice(EMBEDDING, (config.vocab_size, config.hidden_size), rows=rows)
        self._rows = rows
        self._is_whole = rows.size == config.vocab_size
        self._weight = torch.empty(0)

    @property
    def num_parameters(self) -> int:
        return self._rows.size * self._source.full_shape[1]

    @property
    def weight(self) -> torch.Tensor:
        """[rows of this rank, hidden]; a tied output head packs it."""
        return self._weight

    def load(self, checkpoint: Checkpoint, *, dtype: torch.dtype) -> None:
        self._weight = torch.empty(self._source.shape, dtype=dtype)
        checkpoint.read(self._source, self._weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] → [tokens, hidden]: zero where another rank holds the row; the sum over ranks is whole."""
        if self._is_whole:
            return F.embedding(token_ids, self._weight)
        local = token_ids - self._rows.begin
        foreign = (local < 0) | (local >= self._rows.size)
        found = F.embedding(local.masked_fill_(foreign, 0), self._weight)
        return found.masked_fill_(foreign.unsqueeze(-1), 0.0)


class OutputHead:
    """Logits of this rank's vocabulary rows. A tied head is packed from the embedding's rows."""

    def __init__(self, config: ModelConfig, rows: UnitRange) -> None:
        self._linear = ShardedLinear([TensorSlice(HEAD, (config.vocab_size, config.hidden_size), rows=rows)])
        self._tied = config.tie_word_embeddings

    @property
    def shape(self) -> tuple[int, int]:
        return self._linear.shape

    def num_parameters(self, kernel: LinearKernel) -> int:
        """Beside the embedding's: 0 when the kernel works on the embedding's own rows."""
        return self._linear.num_parameters if kernel.copies_weight or not self._tied else 0

    def load(
        self, checkpoint: Checkpoint, embedding: ShardedEmbedding, *, dtype: torch.dtype, kernel: LinearKernel
    ) -> None:
        if self._tied:
            self._linear.tie(embedding.weight, kernel)
        else:
            self._linear.load(checkpoint, dtype=dtype, kernel=kernel)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → float32 [rows, vocabulary rows of this rank]."""
        return self._linear(hidden).float()
