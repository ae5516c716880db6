"""DraftModel: a smaller model of the same tokenizer, which proposes tokens to the group's own.

Ranks hold it beside their shards, by a plan of its own. If rank 0 has all of it, no other rank takes part; else all do,
and meet as they do for the group's own model. After the draws of a step it computes the tokens that it has not read,
and then draws one token after another, each by the key and the edits that the group's draw in that place will have. So
draws with noise agree as often as the two models do. A wrong proposal costs time and changes no token.

Its keys and values lie in tensors of their own, by the slots' blocks. What a block holds is known by its tokens
(`DraftedBlocks`): the blocks of a prefix hit are not read again, and a block may be given to another sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.distributed.exchange import Exchange, LocalExchange
from hetero_worker.layers.sampler import SampleTokens, sample_tokens
from hetero_worker.runners.base import DraftNeeds, LoadRequest
from hetero_worker.runners.forward import ForwardStates
from hetero_worker.runners.model_state import ModelState, ServingCache, make_cache
from hetero_worker.runners.shard import LoadedShard, budget_of, graph_memory, kv_cost, load_shard
from hetero_worker.runners.slots import Int32Array, SlotTable

FEW: Final = 2
"""Tokens before the newest that are computed by decode steps, which are recorded; more are read like a prompt."""


_LARGE: Final = 1e30
"""What is drawn from in place of an infinite logit: it stays finite at any temperature."""


class DraftModel:
    """One rank's part of the draft model."""

    _skipped = 0
    """First tokens of a sequence that it does not read."""

    def __init__(
        self,
        backend: DeviceBackend,
        directory: Path,
        open_weights: Callable[[Path], Checkpoint] = Checkpoint,
        *,
        config: ModelConfig | None = None,
        sample: SampleTokens = sample_tokens,
    ) -> None:
        """Create it without weights. `config` None: the directory's.

        Raises ModelError if the directory holds no model that can draft.
        """
        self._sample = sample
        self._backend = backend
        self._directory = directory
        self._open_weights = open_weights
        self._config = config or ModelConfig.from_directory(directory)
        if self._config.delta is not None:
            raise ModelError(
                f"{directory}: layers of this draft model keep states of sequences, which cannot go back behind a "
                "token that was wrong; take another for spec.engine.speculative.draft"
            )
        self._exchange: Exchange = LocalExchange()
        self._sampler = backend.sampler()
        self._shard: LoadedShard | None = None
        self._cache: ServingCache | None = None
        self._blocks = DraftedBlocks(1, 1)

    @property
    def name(self) -> str:
        """Architecture and size of the model, for a person."""
        return f"{self._config.architecture} of {self._config.num_parameters / 1e6:,.0f} million parameters"

    # --- weights and cache ------------------------------------------------------------------------------

    def load(self, request: LoadRequest) -> LoadRequest:
        """Load the rank's part; return the order of the rank's shard with what that leaves of its memory.

        Raises as `load_shard` does.
        """
        own = self._request_like(request)
        if self._shard is None or not self._shard.serves(own):
            self.drop()
            self._shard = load_shard(own, self._backend)
        shard = self._shard
        graphs = graph_memory(own, self._backend.steps.graph_sizes(own)).total
        budget = budget_of(own, shard.weight_bytes, shard.gather_bytes, shard.memory_pool, graph_bytes=graphs)
        needs = DraftNeeds(
            weight_bytes=shard.weight_bytes,
            step_bytes=budget.workspace_bytes + budget.graph_bytes,
            kv_bytes_per_token=kv_cost(own).cache_bytes,
        )
        return replace(request, draft=needs)

    def drop(self) -> None:
        """Drop weights and cache."""
        self._cache = self._shard = None

    def release(self, state: ModelState) -> None:
        """Let go of the rank's own weights, which leave; drop this model's, too, if all go to sleep."""
        if state.sleeping is not None:
            self.drop()

    def drop_cache(self) -> None:
        """Drop the cache, with everything that is kept from step to step."""
        self._cache = None
        if self._shard is not None:
            self._shard.decoder.release_buffers()

    def follow(self, state: ModelState, exchange: Exchange) -> None:
        """Go where the rank's own weights and cache went: to sleep, or to a cache of another size.

        `exchange` is the group's. Weights that slept are read again. Raises as `load_shard` and `make_cache` do.
        """
        if state.sleeping is not None:
            self.drop()
        elif state.cache is None:
            self.drop_cache()
        elif self._cache is None:
            self._allocate(state.cache.order, state)
            self._exchange = exchange if self._loaded.request.shard_plan.world_size > 1 else LocalExchange()

    def _allocate(self, order: ranks_pb2.AllocateCache, state: ModelState) -> None:
        own = self._request_like(state.ordered("a draft model's cache")[0])
        shard = self._shard = self._shard or load_shard(own, self._backend)
        report = shard.report(own, load_s=0.0)
        self._cache = make_cache(
            ranks_pb2.AllocateCache(num_blocks=order.num_blocks, block_size=order.block_size),
            self._backend,
            decoder=shard.decoder,
            request=own,
            report=report,
        )
        self._blocks = DraftedBlocks(order.num_blocks, order.block_size)

    def _request_like(self, request: LoadRequest) -> LoadRequest:
        """Return the order of this model, for steps as large as the group's."""
        plan = request.draft_plan
        if plan is None or plan.owners == (0,):
            plan = ShardPlan.whole(self._config)
        return LoadRequest(
            directory=self._directory,
            config=self._config,
            dtype=request.dtype,
            shard_plan=plan,
            rank=request.rank if plan.world_size > 1 else 0,
            max_model_len=request.max_model_len,
            max_num_batched_tokens=request.max_num_batched_tokens,
            max_num_seqs=request.max_num_seqs,
            memory_bytes=request.memory_bytes,
            memory_utilization=request.memory_utilization,
            cache_size_is_given=True,
            enforce_eager=request.enforce_eager,
            open_weights=self._open_weights,
            kv_cache_dtype=request.kv_cache_dtype,
            async_steps=False,
            num_gpu_ranks=request.num_gpu_ranks,
            gpus_have_kernels=request.gpus_have_kernels,
        )

    # --- proposals --------------------------------------------------------------------------------------

    def propose(self, known: SlotTable, slots: Sequence[int], count: int) -> list[ranks_pb2.Proposal]:
        """Return at most `count` tokens to follow the known ones of each slot, as far as its blocks go.

        A slot whose tokens are too many for one step gets none until all are read.
        """
        cache = self._ready_cache
        with torch.inference_mode():
            begins = {slot: self._num_read(known, slot) for slot in slots if self._knows_tokens(known, slot)}
            ready = self._catch_up(cache, known, begins)
            drafts = self._draft(cache, known, ready, count)
        for slot, begin in begins.items():
            end = int(cache.slots.counts.num_computed[slot])
            self._blocks.write(slot, cache.slots.token_ids[slot, :end], known.block_tables[slot], begin)
        return [ranks_pb2.Proposal(slot=slot, token_ids=tokens) for slot, tokens in drafts.items() if tokens]

    def _tokens(self, known: SlotTable, slot: int) -> Int32Array:
        """Return the slot's tokens that this model reads: int32 [tokens], a view."""
        return known.token_ids[slot, self._skipped : int(known.counts.num_tokens[slot])]

    def _knows_tokens(self, known: SlotTable, slot: int) -> bool:
        """Return whether the slot's tokens are of this model's vocabulary, which may have fewer unused ids."""
        return int(self._tokens(known, slot).max()) < self._config.vocab_size

    def _num_read(self, known: SlotTable, slot: int) -> int:
        """Return how many tokens before the newest one need not be computed."""
        older = self._tokens(known, slot)[:-1]
        return self._blocks.num_held(slot, older, known.block_tables[slot], owner=known.sampling(slot))

    def _catch_up(self, cache: ServingCache, known: SlotTable, begins: dict[int, int]) -> list[int]:
        """Compute tokens before the newest; return the slots in which none is left."""
        own, totals = cache.slots, {slot: int(known.counts.num_tokens[slot]) for slot in begins}
        room, reading = self._loaded.request.max_num_batched_tokens, ranks_pb2.StepPlan()
        for slot, begin in begins.items():
            own.mirror(known, slot, num_tokens=totals[slot], num_computed=begin)
            number = min(totals[slot] - 1 - begin, room)
            if totals[slot] - 1 - begin > FEW and number:
                reading.spans.add(slot=slot, num_tokens=number)
                room -= number
        if reading.spans:
            self._compute(cache, reading)
            for span in reading.spans:
                own.counts.num_computed[span.slot] += span.num_tokens
        behind = {slot: total - 1 - int(own.counts.num_computed[slot]) for slot, total in totals.items()}
        for left in range(FEW, 0, -1):
            late = [slot for slot, number in behind.items() if left <= number <= FEW]
            for slot in late:
                computed = int(own.counts.num_computed[slot])
                own.mirror(known, slot, num_tokens=computed + 1, num_computed=computed)
            self._decode(cache, late)
        return [slot for slot, number in behind.items() if number <= FEW]

    def _draft(self, cache: ServingCache, known: SlotTable, slots: Sequence[int], count: int) -> dict[int, list[int]]:
        own, size, max_length = cache.slots, cache.order.block_size, cache.slots.token_ids.shape[1] - 1
        head_ranges = [rank.head_rows for rank in self._loaded.request.shard_plan.ranks]
        rooms: dict[int, int] = {}
        for slot in slots:
            total = len(self._tokens(known, slot))
            own.mirror(known, slot, num_tokens=total, num_computed=total - 1, skipped=self._skipped)
            rooms[slot] = min(count, int(known.counts.num_blocks[slot]) * size - total + 1, max_length - total + 1)
        drafts: dict[int, list[int]] = {slot: [] for slot in slots}
        for number in range(count):
            drawing = [slot for slot in slots if rooms[slot] > number]
            if not drawing:
                break
            logits = self._decode(cache, drawing) if number else self._begin(cache, known, drawing)
            # A draft that fails costs no answer: what it draws then is wrong, and that is all.
            logits.nan_to_num_(nan=0.0, posinf=_LARGE, neginf=-_LARGE)
            rows = [known.sampling(slot).draw(ahead=drafts[slot])._replace(num_logprobs=None) for slot in drawing]
            sampled = self._sample(
                logits, rows, head_ranges=head_ranges, exchange=self._exchange, sampler=self._sampler, started=None
            )
            own.append_tokens(np.array(drawing, dtype=np.int64), sampled.tokens)
            for slot, token in zip(drawing, sampled.tokens, strict=True):
                drafts[slot].append(token)
        return drafts

    def _begin(self, cache: ServingCache, known: SlotTable, slots: Sequence[int]) -> torch.Tensor:  # noqa: ARG002
        """Compute the newest known token of each slot; return logits as `_decode` does."""
        return self._decode(cache, slots)

    def _decode(self, cache: ServingCache, slots: Sequence[int]) -> torch.Tensor:
        """Compute the newest token of each slot; return logits, float32 [slots, vocabulary], valid until the next."""
        if not slots:
            return torch.empty(0)
        logits = self._compute(cache, ranks_pb2.StepPlan(decode_slots=slots))
        cache.inputs.advance_decoding(len(slots), cache.slots)
        return logits

    def _compute(self, cache: ServingCache, plan: ranks_pb2.StepPlan) -> torch.Tensor:
        states = self._run(cache, plan)
        return states.logits_of(self._loaded.decoder, len(plan.decode_slots)) if plan.decode_slots else torch.empty(0)

    def _run(self, cache: ServingCache, plan: ranks_pb2.StepPlan) -> ForwardStates:
        batch = cache.inputs.fill(plan, cache.slots)
        return cache.forward.run(self._loaded.decoder, batch, caches=cache.layers, exchange=self._exchange)

    @property
    def _ready_cache(self) -> ServingCache:
        assert self._cache is not None, "a cache comes before plans"
        return self._cache

    @property
    def _loaded(self) -> LoadedShard:
        assert self._shard is not None, "weights come before a cache"
        return self._shard


