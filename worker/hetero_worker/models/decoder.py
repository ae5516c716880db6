"""A decoder-only transformer, spread over ranks by a shard plan: over its layers, and within them.

One class serves all supported families; ModelConfig's switches describe the differences. The ranks that own something
of a layer form its stage. Those that own heads, the holders, have the residual stream of all tokens. Each half of a
layer is computed by the ranks that own a part of it, and summed among the holders in one exchange round. Ranks without
heads help with the MLP; the holders' leader lends them its hidden states (`lending`). Between stages the stream travels
in micro-batches (`pipeline`); with one stage that all ranks hold, nothing travels. A rank that owns nothing computes
nothing.

A Decoder is built from shapes alone and holds no weights until `load`. It keeps no state between steps; callers pass
the KV caches and the exchange.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan, Stage
from hetero_worker.adapters.low_rank import AdapterRows
from hetero_worker.adapters.peft_files import MAX_RANK, LoraAdapter, LowRankFactors
from hetero_worker.attention.base import AttentionBackend, AttentionBatch
from hetero_worker.attention.kv_cache import LayerCache, Zeros
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.distributed.routes import helper_links, input_ranks
from hetero_worker.layers.embedding import OutputHead, ShardedEmbedding
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.layers.norm import ResidualStream, RmsNorm
from hetero_worker.layers.rotary import RotaryTables
from hetero_worker.memory.huge_pages import empty_on_huge_pages
from hetero_worker.memory.panels import ExpertArena
from hetero_worker.memory.streams import HOST, DeviceStreams
from hetero_worker.models.decoder_layer import DecoderLayer
from hetero_worker.models.layer_inputs import JoinedStates, LayerInputs
from hetero_worker.models.lending import Lending
from hetero_worker.models.micro_batches import CountParts, MicroBatch, best_number, micro_batches
from hetero_worker.models.pipeline import Pipeline
from hetero_worker.models.streaming import ExpertStream


@dataclass(frozen=True, slots=True)
class DecoderInput:
    """One step's tokens; tensors are on the decoder's device."""

    token_ids: torch.Tensor
    """int64 [tokens]."""
    positions: torch.Tensor
    """int64 [tokens]."""
    attention: AttentionBatch
    logit_rows: torch.Tensor | None
    """int64 [draws]: rows whose logits are computed; None: all, in order."""
    adapters: torch.Tensor | None = None
    """int64 [tokens]: number of each row's adapter, 0: none; None: no row has one."""
    streams_experts: bool = False
    """Whether experts of ranks on host cores come to the group's GPU rank."""


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
        device: torch.device = HOST,
        lends_at_once: bool = False,
        ops: FusedOps = PLAIN_OPS,
        cache_dtype: torch.dtype | None = None,
        expert_deferral: int = 0,
        borrows_vocabulary: bool = False,
        adapts_experts: bool = False,
        expert_buffer_bytes: int = 0,
        streams: DeviceStreams | None = None,
        max_adapter_rank: int = MAX_RANK,
    ) -> None:
        """`lends_at_once`: the device computes beside copies to and from the host (`Lending`).

        `cache_dtype`: type of cached keys and values; None: `dtype`. `expert_deferral`: number of a token's chosen
        experts whose sum helpers return a layer late, fewer than it chooses; in a stage's last layer they return all.
        `borrows_vocabulary`: embedding and output head are another decoder's; see `borrow`. `adapts_experts`: experts
        take adapters. `max_adapter_rank`: the largest of an adapter. `expert_buffer_bytes`: helpers' experts are shared
        with the leader, which has buffers of so many bytes for them (`ExpertStream`); 0: they are not. `streams` are
        the leader's for its copies.
        """
        self._config = config
        self._dtype = dtype
        self._cache_dtype = cache_dtype or dtype
        self.device = device
        self._lends_at_once = lends_at_once
        self._borrows_vocabulary = borrows_vocabulary
        self.ops = ops
        self._backend = attention
        self._count_parts = count_parts
        self._rank = rank
        self._skipped: frozenset[int] = frozenset()
        self._embedding_owners = plan.embedding_owners()
        self._input_ranks = input_ranks(plan, inputs_everywhere=bool(config.layer_input_size))
        self._kv_layers = config.kv_layers
        self._pipeline = Pipeline(plan, rank=rank)
        self._helper_links = dict(zip(plan.stages(), helper_links(plan), strict=True))
        late = plan.deferring_layers(rank) if expert_deferral else ()
        self.expert_stream: ExpertStream | None = None
        """The leader's, if experts of its helpers may come to it."""
        if expert_buffer_bytes and streams is not None and plan.ranks[rank].kv_heads_total:
            self.expert_stream = ExpertStream(streams, device, buffer_bytes=expert_buffer_bytes)
        self._layers = [
            DecoderLayer(
                config,
                plan,
                layer=i,
                rank=rank,
                ops=ops,
                late_experts=expert_deferral if i in late else 0,
                streams=self.expert_stream is not None,
            )
            for i in range(config.num_layers)
        ]
        self._shares_experts = bool(expert_buffer_bytes) and not plan.ranks[rank].kv_heads_total
        self.expert_arena: ExpertArena | None = None
        """Memory of a helper's experts, if the leader may copy them; set by `load`."""
        self._rotary = RotaryTables(
            config.ropes, head_dims=config.rotary_widths, max_length=max_length, dtype=dtype, device=device
        )
        self._adapter_rows = AdapterRows(max_adapter_rank)
        self.adapters: set[int] = set()
        """Numbers of the adapters that are held."""
        self._experts = [layer.experts for layer in self._layers if layer.experts is not None] if adapts_experts else []
        for experts in self._experts:
            experts.take_adapters(self._adapter_rows)
        self._embedding: ShardedEmbedding | None = None
        self._layer_embedding: ShardedEmbedding | None = None
        self._layer_inputs: LayerInputs | None = None
        self._joined = JoinedStates(config, ops) if config.follows_states else None
        self.states = torch.empty(0)
        """Of a prediction head: the state that goes with each token of the next step, [tokens or more, hidden]."""
        self._head: OutputHead | None = None
        self._norm = RmsNorm(
            "model.norm.weight", width=config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset, ops=ops
        )
        shard = plan.ranks[rank]
        if shard.embedding_rows.size:
            self._embedding = ShardedEmbedding(config, shard.embedding_rows)
            if config.layer_input_size:
                self._layer_embedding = ShardedEmbedding(config, shard.embedding_rows, of_layers=True)
        if shard.kv_heads_total and config.layer_input_size:
            self._layer_inputs = LayerInputs(config, ops)
        if shard.head_rows.size:
            self._head = OutputHead(config, shard.head_rows, embedding_rows=shard.embedding_rows, ops=ops)
        self._routed = self.expert_mlps

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self._config

    def weight_bytes(self, kernel: LinearKernel) -> int:
        """Return the most bytes that the loaded weights take, rotary tables included."""
        count = sum(layer.weight_bytes(self._dtype, kernel) for layer in self._layers)
        beside = self._layer_embedding, self._layer_inputs, self._joined
        count += sum(part.weight_bytes(self._dtype, kernel) for part in beside if part is not None)
        if not self._borrows_vocabulary:
            vocabulary = self._embedding, self._head
            count += sum(part.weight_bytes(self._dtype, kernel) for part in vocabulary if part is not None)
        if self._head is not None:
            count += self._norm.weight_bytes(self._dtype)
        return count + self._rotary.num_bytes

    def load(
        self, checkpoint: Checkpoint, kernel: LinearKernel, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read this rank's slices; call `on_bytes` with the bytes of each part that was read. Raises ModelError."""
        if self._shares_experts:
            self._make_arena(kernel)
        own = not self._borrows_vocabulary
        for part in (self._embedding if own else None, self._layer_embedding, self._layer_inputs, self._joined):
            if part is not None:
                part.load(checkpoint, dtype=self._dtype, kernel=kernel, device=self.device)
                on_bytes(part.weight_bytes(self._dtype, kernel))
        if self._head is not None:
            self._norm.load(checkpoint, dtype=self._dtype, device=self.device)
        if self._head is not None and own:
            self._head.load(checkpoint, self._embedding, dtype=self._dtype, kernel=kernel, device=self.device)
            on_bytes(self._head.weight_bytes(self._dtype, kernel))
        for layer in self._layers:
            layer.load(checkpoint, dtype=self._dtype, kernel=kernel, device=self.device)
            on_bytes(layer.weight_bytes(self._dtype, kernel))
        if self.expert_arena is not None:
            self.expert_arena.trim()

    def _make_arena(self, kernel: LinearKernel) -> None:
        """Have experts lie in an arena, if the kernel packs panels."""
        mlps = self.expert_mlps.values()
        if not mlps or kernel.sharing(lambda _: torch.empty(0)) is None:
            return
        most = max(mlp.expert_bytes(self._dtype, kernel) for mlp in mlps)
        self.expert_arena = ExpertArena(sum(len(mlp.numbers) for mlp in mlps), most)
        for mlp in mlps:
            mlp.lie_in(self.expert_arena)

    def borrow(self, other: Decoder) -> None:
        """Compute with the embedding and the output head of another decoder, which holds all rows of them."""
        if self._borrows_vocabulary:
            self._embedding, self._head = other._embedding, other._head

    @property
    def expert_mlps(self) -> dict[int, ExpertMlp]:
        """Expert MLPs by layer, for the layers of which this rank holds experts."""
        return {i: layer.mlp for i, layer in enumerate(self._layers) if isinstance(layer.mlp, ExpertMlp)}

    @property
    def _adaptable(self) -> list[ShardedLinear]:
        """Linear layers that take adapters, but for experts."""
        return [linear for layer in self._layers for linear in layer.adaptable]

    @property
    def adaptable(self) -> list[ShardedLinear]:
        """Linear layers of this rank that take adapters, experts' last."""
        return [*self._adaptable, *(linear for experts in self._experts for linear in experts.linears)]

    def read_adapter(self, adapter: LoraAdapter) -> list[list[LowRankFactors | None]]:
        """Read this rank's factors of an open adapter, for `hold_adapter`. Raises ModelError."""
        return [[adapter.factors(part) for part in linear.slices] for linear in self.adaptable]

    def hold_adapter(
        self, number: int, factors: Sequence[Sequence[LowRankFactors | None]], kernel: LinearKernel
    ) -> None:
        """Serve an adapter under a number in [1, MAX_ADAPTERS] from now on, in place of another that had it."""
        left = iter(factors)
        # Recorded steps have the products of all layers, so all layers make them for any adapter.
        for linear in self._adaptable:
            linear.take_adapters(kernel, self._adapter_rows, device=self.device).hold(number, next(left), self._dtype)
        for experts in self._experts:
            experts.hold_adapter(number, [next(left) for _ in experts.linears], kernel, self._dtype)
        self.adapters.add(number)

    def adapter_bytes(self, rank: int) -> int:
        """Return the bytes of an adapter of this rank that changes all that takes adapters."""
        shapes = (part.shape for linear in self.adaptable for part in linear.slices)
        return sum(rank * (out + width) for out, width in shapes) * self._dtype.itemsize

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, which no row has any more."""
        for linear in self._adaptable:
            linear.drop_adapter(number)
        for experts in self._experts:
            experts.drop_adapter(number, self._dtype)
        self.adapters.discard(number)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of this rank's loaded weights, except weights that a kernel has packed in its own layout."""
        inputs = self._layer_embedding, self._layer_inputs, self._joined
        parts = (self._embedding, *inputs, self._head, self._norm, self._rotary, *self._layers)
        return [tensor for part in parts if part is not None for tensor in part.tensors]

    def allocate_caches(
        self, *, num_blocks: int, block_size: int, num_slots: int = 1, zeros: Zeros = empty_on_huge_pages
    ) -> list[LayerCache | None]:
        """Return one cache per layer; None if this rank caches nothing of the layer, or steps skip it.

        `num_slots`: sequences that may have states at once. `zeros`: as for `LayerCache.allocate`.
        """
        return [
            None
            if layer.attention is None or i in self._skipped or self._kv_layers[i] != i
            else layer.attention.allocate_cache(
                num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, dtype=self._cache_dtype, zeros=zeros
            )
            for i, layer in enumerate(self._layers)
        ]

    def forward(self, step: DecoderInput, *, caches: Sequence[LayerCache | None], exchange: Exchange) -> torch.Tensor:
        """Return the logits of this rank's vocabulary rows for the step's draws: float32 [draws, vocabulary rows]."""
        return self.logits(self.hidden(step, caches=caches, exchange=exchange))

    def hidden(self, step: DecoderInput, *, caches: Sequence[LayerCache | None], exchange: Exchange) -> torch.Tensor:
        """Return the hidden states of the step's logit rows, [rows, hidden], for `logits`.

        They have content only if this rank has a part of the output head.
        """
        # Each micro-batch would copy all experts again.
        number = 1 if step.streams_experts else self._count_parts(len(step.token_ids), self._pipeline.num_stages)
        batches = micro_batches(step.attention, number)
        hidden = self._look_up(self._embedding, step.token_ids, self._config.hidden_size, exchange)
        if self._joined is not None:
            hidden = self._joined(hidden, self.states[: len(hidden)])
        inputs = self._inputs(step.token_ids, hidden, exchange)
        compute = partial(self._compute, step=step, inputs=inputs, caches=caches, exchange=exchange)
        if step.streams_experts and self.expert_stream is not None:
            self.expert_stream.begin()
        self._pipeline.run(hidden, batches, compute, exchange=exchange)
        if step.logit_rows is not None:
            hidden = self.ops.pick(hidden, step.logit_rows)
        self._pipeline.deliver(hidden, exchange=exchange)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocabulary rows of this rank] of rows of `hidden`.

        Callers pass as many rows at a time as memory allows.
        """
        if self._head is None or not len(hidden):
            return torch.empty(len(hidden), 0, device=self.device)
        return self._head(self._norm(hidden))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last norm of rows of `hidden`, new [rows, hidden], on a rank with a part of the output head."""
        return self._norm(hidden)

    def shallow(self) -> Decoder:
        """Return a decoder on the same weights with only one layer of each kind, and those whose cache these read.

        Its steps take as much memory as this decoder's, and little time; their results are meaningless.
        """
        first_of: dict[object, int] = {}
        for i, layer in enumerate(self._layers):
            first_of.setdefault(layer.kind, i)
        kept = {*first_of.values(), *(self._kv_layers[i] for i in first_of.values())}
        shallow = copy.copy(self)
        shallow._skipped = frozenset(range(len(self._layers))) - kept
        return shallow

    @property
    def computed_layers(self) -> list[int]:
        """Layers that a step computes."""
        return [i for i in range(len(self._layers)) if i not in self._skipped]

    @property
    def attention(self) -> AttentionBackend:
        """The attention backend."""
        return self._backend

    def attending(self, attention: AttentionBackend) -> Decoder:
        """Return a decoder on the same weights with another attention backend."""
        other = copy.copy(self)
        other._backend = attention
        return other

    def release_buffers(self) -> None:
        """Free memory that is kept from step to step."""
        self._backend.release()
        if self.expert_stream is not None:
            self.expert_stream.unlink()

    def _look_up(
        self, table: ShardedEmbedding | None, token_ids: torch.Tensor, width: int, exchange: Exchange
    ) -> torch.Tensor:
        """Return embeddings [tokens, width] on ranks that need them; on other ranks, memory without meaning.

        `table`: this rank's rows of them; None: it has none.
        """
        if table is not None:
            found = table(token_ids)
        else:
            found = self.ops.empty(len(token_ids), width, dtype=self._dtype, device=self.device)
        if self._rank in self._input_ranks and len(self._input_ranks) > 1:
            exchange.among(self._input_ranks).all_reduce(found, self._embedding_owners)
        return found

    def _inputs(self, token_ids: torch.Tensor, hidden: torch.Tensor, exchange: Exchange) -> torch.Tensor | None:
        """Return the inputs that layers have of their own, for embeddings [tokens, hidden]; None if they have none."""
        width = self._config.layer_inputs_width
        if not width or self._rank not in self._input_ranks:
            return None
        found = self._look_up(self._layer_embedding, token_ids, width, exchange)
        return None if self._layer_inputs is None else self._layer_inputs(found, hidden)

    def _compute(
        self,
        batch: MicroBatch,
        stage: Stage,
        hidden: torch.Tensor,
        *,
        step: DecoderInput,
        inputs: torch.Tensor | None,
        caches: Sequence[LayerCache | None],
        exchange: Exchange,
    ) -> None:
        """Run the stage's layers over a micro-batch's `hidden` [rows, hidden] in place, or help with them."""
        self._adapter_rows.begin(None if step.adapters is None else step.adapters[batch.begin : batch.end])
        if self._rank not in stage.holders:
            self._help(stage, hidden, exchange, streams_experts=step.streams_experts)
            return
        rotations = self._rotary.at(step.positions[batch.begin : batch.end])
        attention = self._backend.begin(batch.attention)
        lending = self._lending(stage, exchange)
        peers = exchange.among(stage.holders)
        stream = ResidualStream(hidden, self.ops)
        own = None if inputs is None else inputs[batch.begin : batch.end]
        for i in self._computed(stage):
            cache = caches[self._kv_layers[i]]
            if i in self._routed:
                self._routed[i].slots = batch.attention.slot_mapping
            self._layers[i](
                stream, rotations[i], attention=attention, cache=cache, exchange=peers, lending=lending, inputs=own,
                experts=self.expert_stream if step.streams_experts else None,
            )  # fmt: skip
        stream.settle()

    def _help(self, stage: Stage, like: torch.Tensor, exchange: Exchange, *, streams_experts: bool) -> None:
        """Do this rank's part of a stage that others hold; `like` has a micro-batch's shape."""
        lending = self._lending(stage, exchange)
        for i in self._computed(stage):
            if lending is not None and not (streams_experts and i in self._config.expert_layers):
                self._layers[i].help(like, lending)

    def _lending(self, stage: Stage, exchange: Exchange) -> Lending | None:
        """Return this rank's end if it is a stage's leader that has helpers, or one of the helpers."""
        links = self._helper_links[stage]
        takes_part = self._rank == stage.leader or self._rank in stage.helpers
        if links is None or not takes_part:
            return None
        return Lending(
            links,
            exchange,
            at_once=self._lends_at_once,
            sum_width=self._config.mlp_sum_width,
            ops=self.ops,
            on_rows=self._adapter_rows.select,
        )

    def _computed(self, stage: Stage) -> list[int]:
        return [i for i in range(stage.begin, stage.end) if i not in self._skipped]
