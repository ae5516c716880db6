"""The runner of a rank on host cores.

Everything runs on the calling thread and torch's intra-op threads; the cores are bound before torch starts, by
the rank. Weights are kept over epochs. A step that failed half-way leaves the slots undefined; the epoch ends
with it, and `attach` begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_api.sharding import UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.errors import MemoryBudgetError, ProtocolError
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.memory.budget import mib
from hetero_worker.runners.base import LoadReport, LoadRequest, SampledToken
from hetero_worker.runners.input_batch import InputBatch, InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, check_plan
from hetero_worker.runners.shard import LoadedShard, load_shard
from hetero_worker.runners.slots import SlotTable
from hetero_worker.sampling.request import SamplingRow

logger = logging.getLogger(__name__)


class SampleTokens(Protocol):
    """Draws tokens from sharded logits; layers.sampler.sample_tokens says how."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        vocab_ranges: Sequence[UnitRange],
        exchange: HostExchange,
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Cache:
    """What `allocate` makes: layer caches, slots and buffers live and go together."""

    layers: tuple[LayerCache | None, ...]
    slots: SlotTable
    buffers: InputBuffers
    bounds: PlanBounds


class CpuRunner:
    """Implements runners.base.Runner."""

    def __init__(self, *, sample: SampleTokens = sample_tokens) -> None:
        self._sample = sample
        self._exchange: HostExchange | None = None
        self._request: LoadRequest | None = None
        self._shard: LoadedShard | None = None
        self._report: LoadReport | None = None
        self._cache: _Cache | None = None
        self._last_step_id = 0

    def attach(self, exchange: HostExchange) -> None:
        self._exchange = exchange
        self._cache = None
        self._last_step_id = 0

    def load(self, request: LoadRequest) -> LoadReport:
        self._cache = self._report = self._request = None
        load_s = 0.0
        if self._shard is None or not self._shard.serves(request):
            self._shard = None  # the old weights go before the new ones come
            self._shard = load_shard(request)
            load_s = self._shard.load_s
        self._report = self._shard.report(request, load_s=load_s)
        self._request = request
        return self._report

    def allocate(self, num_blocks: int, block_size: int) -> int:
        shard, request, report = self._shard, self._request, self._report
        if shard is None or request is None or report is None:
            raise ProtocolError("AllocateCache came before LoadModel")
        if num_blocks < 2 or block_size < 1:
            raise ProtocolError(
                f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing beside the null block"
            )
        self._cache = None
        _check_budget(report, num_blocks * block_size)
        layers = tuple(shard.decoder.allocate_caches(num_blocks=num_blocks, block_size=block_size))
        self._cache = _Cache(
            layers=layers,
            slots=SlotTable(max_num_seqs=request.max_num_seqs, max_blocks=-(-request.max_model_len // block_size)),
            buffers=InputBuffers(
                max_num_batched_tokens=request.max_num_batched_tokens, max_num_seqs=request.max_num_seqs
            ),
            bounds=PlanBounds(
                max_num_batched_tokens=request.max_num_batched_tokens,
                max_model_len=request.max_model_len,
                vocab_size=request.config.vocab_size,
                num_blocks=num_blocks,
                block_size=block_size,
            ),
        )
        return sum(layer.num_bytes for layer in layers if layer is not None)

    def execute(self, plan: ranks_pb2.StepPlan) -> list[SampledToken]:
        cache = self._cache
        if cache is None:
            raise ProtocolError(f"step plan {plan.step_id} came before AllocateCache")
        check_plan(plan, cache.slots, cache.bounds, last_step_id=self._last_step_id)
        self._last_step_id = plan.step_id
        _apply_deltas(plan, cache.slots)
        if not plan.scheduled:
            return []
        batch = cache.buffers.fill(plan, cache.slots, block_size=cache.bounds.block_size)
        tokens = self._compute(batch, cache)
        for scheduled in plan.scheduled:
            cache.slots.bound(scheduled.slot).num_computed += scheduled.num_tokens
        for slot, token in zip(batch.draw_slots, tokens, strict=True):
            cache.slots.bound(slot).token_ids.append(token)
        return [SampledToken(slot, token) for slot, token in zip(batch.draw_slots, tokens, strict=True)]

    def _compute(self, batch: InputBatch, cache: _Cache) -> list[int]:
        """One forward pass and the draws."""
        shard, request, exchange = self._shard, self._request, self._exchange
        if shard is None or request is None or exchange is None:
            raise ProtocolError("a step plan came before the group was formed")
        with torch.inference_mode():
            logits = shard.decoder.forward(batch.decoder_input, caches=cache.layers, exchange=exchange)
            if not batch.draws:
                return []
            return self._sample(
                logits,
                batch.draws,
                vocab_ranges=[rank.vocab_rows for rank in request.shard_plan.ranks],
                exchange=exchange,
            )


def _check_budget(report: LoadReport, positions: int) -> None:
    kv_bytes = positions * report.kv_bytes_per_token
    if kv_bytes > report.kv_budget_bytes:
        raise MemoryBudgetError(
            f"{positions} KV positions of {report.kv_bytes_per_token} bytes are {mib(kv_bytes)}, the rank has "
            f"{mib(report.kv_budget_bytes)} for them; ask for fewer blocks (kvCacheMemoryBytes)"
        )


def _apply_deltas(plan: ranks_pb2.StepPlan, slots: SlotTable) -> None:
    for slot in plan.released_slots:
        slots.release(slot)
    for sequence in plan.new_sequences:
        slots.bind(sequence)
    for scheduled in plan.scheduled:
        slots.append_blocks(scheduled.slot, scheduled.new_block_ids)