@dataclass(slots=True)
class _Walk:
    """Leading blocks of a sequence that were found to hold its tokens. `prefix` is the hash of these tokens."""

    owner: object
    blocks: int = 0
    prefix: int = 0


class DraftedBlocks:
    """Tokens whose keys and values each block of the draft model's cache holds, and a hash of all tokens before."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens: Int32Array = np.zeros((num_blocks, block_size), dtype=np.int32)
        self._counts = np.zeros(num_blocks, dtype=np.int64)
        self._prefixes = np.zeros(num_blocks, dtype=np.int64)
        self._walks: dict[int, _Walk] = {}

    def num_held(self, slot: int, tokens: Int32Array, table: Int32Array, *, owner: object) -> int:
        """Return how many leading `tokens` the blocks of the table hold. `owner`: of the slot, as long as it is bound.

        Blocks of a bound slot hold what was found once: nobody else writes to them.
        """
        walk, size = self._walks.get(slot), self._block_size
        if walk is None or walk.owner is not owner:
            walk = self._walks[slot] = _Walk(owner)
        while True:
            begin = walk.blocks * size
            wanted = tokens[begin : begin + size]
            if not len(wanted) or self._prefixes[block := table[walk.blocks]] != walk.prefix:
                return begin
            count = min(len(wanted), int(self._counts[block]))
            differs = np.flatnonzero(self._tokens[block, :count] != wanted[:count])
            right = int(differs[0]) if len(differs) else count
            if right < size:
                return begin + right
            walk.blocks, walk.prefix = walk.blocks + 1, _hash_behind(walk.prefix, wanted)

    def write(self, slot: int, tokens: Int32Array, table: Int32Array, begin: int) -> None:
        """Take note that `tokens` are held from index `begin` on, which `num_held` returned for the slot."""
        walk, size, end = self._walks[slot], self._block_size, len(tokens)
        prefix = walk.prefix
        for index in range(walk.blocks, -(-end // size)):
            first, block = index * size, table[index]
            low, high = max(begin - first, 0), min(end - first, size)
            if low < high:
                self._tokens[block, low:high] = tokens[first + low : first + high]
                self._counts[block], self._prefixes[block] = high, prefix
            prefix = _hash_behind(prefix, tokens[first : first + size])


def _hash_behind(prefix: int, tokens: Int32Array) -> int:
    return hash((prefix, tokens.tobytes()))
