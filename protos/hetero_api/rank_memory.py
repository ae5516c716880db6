"""Bytes that a rank's part of a model takes in its memory: the one home of this arithmetic.

A rank refuses a part that it has no room for, and the solver deals no part that a rank would refuse: both count with
this module. All figures are bounds from shapes, in bytes: a rank never takes more, and it measures what can be measured
(the largest step, the runtime) once it can.

A step takes memory half a layer after half a layer, so a rank counts the wider half (`workspace_bytes`). A caller that
needs the cost of one more unit (a KV head, an MLP column, a vocabulary row) counts both, which is a sum of units, and
the larger bound (`summed_workspace_bytes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hetero_api.kept_weights import FLOAT_BYTES, KeptWeights
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import RankShard

RUNTIME_BYTES: Final = 384 * 1024**2
"""Bytes of a rank on host cores: interpreter, torch and its thread pools, gRPC. 240 MiB measured after import, plus
what
allocators keep.
"""
ASSUMED_GPU_RUNTIME_BYTES: Final = 1024**3
"""Bytes of a GPU, where nobody has measured it: its context, libraries' and kernels' code, communicators."""
RUNTIME_GROWTH_BYTES: Final = 256 * 1024**2
"""Bytes that a GPU's measured runtime may still grow by: communicators of subgroups, kernels that are loaded at use."""

PROMPT_LOGIT_ROWS: Final = 64
"""Rows of a prompt whose logits are in memory together, when all of its log-probabilities are wanted."""
EXPERT_ROWS: Final = 128
"""Tokens that go through an expert at a time, at most: it bounds memory however unevenly tokens are routed."""
SCORES_AT_ONCE: Final = 1 << 24
"""Scores of latent attention that torch makes at a time, if one row has fewer."""
EXPANDED_AT_ONCE: Final = 1 << 27
"""Elements of heads' keys and values that latent attention on a device makes at a time of what is cached, at most."""
DELTA_CHUNK: Final = 64
"""Tokens of a sequence whose gated delta rule torch computes at a time."""
SEQUENCES_AT_ONCE: Final = 16
"""Sequences that decode whose states torch computes at a time."""
SNAPSHOT_PART: Final = 8
"""One part in so many of the memory that is left for the KV cache is for snapshots of states, if layers keep states."""
WHOLE_LOGITS: Final = 1 << 21
"""Logits of whole rows that ranks which share the vocabulary bring together at a time, for draws with filters."""
LOGITS_AT_ONCE: Final = 3
"""Logits, scores made of them, and noise."""
WORKSPACE_MARGIN: Final = 0.125
"""Margin that a measured step is enlarged by: allocators cut memory into pieces."""
WORKSPACE_MARGIN_BYTES: Final = 16 * 1024**2
"""And so much more, however small it is."""

