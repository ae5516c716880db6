"""A decoder-only transformer, tensor-parallel by a shard plan.

One class serves Llama, SmolLM2, Mistral, Qwen2 and Qwen3: ModelConfig's switches say what differs. Every rank
holds the residual stream of all tokens; a layer's halves are computed by the ranks that own a part of them and
summed by one exchange round each. All ranks take part in every round, also those that own nothing of the
layer: they receive the sum.

A Decoder is built from shapes alone and weighs nothing until `load`. It keeps no state between steps; the KV
caches and the exchange are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_worker.attention.base import AttentionBackend, AttentionBatch, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.layers.blocks import GatedMlp, SelfAttention
from hetero_worker.layers.embedding import OutputHead, ShardedEmbedding
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.layers.rotary import RotaryTable, Rotation
from hetero_worker.memory.loader import Checkpoint


@dataclass(frozen=True, slots=True)
class DecoderInput:
    """One step's tokens."""

    token_ids: torch.Tensor
    """int64 [tokens]."""
    positions: torch.Tensor
    """int64 [tokens]."""
    attention: AttentionBatch
    logit_rows: torch.Tensor | None
    """int64 [draws]: tokens whose logits are wanted; None means all, in order."""


class DecoderLayer:
    """One layer's part on this rank; a half is None where the rank owns nothing of it."""

    def __init__(self, config: ModelConfig, plan: ShardPlan, *, layer: int, rank: int) -> None:
        shard = plan.ranks[rank].layers[layer]
        self._attention_owners = plan.attention_owners(layer)
        self._mlp_owners = plan.mlp_owners(layer)
        self.attention: SelfAttention | None = None
        self.mlp: GatedMlp | None = None
        if shard.kv_heads.size:
            first = self._attention_owners[0] == rank
            self.attention = SelfAttention(config, layer, shard.kv_heads, adds_bias=first)
        if shard.mlp_columns.size:
            first = self._mlp_owners[0] == rank
            self.mlp = GatedMlp(config, layer, shard.mlp_columns, adds_bias=first)

    @property
    def parts(self) -> tuple[SelfAttention | GatedMlp, ...]:
        """What the rank owns of the layer."""
        return tuple(part for part in (self.attention, self.mlp) if part is not None)

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        *,
        attention: StepAttention,
        cache: LayerCache | None,
        exchange: HostExchange,
    ) -> None:
        """Add the layer's two halves to the residual stream `hidden` [tokens, hidden], in place."""
        partial = None
        if self.attention is not None and cache is not None:
            partial = self.attention(hidden, rotation, attention, cache)
        hidden.add_(_joined(partial, hidden, self._attention_owners, exchange))
        partial = self.mlp(hidden) if self.mlp is not None else None
        hidden.add_(_joined(partial, hidden, self._mlp_owners, exchange))


class Decoder:
    """This rank's part of the model."""

    def __init__(
        self,
        config: ModelConfig,
        plan: ShardPlan,
        *,
        rank: int,
        dtype: torch.dtype,
        max_length: int,
        attention: AttentionBackend,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._backend = attention
        self._vocab_owners = plan.vocab_owners()
        vocab_rows = plan.ranks[rank].vocab_rows
        self._layers = [DecoderLayer(config, plan, layer=i, rank=rank) for i in range(config.num_layers)]
        self._rotary = RotaryTable(config.rope, head_dim=config.head_dim, max_length=max_length, dtype=dtype)
        self._embedding: ShardedEmbedding | None = None
        self._head: OutputHead | None = None
        self._norm = RmsNorm("model.norm.weight", width=config.hidden_size, eps=config.rms_norm_eps)
        if vocab_rows.size:
            self._embedding = ShardedEmbedding(config, vocab_rows)
            self._head = OutputHead(config, vocab_rows)

    @property
    def linear_shapes(self) -> set[tuple[int, int]]:
        """Distinct (out, in) shapes of this rank's linear layers, the output head's too."""
        shapes = {shape for layer in self._layers for part in layer.parts for shape in part.linear_shapes}
        return shapes | ({self._head.shape} if self._head is not None else set())

    def weight_bytes(self, kernel: LinearKernel) -> int:
        """Bytes that are resident once loaded, rotary tables included."""
        count = sum(part.num_parameters for layer in self._layers for part in layer.parts)
        if self._embedding is not None and self._head is not None:
            count += self._embedding.num_parameters + self._head.num_parameters(kernel)
            count += self._norm.num_parameters
        return count * self._dtype.itemsize + self._rotary.num_bytes

    def load(self, checkpoint: Checkpoint, kernel: LinearKernel) -> None:
        """Read this rank's slices. Raises ModelError."""
        if self._embedding is not None and self._head is not None:
            self._embedding.load(checkpoint, dtype=self._dtype)
            self._head.load(checkpoint, self._embedding, dtype=self._dtype, kernel=kernel)
            self._norm.load(checkpoint, dtype=self._dtype)
        for layer in self._layers:
            for part in layer.parts:
                part.load(checkpoint, dtype=self._dtype, kernel=kernel)

    def allocate_caches(self, *, num_blocks: int, block_size: int) -> list[LayerCache | None]:
        """One cache a layer; None where this rank holds no heads of it."""
        return [
            None
            if layer.attention is None
            else LayerCache.allocate(
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=layer.attention.num_kv_heads,
                head_dim=self._config.head_dim,
                dtype=self._dtype,
            )
            for layer in self._layers
        ]

    def forward(
        self, step: DecoderInput, *, caches: Sequence[LayerCache | None], exchange: HostExchange
    ) -> torch.Tensor:
        """Logits of this rank's vocabulary rows for the step's draws: float32 [draws, vocabulary rows]."""
        hidden = self._embed(step.token_ids, exchange)
        rotation = self._rotary.at(step.positions)
        attention = self._backend.begin(step.attention)
        for layer, cache in zip(self._layers, caches, strict=True):
            layer(hidden, rotation, attention=attention, cache=cache, exchange=exchange)
        if step.logit_rows is not None:
            hidden = hidden.index_select(0, step.logit_rows)
        if self._head is None or not len(hidden):
            return torch.empty(len(hidden), 0)
        return self._head(self._norm(hidden))

    def _embed(self, token_ids: torch.Tensor, exchange: HostExchange) -> torch.Tensor:
        partial = self._embedding(token_ids) if self._embedding is not None else None
        shape = (len(token_ids), self._config.hidden_size)
        if partial is None:
            partial = torch.empty(shape, dtype=self._dtype)
        if exchange.world_size > 1:
            exchange.all_reduce(partial, self._vocab_owners)
        return partial


def _joined(
    partial: torch.Tensor | None, like: torch.Tensor, owners: Sequence[int], exchange: HostExchange
) -> torch.Tensor:
    """The sum of the owners' partials, on every rank."""
    joined = torch.empty_like(like) if partial is None else partial
    if exchange.world_size > 1:
        exchange.all_reduce(joined, owners)
    return joined
