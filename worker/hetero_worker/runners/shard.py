"""From a LoadRequest to a loaded decoder: check, choose the kernel, check the memory, read."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Final

import torch

from hetero_api.errors import ModelError, PlanError
from hetero_api.graph_memory import GraphMemory
from hetero_api.rank_memory import KvCost, ModelMemory, StepLimits
from hetero_api.sharding import deferral_problem
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.checkpoints.sampled_digests import differing_files, sampled_digests
from hetero_worker.errors import WeightsChangedError
from hetero_worker.host.process_memory import let_go_of_code
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.memory.budget import MemoryBudget, mib
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest, WorkProgress

logger = logging.getLogger(__name__)

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of arithmetic, and of cached keys and values, by name."""


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """One rank's weights, and the request that they came from."""

    request: LoadRequest
    decoder: Decoder
    kernel: LinearKernel
    weight_bytes: int
    kernels: tuple[str, ...]
    load_s: float
    gather_bytes: int
    """What attention gathers at most, for decode rows of a step."""
    memory_pool: MemoryPool
    """Of the memory that the weights are in."""
    weight_formats: tuple[str, ...] = ()
    """See `Loaded.weight_formats`."""
    weight_notes: tuple[str, ...] = ()

    def serves(self, request: LoadRequest) -> bool:
        """Whether these weights are what `request` asks for; bounds and memory do not matter to them.

        A shorter longest sequence does not either: the table of rotations is only longer than need be.
        """
        is_long_enough = request.max_model_len <= self.request.max_model_len
        return is_long_enough and _identity(self.request) == _identity(request)

    def _budget(self, request: LoadRequest, graph_bytes: int) -> MemoryBudget:
        budget = budget_of(request, self.weight_bytes, self.gather_bytes, self.memory_pool, graph_bytes=graph_bytes)
        return replace(budget, adapter_bytes=adapter_bytes(request, self.decoder))

    def report(
        self, request: LoadRequest, *, load_s: float, workspace: int | None = None, graph_sizes: tuple[int, ...] = ()
    ) -> ranks_pb2.Loaded:
        """With the workspace that was measured, or else computed, and what the device has available now.

        Raises MemoryBudgetError when the request's memory leaves nothing for the cache.
        """
        graphs = graph_memory(request, graph_sizes)
        budget = self._budget(request, graphs.total)
        if workspace is not None:
            beside = self.gather_bytes + memory_of(request).arriving_expert(request.shard_plan.ranks[request.rank])
            beside += stream_bytes(request)
            budget = replace(budget, workspace_bytes=workspace + beside)
        budget = replace(budget, available_bytes=self.memory_pool.available_bytes())
        logger.info("rank %d: memory for the KV cache: %s", request.rank, budget)
        return ranks_pb2.Loaded(
            weight_bytes=self.weight_bytes + request.draft.weight_bytes,
            kv_budget_bytes=_kv_budget_bytes(request, budget),
            kv_bytes_per_token=kv_cost(request).cache_bytes,
            load_s=load_s,
            kernels=self.kernels,
            weight_formats=self.weight_formats,
            weight_notes=self.weight_notes,
            graph_sizes=graph_sizes,
            graph_reserve_bytes=graphs.total,
            snapshot_bytes=budget.snapshot_bytes,
            snapshot_budget_bytes=budget.snapshot_budget_bytes,
        )