LOGIT_BYTES: Final = 4
"""Logits are float32."""
_ROUTER_BYTES: Final = 4
"""Routers compute in float32, and are kept as wide as they are stored, at most so."""
CHOICES_AT_ONCE: Final = 4096
"""Tokens' choices of experts that a native operation computes at a time, at most."""
THREAD_SCRATCH_BYTES: Final = 2 * 1024**2
"""Bytes of a thread's sums and chunks of attention, in native kernels."""
_ROWS_OF_THREAD: Final = 16
"""Rows of a linear operation that each thread prepares for itself."""
_EXPERT_ROWS_OF_THREAD: Final = 64
"""Rows that a thread brings together for an expert."""
ROUTER_TERMS_AT_ONCE: Final = 1 << 18
"""Products of a router that torch makes at a time, if one token has fewer."""
_CAPPED_SCORES_AT_ONCE: Final = 3
"""Bytes of one KV head's queries: products, capped scores, and their softmax."""
_DECODE_SCRATCH_BYTES: Final = 12
"""Index, score and mask of one (query head, cached token) of a decode step; alive for one layer's heads, and for each
window that layers have."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes that one token position of the KV cache costs a rank."""

    cache_bytes: int
    scratch_bytes: int

    @property
    def bytes(self) -> int:
        """Cache and scratch together."""
        return self.cache_bytes + self.scratch_bytes

    def cache_of(self, num_bytes: int) -> int:
        """How much of so many bytes the cache itself may take, so that its scratch fits beside it; 0 without heads."""
        return num_bytes * self.cache_bytes // self.bytes if self.cache_bytes else 0

    def total_of(self, cache_bytes: int) -> int:
        """Return the bytes of a cache of this size with its scratch; 0 without heads."""
        return -(-cache_bytes * self.bytes // self.cache_bytes) if self.cache_bytes else 0


@dataclass(frozen=True, slots=True)
class WeightParts:
    """Bytes of a rank's weights by part of the model."""

    attention: int
    dense: int
    """MLPs of layers without experts."""
    shared: int
    """Experts of all tokens."""
    experts: int
    """Experts that a router chooses."""
    vocabulary: int
    """Embedding and output head."""
    other: int
    """Norms, routers, tables of rotations."""

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return self.attention + self.dense + self.shared + self.experts + self.vocabulary + self.other


def with_margin(step_bytes: int) -> int:
    """Return the bytes to keep free for a step that takes so many."""
    return int(step_bytes * (1 + WORKSPACE_MARGIN)) + WORKSPACE_MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model in one arithmetic type, under an engine's limits. Nothing here allocates."""

    config: ModelConfig
    limits: StepLimits
    element_bytes: int
    weight_bits: frozenset[int] = frozenset()
    """Widths in which the rank keeps weights that are stored so (KeptWeights); others are of `element_bytes`."""
    cache_element_bytes: int | None = None
    """Bytes of an element of the KV cache; None: `element_bytes`."""
    threads: int = 0
    """Threads of a rank on host cores, whose kernels take scratch; 0: it computes on a device."""

    # --- weights ----------------------------------------------------------------------------------------

    @property
    def head_weights(self) -> int:
        """Return the bytes of one KV head and its query heads, in one layer: projections, their biases, norms of
        heads.
        """
        config = self.config
        rows = ((1 + config.gated_attention) * config.group_size + 2 * config.made_kv_heads) * config.head_dim
        biases = rows if config.qkv_bias and config.latent is None else 0
        sinks = config.group_size * FLOAT_BYTES if config.has_sinks else 0
        norms = (config.group_size + config.made_kv_heads) * config.head_dim if config.qk_norm else 0
        return self.kept.head_bytes(config) + biases * self.element_bytes + norms * self._norm_bytes + sinks

    def attention_weights(self, layer: int, kv_heads: int) -> int:
        """Return the most bytes of so many KV heads, or units of them, of a layer, or of what is dealt with them."""
        delta = self.config.delta
        if delta is None or layer not in delta.layers:
            return kv_heads * replace(self, config=self.config.of_layer(layer)).head_weights
        return delta.most_heads(kv_heads, of=self.config.num_kv_heads) * self.kept.delta_head_bytes(self.config)

    @property
    def column_weights(self) -> int:
        """Return the bytes of one MLP column, in one layer."""
        biases = 2 if self.config.mlp_bias else 0
        return self.kept.column_bytes(hidden=self.config.hidden_size) + biases * self.element_bytes

    @property
    def expert_weights(self) -> int:
        """Return the bytes of one expert, in one layer."""
        experts, hidden = self.config.experts, self.config.hidden_size
        if experts is None:
            return 0
        biases = (2 * experts.intermediate_size + hidden) * self.element_bytes if experts.biased else 0
        return self.kept.expert_bytes(hidden=hidden, width=experts.intermediate_size) + biases

    def arriving_expert(self, shard: RankShard) -> int:
        """Return the bytes to keep for one expert that is read while steps go on; 0 for a rank without experts."""
        return self.expert_weights if any(layer.experts.size for layer in shard.layers) else 0

    def experts_weights(self, number: int, columns: int) -> int:
        """Return the bytes of so many experts of a layer that a rank holds, of which it has `columns`; 0: all."""
        experts = self.config.experts
        if experts is None or not columns:
            return number * self.expert_weights
        biases = (2 * columns + self.config.hidden_size) * self.element_bytes if experts.biased else 0
        return number * (self.kept.expert_slice_bytes(columns, config=self.config) + biases)

    @property
    def row_weights(self) -> int:
        """Return the bytes of one vocabulary row of the embedding, or of the output head."""
        return self.kept.vocabulary.row_bytes(self.config.hidden_size)

    @property
    def layer_weights(self) -> int:
        """Return the bytes of one layer, whatever is owned of it: norms, biases of sums, and scales of rows that
        ranks have parts of.
        """
        config = self.config
        own_norms = 3 if config.experts is not None and config.experts.norms is not None else 0
        own_norms += bool(config.layer_input_size)
        norms = (2 + len(config.norms.sums) + own_norms) * config.hidden_size * self._norm_bytes
        biases = (config.o_bias + config.mlp_bias) * config.hidden_size
        if (latent := config.latent) is not None:
            width = (latent.query_rank or 0) + latent.cached_dim
            norms += width * self._norm_bytes
            biases += config.qkv_bias * width
        if config.delta is not None:
            norms += config.delta.value_dim * FLOAT_BYTES
        return norms + biases * self.element_bytes + self.kept.layer_bytes(config)

    @property
    def kept(self) -> KeptWeights:
        """Weights as this rank keeps them."""
        return KeptWeights(self.config.weights, self.element_bytes, self.weight_bits)

    @property
    def router_weights(self) -> int:
        """Return the bytes of one layer of which experts are owned, beside; 0 for a model without."""
        experts = self.config.experts
        if experts is None:
            return 0
        routing, hidden = experts.routing, self.config.hidden_size
        columns = hidden + routing.biased + routing.corrected + routing.scaled
        return (experts.number * columns + hidden * routing.scaled) * _ROUTER_BYTES

    @property
    def shared_gate_weights(self) -> int:
        """Return the bytes of one layer whose expert of all tokens has a factor, if a rank has columns of it."""
        experts = self.config.experts
        return self.config.hidden_size * FLOAT_BYTES if experts is not None and experts.has_shared_gate else 0

    @property
    def common_weights(self) -> int:
        """On every rank: tables of rotations, the last norm, and what a prediction head begins with."""
        config = self.config
        widths = sum(width for _, width in set(zip(config.ropes, config.rotary_widths, strict=True)))
        tables = 2 * self.limits.max_model_len * widths * self.element_bytes
        joined = self.kept.joined_bytes(config) + config.states_width * self._norm_bytes
        return tables + config.hidden_size * self._norm_bytes + joined

    @property
    def layer_inputs_weights(self) -> int:
        """Return the bytes that make inputs of all layers of embeddings, on ranks with heads; 0 for a model without."""
        return self.kept.layer_inputs_bytes(self.config) + self.config.layer_input_size * self._norm_bytes

    @property
    def layer_inputs_row(self) -> int:
        """Return the bytes of one row of the embedding for all layers; 0 for a model without."""
        width = self.config.layer_inputs_width
        return self.kept.vocabulary.row_bytes(width) if width else 0

    def weight_bytes(self, shard: RankShard, *, packs_head: bool) -> int:
        """At most. `packs_head`: whether a tied output head is kept beside the embedding's rows, as kernels of host
        cores want it."""
        return self.weight_parts(shard, packs_head=packs_head).total

    def weight_parts(self, shard: RankShard, *, packs_head: bool) -> WeightParts:
        """Return the bytes of the rank's weights by part, each at most; `packs_head` as in `weight_bytes`."""
        layers, sparse = shard.layers, set(self.config.expert_layers)
        shares_rows = self.config.tie_word_embeddings and shard.head_rows == shard.embedding_rows and not packs_head
        rows = shard.embedding_rows.size + (0 if shares_rows else shard.head_rows.size)
        columns = sum(layer.mlp_columns.size for layer in layers)
        shared = sum(layer.mlp_columns.size for number, layer in enumerate(layers) if number in sparse)
        compressing = sum(not layer.is_empty for layer in layers) * self.kept.compressing_bytes(self.config)
        routers = sum(bool(layer.experts.size) for layer in layers) * self.router_weights
        gated = [layer for number, layer in enumerate(layers) if number in sparse and layer.mlp_columns.size]
        # Placement asks for thousands of shards of many layers, few of which differ.
        first: dict[tuple[bool, ...], int] = {}
        heads = Counter((first.setdefault(self._heads_of(i), i), each.kv_heads.size) for i, each in enumerate(layers))
        experts = Counter((each.experts.size, each.expert_columns.size) for each in layers)
        attention = sum(count * self.attention_weights(*alike) for alike, count in heads.items())
        norms = sum(not layer.is_empty for layer in layers) * self.layer_weights - compressing
        return WeightParts(
            attention=attention + compressing,
            dense=(columns - shared) * self.column_weights,
            shared=shared * self.column_weights + len(gated) * self.shared_gate_weights,
            experts=sum(count * self.experts_weights(*alike) for alike, count in experts.items()),
            vocabulary=rows * self.row_weights + shard.embedding_rows.size * self.layer_inputs_row,
            other=self.common_weights + norms + routers + bool(shard.kv_heads_total) * self.layer_inputs_weights,
        )

    def _heads_of(self, layer: int) -> tuple[bool, ...]:
        """Return what `attention_weights` of a layer depends on."""
        config, sliding = self.config, self.config.sliding
        is_sliding = sliding is not None and layer in sliding.layers
        return layer in config.delta_layers, is_sliding, layer < config.num_layers - config.num_kv_readers

    # --- the KV cache -----------------------------------------------------------------------------------

    def kv_cost(self, shard: RankShard) -> KvCost:
        """Return the cost of a token position on a rank with this shard."""
        config = self.config
        layers = ((i, layer) for i, layer in enumerate(shard.layers) if i not in config.delta_layers)
        elements = sum(config.of_layer(i).cached_elements(layer.kv_heads.size) for i, layer in layers)
        return KvCost(
            cache_bytes=elements * self._cached_bytes,
            scratch_bytes=_most_heads(shard) * config.group_size * _DECODE_SCRATCH_BYTES * len(set(config.windows)),
        )

    def state_bytes(self, shard: RankShard) -> int:
        """Return the bytes of the states of all sequences that may run, in layers with the gated delta rule."""
        return self.limits.max_num_seqs * self.snapshot_bytes(shard)

    def snapshot_bytes(self, shard: RankShard) -> int:
        """Return the most bytes of one sequence's states."""
        config, delta = self.config, self.config.delta
        if delta is None:
            return 0
        one_head = (delta.state_elements + delta.window_elements) * FLOAT_BYTES
        own = (layer.kv_heads.size for i, layer in enumerate(shard.layers) if i in delta.layers)
        heads = sum(delta.most_heads(kv_heads, of=config.num_kv_heads) for kv_heads in own)
        return heads * one_head

    # --- one step, beside weights and cache -------------------------------------------------------------

    @property
    def holder_step(self) -> int:
        """Return the bytes of attention, if a rank holds heads, however many: masks of spans that continue a sequence,
        and one head's capped scores. Rows of a mask are together at most the step's, each as long as a sequence, for
        each window.
        """
        pairs = self.limits.max_num_batched_tokens * self.limits.max_model_len
        config, masks = self.config, pairs * len(set(self.config.windows)) * self.element_bytes
        if config.latent is not None:
            gathered = 2 * self.limits.max_model_len * config.head_dim * self._gathered_bytes
            scores = min(config.num_heads * pairs, max(SCORES_AT_ONCE, config.num_heads * self.limits.max_model_len))
            attending = max(FLOAT_BYTES * _CAPPED_SCORES_AT_ONCE * scores, self._expanded_step)
            return masks + gathered + attending + self._compressed_of_step
        if config.attention_soft_cap is None and not config.has_sinks:
            return masks
        return masks + FLOAT_BYTES * _CAPPED_SCORES_AT_ONCE * config.group_size * pairs

    @property
    def _compressed_of_step(self) -> int:
        """Return the bytes of what latent attention compresses, beside its heads; thrice, as all of attention."""
        width = self.config.attention_params_beside // self.config.hidden_size
        return 3 * self.limits.max_num_batched_tokens * width * self.element_bytes

    @property
    def _expanded_step(self) -> int:
        """Return the bytes of heads' keys and values that a device makes again of what latent attention caches."""
        latent = self.config.latent
        if latent is None or self.threads:
            return 0
        elements = self.config.num_heads * self.limits.max_model_len * latent.expanded_elements
        return min(EXPANDED_AT_ONCE, elements) * self.element_bytes

    @property
    def prefix_step(self) -> int:
        """Return the bytes of one KV head of a layer: the longest sequence's keys and values, gathered."""
        if self.config.latent is not None:
            return 0  # all heads have the same, see `holder_step`
        return self.limits.max_model_len * self._most(lambda config: config.cached_elements(1)) * self._gathered_bytes

    @property
    def _cached_bytes(self) -> int:
        """Return the bytes of a cached element."""
        return self.cache_element_bytes or self.element_bytes

    @property
    def _gathered_bytes(self) -> int:
        """Return the bytes of a gathered element: as it is cached and, if that is another type, as it is computed."""
        same = self._cached_bytes == self.element_bytes
        return self.element_bytes if same else self._cached_bytes + self.element_bytes

    @property
    def expert_step(self) -> int:
        """Return the bytes of an MLP of experts, however many a rank owns: its input and output, experts at work, and
        the router's arithmetic. 0 for a model without.
        """
        config, experts, tokens = self.config, self.config.experts, self.limits.max_num_batched_tokens
        if experts is None:
            return 0
        hidden, width, rows = config.hidden_size, experts.intermediate_size, min(tokens, EXPERT_ROWS)
        choices = min(tokens * experts.per_token, max(CHOICES_AT_ONCE, experts.per_token))
        one_by_one = self.element_bytes * rows * (3 * hidden + 4 * width)
        together = choices * (3 * width * self.element_bytes + hidden * FLOAT_BYTES)
        terms = max(ROUTER_TERMS_AT_ONCE, experts.number * hidden)
        router = FLOAT_BYTES * (3 * terms + tokens * 8 * experts.number)
        own_norms = 0 if experts.norms is None else 4  # its own input, and two sums that travel together
        return self.element_bytes * (2 + own_norms) * tokens * hidden + max(one_by_one, together) + router

    @property
    def logits_row_step(self) -> int:
        """Return the bytes of one vocabulary row of the output head: the most logits that a step has in memory,
        once.
        """
        return LOGIT_BYTES * max(self.limits.max_num_seqs, PROMPT_LOGIT_ROWS)

    def logits_bytes(self, shard: RankShard) -> int:
        """Return the most logits that a step has in memory, once."""
        return self.logits_row_step * shard.head_rows.size

    def workspace_bytes(self, shard: RankShard) -> int:
        """Return the bytes of the largest step: an upper bound of what lives at once beside weights and cache."""
        return self._common_step(shard) + max(self._halves(shard)) + self._scratch(shard, max)

    def summed_workspace_bytes(self, shard: RankShard) -> int:
        """No less than `workspace_bytes`, and linear in what is owned, once anything of its kind is."""
        return self._common_step(shard) + sum(self._halves(shard)) + self._scratch(shard, sum)

    def _common_step(self, shard: RankShard) -> int:
        """Return the bytes of both halves of a layer, and of the output head."""
        heads = _most_heads(shard)
        held = self.holder_step + heads * self.prefix_step if heads else 0
        # Of whole rows two more, for steps that are recorded. They are counted where a rank has all of its own, too:
        # what a rank needs grows with what it has.
        whole = LOGIT_BYTES * min(WHOLE_LOGITS, self.limits.max_num_seqs * self.config.vocab_size)
        logits = LOGITS_AT_ONCE * self.logits_bytes(shard) + (LOGITS_AT_ONCE + 2) * whole
        return self._residual_of(self.limits.max_num_batched_tokens) + held + logits

    def _halves(self, shard: RankShard) -> tuple[int, int, int]:
        """Return the bytes of a layer's attention, dense MLP, and MLP of experts with those of all tokens."""
        rows, sparse = self.limits.max_num_batched_tokens, [s.mlp_columns.size for s in shard.layers if s.experts.size]
        experts = self.expert_step + max(sparse) * self._column_of(rows) if sparse else 0
        return _most_heads(shard) * self._head_of(rows), _most_columns(shard) * self._column_of(rows), experts

    def _scratch(self, shard: RankShard, both: Callable[[tuple[int, int]], int]) -> int:
        """Return the bytes of native kernels' scratch, which stays from one half of a layer to the next.

        A linear operation keeps its inputs as float32, or in three bfloat16 terms, and float32 sums of narrow outputs.
        """
        config, threads = self.config, self.threads
        if not threads:
            return 0
        inputs, sums = (FLOAT_BYTES, FLOAT_BYTES) if self.element_bytes < FLOAT_BYTES else (6, 0)
        hidden, of_column = config.hidden_size, max(inputs, 2 * sums)
        own = 0
        if config.experts is not None and any(layer.experts.size for layer in shard.layers):
            columns = max(config.experts.intermediate_size, config.shared_columns)
            own = _EXPERT_ROWS_OF_THREAD * (hidden * (self.element_bytes + inputs) + columns * of_column)
        halves = _most_heads(shard) * self._head_width * max(inputs, sums), _most_columns(shard) * of_column
        rows = self.limits.max_num_batched_tokens + _ROWS_OF_THREAD * threads
        return rows * (hidden * (inputs + sums) + both(halves)) + threads * (THREAD_SCRATCH_BYTES + own)

    def decode_bytes(self, shard: RankShard, rows: int) -> int:
        """Return the bytes of the layers of a step in which so many sequences decode: as `summed_workspace_bytes`,
        without what spans and draws take.
        """
        return (
            self._residual_of(rows)
            + _most_heads(shard) * self._head_of(rows)
            + _most_columns(shard) * self._column_of(rows)
        )

    @property
    def _norm_bytes(self) -> int:
        """Return the bytes of an element of a norm's weight: one that has an offset is kept in float32."""
        return FLOAT_BYTES if self.config.norm_offset else self.element_bytes

    def _residual_of(self, rows: int) -> int:
        """Return the bytes of the residual stream, of layers' own inputs, and of states twice: on every rank."""
        config = self.config
        width = 3 * (config.hidden_size + config.layer_inputs_width) + config.states_width
        return rows * width * self.element_bytes

    def _head_of(self, rows: int) -> int:
        """Return the bytes of one KV head of a layer: its queries, keys and values, thrice; or of the key heads of the
        gated delta rule that are dealt with it.
        """
        latent = self.config.latent
        if latent is None:
            attention = (4 if self.config.value_norm else 3) * rows * self._head_width * self.element_bytes
            return max(attention, self._delta_of(rows))
        return rows * (3 * latent.query_dim + 3 * latent.cached_dim + 2 * latent.value_dim) * self.element_bytes

    @property
    def _head_width(self) -> int:
        """Return the most outputs, or inputs, of a projection of one KV head, or of a head of latent attention."""
        if (latent := self.config.latent) is not None:
            return max(latent.query_dim, latent.value_dim)
        return self._most(
            lambda config: (
                ((1 + config.gated_attention) * config.group_size + 2 * config.kv_heads_a_unit) * config.head_dim
            )
        )

    def _most(self, elements: Callable[[ModelConfig], int]) -> int:
        """Return the most of what layers have."""
        return max(elements(self.config.of_layer(i)) for i in range(self.config.num_layers))

    def _delta_of(self, rows: int) -> int:
        """Return the bytes of the gated delta rule for one KV head, if the model has it."""
        delta = self.config.delta
        if delta is None:
            return 0
        values = delta.group * delta.value_dim
        inputs = rows * (delta.channels + 2 * values) * self.element_bytes
        widened = rows * (3 * delta.channels + 4 * delta.group * delta.key_dim + 6 * values)
        states = 3 * SEQUENCES_AT_ONCE * delta.state_elements
        chunks = 6 * delta.group * DELTA_CHUNK * DELTA_CHUNK
        one_head = inputs + FLOAT_BYTES * (widened + states + chunks)
        return delta.most_heads(1, of=self.config.num_kv_heads) * one_head

    def _column_of(self, rows: int) -> int:
        """Return the bytes of one MLP column of a layer."""
        return 4 * rows * self.element_bytes


def _most_heads(shard: RankShard) -> int:
    """KV heads of the layer of which the rank has most."""
    return max((layer.kv_heads.size for layer in shard.layers), default=0)


def _most_columns(shard: RankShard) -> int:
    """MLP columns of the layer of which the rank has most."""
    return max((layer.mlp_columns.size for layer in shard.layers), default=0)
