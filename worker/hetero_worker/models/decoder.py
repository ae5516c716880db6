"""A decoder-only transformer, spread over ranks by a shard plan: over its layers, and within them.

One class serves all supported families: ModelConfig's switches say what differs. The ranks that own something of a
layer are its stage. Each of them holds the residual stream of all tokens; a layer's halves are computed by those that
own a part of them and summed by one exchange round each, in which the stage takes part and nobody else. Between stages
the stream travels, in micro-batches (pipeline.py). With one stage of all ranks nothing travels.

A Decoder is built from shapes alone and weighs nothing until `load`. It keeps no state between steps; the KV
caches and the exchange are handed in.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan, Stage
from hetero_worker.attention.base import AttentionBackend, AttentionBatch
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.routes import input_ranks
from hetero_worker.layers.embedding import OutputHead, ShardedEmbedding
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.memory.loader import Checkpoint
from hetero_worker.models.decoder_layer import DecoderLayer
from hetero_worker.models.micro_batches import CountParts, MicroBatch, best_number, micro_batches
from hetero_worker.models.pipeline import Pipeline


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
        count_parts: CountParts = best_number,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._backend = attention
        self._count_parts = count_parts
        self._rank = rank
        self._skipped: frozenset[int] = frozenset()
        self._embedding_owners = plan.embedding_owners()
        self._input_ranks = input_ranks(plan)
        self._pipeline = Pipeline(plan, rank=rank)
        self._layers = [DecoderLayer(config, plan, layer=i, rank=rank) for i in range(config.num_layers)]
        self._rotary = RotaryTables(config.ropes, head_dim=config.head_dim, max_length=max_length, dtype=dtype)
        self._embedding: ShardedEmbedding | None = None
        self._head: OutputHead | None = None
        self._norm = RmsNorm(
            "model.norm.weight", width=config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset
        )
        shard = plan.ranks[rank]
        if shard.embedding_rows.size:
            self._embedding = ShardedEmbedding(config, shard.embedding_rows)
        if shard.head_rows.size:
            self._head = OutputHead(config, shard.head_rows, embedding_rows=shard.embedding_rows)

    @property
    def linear_shapes(self) -> set[tuple[int, int]]:
        """Distinct (out, in) shapes of this rank's linear layers, the output head's too."""
        shapes = {shape for layer in self._layers for part in layer.parts for shape in part.linear_shapes}
        return shapes | ({self._head.shape} if self._head is not None else set())

    def weight_bytes(self, kernel: LinearKernel) -> int:
        """Bytes that are resident once loaded, rotary tables included."""
        count = sum(layer.weight_bytes(self._dtype) for layer in self._layers)
        if self._embedding is not None:
            count += self._embedding.weight_bytes(self._dtype)
        if self._head is not None:
            count += self._head.weight_bytes(self._dtype, kernel) + self._norm.weight_bytes(self._dtype)
        return count + self._rotary.num_bytes

    def load(self, checkpoint: Checkpoint, kernel: LinearKernel) -> None:
        """Read this rank's slices. Raises ModelError."""
        if self._embedding is not None:
            self._embedding.load(checkpoint, dtype=self._dtype)
        if self._head is not None:
            self._head.load(checkpoint, self._embedding, dtype=self._dtype, kernel=kernel)
            self._norm.load(checkpoint, dtype=self._dtype)
        for layer in self._layers:
            layer.load(checkpoint, dtype=self._dtype, kernel=kernel)

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
        return self.logits(self.hidden(step, caches=caches, exchange=exchange))

    def hidden(
        self, step: DecoderInput, *, caches: Sequence[LayerCache | None], exchange: HostExchange
    ) -> torch.Tensor:
        """What `logits` takes of the step's logit rows: [rows, hidden]; content only where this rank has a head."""
        number = self._count_parts(len(step.token_ids), self._pipeline.num_stages)
        batches = micro_batches(step.attention, number)
        hidden = self._embed(step.token_ids, exchange)
        compute = partial(self._compute, positions=step.positions, caches=caches, exchange=exchange)
        self._pipeline.run(hidden, batches, compute, exchange=exchange)
        if step.logit_rows is not None:
            hidden = hidden.index_select(0, step.logit_rows)
        self._pipeline.deliver(hidden, exchange=exchange)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows of `hidden`, as many at a time as memory allows: float32 [rows, vocabulary rows of this rank]."""
        if self._head is None or not len(hidden):
            return torch.empty(len(hidden), 0)
        return self._head(self._norm(hidden))

    def shallow(self) -> Decoder:
        """This decoder, on the same weights, with one layer only of each that are alike: its steps take as much memory
        as this one's, and little time. What they give is of no use."""
        first_of: dict[object, int] = {}
        for i, layer in enumerate(self._layers):
            first_of.setdefault(layer.kind, i)
        shallow = copy.copy(self)
        shallow._skipped = frozenset(range(len(self._layers))) - frozenset(first_of.values())
        return shallow

    @property
    def computed_layers(self) -> list[int]:
        """Layers that a step goes through."""
        return [i for i in range(len(self._layers)) if i not in self._skipped]

    def release_buffers(self) -> None:
        """Give up memory that is kept from step to step."""
        self._backend.release()

    def _embed(self, token_ids: torch.Tensor, exchange: HostExchange) -> torch.Tensor:
        """[tokens, hidden]: the embeddings on the first stage's ranks, of no meaning on others."""
        if self._embedding is not None:
            hidden = self._embedding(token_ids)
        else:
            hidden = torch.empty(len(token_ids), self._config.hidden_size, dtype=self._dtype)
        if self._rank in self._input_ranks and len(self._input_ranks) > 1:
            exchange.among(self._input_ranks).all_reduce(hidden, self._embedding_owners)
        return hidden

    def _compute(
        self,
        batch: MicroBatch,
        stage: Stage,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        caches: Sequence[LayerCache | None],
        exchange: HostExchange,
    ) -> None:
        """Run the stage's layers over a micro-batch's `hidden` [rows, hidden], in place."""
        rotations = self._rotary.at(positions[batch.begin : batch.end])
        attention = self._backend.begin(batch.attention)
        peers = exchange.among(stage.ranks)
        for i in range(stage.begin, stage.end):
            if i in self._skipped:
                continue
            self._layers[i](hidden, rotations[i], attention=attention, cache=caches[i], exchange=peers)