def load_shard(
    request: LoadRequest,
    backend: DeviceBackend,
    *,
    kernel: LinearKernel | None = None,
    progress: WorkProgress | None = None,
) -> LoadedShard:
    """Load the rank's shard. `kernel` None: the backend's. `progress` counts bytes of weights.

    Raises ModelError, PlanError, WeightsChangedError, MemoryBudgetError; the last before anything is read.
    """
    begin = time.perf_counter()
    pool = backend.memory_pool
    _check_dtype(request, backend)
    _check_plan(request)
    decoder = empty_decoder(request, backend)
    kernel = kernel or backend.linear(DTYPES[request.dtype], batch_invariant=request.batch_invariant)
    weight_bytes = decoder.weight_bytes(kernel)
    gather_bytes = decoder.attention.gather_bytes if _own_kv_cost(request).cache_bytes else 0
    graphs = graph_memory(request, backend.steps.graph_sizes(request))
    budget = budget_of(request, weight_bytes, gather_bytes, pool, graph_bytes=graphs.total)
    _kv_budget_bytes(request, replace(budget, adapter_bytes=adapter_bytes(request, decoder)))
    counted = (progress or WorkProgress()).of("reading weights", weight_bytes, "B")
    with pool.apart(), request.open_weights(request.directory) as checkpoint, counted as on_bytes:
        decoder.load(checkpoint, kernel, on_bytes)
        formats = checkpoint.conversions.lines
        notes = checkpoint.left_out()
    _check_files(request)
    pool.release_unused()  # what weights went through on their way
    let_go_of_code()  # loading ran more code than steps do
    load_s = time.perf_counter() - begin
    logger.info("rank %d: loaded %s of weights in %.1f s", request.rank, mib(weight_bytes), load_s)
    for note in notes:
        logger.info("rank %d: %s", request.rank, note)
    cached = () if request.cache_dtype == request.dtype else (f"cache={request.cache_dtype}",)
    kernels = (f"linear={kernel.name}", f"attention={decoder.attention.name}", f"fused={decoder.ops.name}", *cached)
    return LoadedShard(request, decoder, kernel, weight_bytes, kernels, load_s, gather_bytes, pool, formats, notes)


def empty_decoder(request: LoadRequest, backend: DeviceBackend) -> Decoder:
    """Return the rank's part of the model without weights: it can say what a cache looks like."""
    return Decoder(
        request.config,
        request.shard_plan,
        rank=request.rank,
        dtype=DTYPES[request.dtype],
        cache_dtype=DTYPES[request.cache_dtype],
        max_length=request.max_model_len,
        attention=backend.attention(request.config, batch_invariant=request.batch_invariant),
        device=backend.device,
        lends_at_once=backend.computes_beside_copies,
        ops=backend.fused_ops(batch_invariant=request.batch_invariant),
        expert_deferral=request.expert_deferral,
        borrows_vocabulary=request.borrows_vocabulary,
        adapts_experts=request.adapts_experts,
        expert_buffer_bytes=request.expert_buffer_bytes,
        streams=backend.streams() if request.expert_buffer_bytes else None,
        max_adapter_rank=request.max_adapter_rank,
    )


def limits_of(request: LoadRequest) -> StepLimits:
    """Return the size of the largest step."""
    return StepLimits(request.max_num_batched_tokens, request.max_num_seqs, request.max_model_len)


def memory_of(request: LoadRequest) -> ModelMemory:
    """Return the memory arithmetic of the model on this rank."""
    is_on_host = request.rank >= (request.num_gpu_ranks or 0)
    return ModelMemory(
        request.config,
        limits_of(request),
        DTYPES[request.dtype].itemsize,
        cache_element_bytes=DTYPES[request.cache_dtype].itemsize,
        threads=torch.get_num_threads() if is_on_host else 0,
    )


def kv_cost(request: LoadRequest) -> KvCost:
    """Return the cost of a token position on this rank, in the cache of a draft model too."""
    cost = _own_kv_cost(request)
    return replace(cost, cache_bytes=cost.cache_bytes + request.draft.kv_bytes_per_token)


def _own_kv_cost(request: LoadRequest) -> KvCost:
    return memory_of(request).kv_cost(request.shard_plan.ranks[request.rank])


def graph_memory(request: LoadRequest, sizes: tuple[int, ...]) -> GraphMemory:
    """Return the memory that is kept for graphs of steps of these sizes, ascending."""
    memory, shard = memory_of(request), request.shard_plan.ranks[request.rank]
    has_adapters = request.max_adapters > 0
    return GraphMemory.of(memory, shard, sizes, num_host_ranks=request.num_host_ranks, has_adapters=has_adapters)


def budget_of(
    request: LoadRequest, weight_bytes: int, gather_bytes: int, pool: MemoryPool, *, graph_bytes: int = 0
) -> MemoryBudget:
    """Return the budget with the workspace computed, not measured. `gather_bytes`: what attention gathers in a step."""
    memory, shard = memory_of(request), request.shard_plan.ranks[request.rank]
    return MemoryBudget(
        memory_bytes=int(request.memory_bytes * request.memory_utilization),
        weight_bytes=weight_bytes + request.draft.weight_bytes,
        workspace_bytes=memory.workspace_bytes(shard)
        + gather_bytes
        + memory.arriving_expert(shard)
        + stream_bytes(request),
        draft_bytes=request.draft.step_bytes,
        runtime_bytes=pool.runtime_bytes(),
        state_bytes=memory.state_bytes(shard),
        snapshot_bytes=memory.snapshot_bytes(shard),
        graph_bytes=graph_bytes,
        remedy=pool.remedy,
    )


def stream_bytes(request: LoadRequest) -> int:
    """Return the memory that is kept on this rank for experts that come to it, and for computing them."""
    streams = request.expert_buffer_bytes and request.shard_plan.ranks[request.rank].kv_heads_total
    return request.expert_buffer_bytes + memory_of(request).expert_step if streams else 0


def adapter_bytes(request: LoadRequest, decoder: Decoder) -> int:
    """Return the memory that is kept for adapters on this rank."""
    return request.max_adapters * decoder.adapter_bytes(request.max_adapter_rank)


def _kv_budget_bytes(request: LoadRequest, budget: MemoryBudget) -> int:
    """0 for a rank that owns nothing, however little memory it has. Raises MemoryBudgetError."""
    if not kv_cost(request).cache_bytes and request.shard_plan.ranks[request.rank].is_empty:
        return 0
    return budget.kv_budget_bytes(kv_cost(request))


def _check_dtype(request: LoadRequest, backend: DeviceBackend) -> None:
    supported = [name for name in DTYPES if name in backend.dtypes]
    if request.dtype not in supported:
        raise ModelError(
            f"dtype {request.dtype!r} is not supported on {backend.name}; supported there: {', '.join(supported)}"
        )
    cached = [name for name in DTYPES if name in backend.cache_dtypes(request.dtype)]
    if request.cache_dtype not in cached:
        raise ModelError(
            f"spec.engine.kvCacheDtype: {request.cache_dtype} is not supported on {backend.name}, which computes in "
            f"{request.dtype}; supported there: {', '.join(cached)}"
        )


def _check_plan(request: LoadRequest) -> None:
    config = request.config
    if not 0 <= request.rank < request.shard_plan.world_size:
        raise PlanError(f"rank {request.rank} is not in a plan for {request.shard_plan.world_size} ranks")
    request.shard_plan.validate_for(config)
    if request.expert_deferral and (problem := deferral_problem(config, request.expert_deferral)):
        raise ModelError(problem)
    if request.max_model_len > config.max_position:
        raise ModelError(
            f"max_model_len {request.max_model_len} exceeds the model's {config.max_position} positions; lower it"
        )


def _check_files(request: LoadRequest) -> None:
    """Raise WeightsChangedError unless the files are those that this rank said it has."""
    if request.files and (changed := differing_files(request.files, sampled_digests(request.directory))):
        raise WeightsChangedError(
            f"{request.directory}: {', '.join(changed[:3])} changed since this rank joined the group; put the files "
            "back that the group was started with, or restart the whole group with the new ones"
        )


def _identity(request: LoadRequest) -> tuple[object, ...]:
    modes = request.batch_invariant, request.expert_deferral, request.borrows_vocabulary
    shares = request.expert_buffer_bytes > 0
    return (request.directory, request.config, request.dtype, request.shard_plan, request.rank, modes, shares)
