"""From a LoadRequest to a loaded decoder: check, choose the kernel, check the memory, read."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from hetero_api.errors import ModelError, PlanError
from hetero_worker.attention.base import AttentionBackend
from hetero_worker.attention.selection import choose_attention
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, fused_ops_of
from hetero_worker.layers.kernel_choice import choose_kernel
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel, available_kernels
from hetero_worker.memory.accounts import MemoryAccount
from hetero_worker.memory.budget import KvCost, MemoryBudget, StepLimits, mib, workspace_bytes
from hetero_worker.models.decoder import Decoder
from hetero_worker.platforms.base import Platform
from hetero_worker.runners.base import LoadReport, LoadRequest
from hetero_worker.runners.runner_device import RunnerDevice

logger = logging.getLogger(__name__)

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    account: MemoryAccount
    """Of the memory that the weights are in."""

    def serves(self, request: LoadRequest) -> bool:
        """Whether these weights are what `request` asks for; bounds and memory do not matter to them.

        A shorter longest sequence does not either: the table of rotations is only longer than need be.
        """
        is_long_enough = request.max_model_len <= self.request.max_model_len
        return is_long_enough and _identity(self.request) == _identity(request)

    def report(self, request: LoadRequest, *, load_s: float, workspace: int | None = None) -> LoadReport:
        """With the workspace that was measured, or else computed, and what the device has available now.

        Raises MemoryBudgetError when the request's memory leaves nothing for the cache.
        """
        cost = kv_cost(request)
        budget = _budget(request, self.weight_bytes, self.gather_bytes, self.account)
        if workspace is not None:
            budget = replace(budget, workspace_bytes=workspace + self.gather_bytes)
        budget = replace(budget, available_bytes=self.account.available_bytes())
        logger.info("rank %d: memory for the KV cache: %s", request.rank, budget)
        return LoadReport(
            weight_bytes=self.weight_bytes,
            kv_budget_bytes=budget.kv_budget_bytes(cost),
            kv_bytes_per_token=cost.cache_bytes,
            load_s=load_s,
            kernels=self.kernels,
        )


class ChooseKernel(Protocol):
    """`kernel_choice.choose_kernel`, or one that remembers its answers."""

    def __call__(
        self, candidates: Sequence[LinearKernel], shapes: Sequence[tuple[int, int]], *, dtype: torch.dtype
    ) -> LinearKernel: ...


def load_shard(request: LoadRequest, device: RunnerDevice, *, choose: ChooseKernel = choose_kernel) -> LoadedShard:
    """Raises ModelError, PlanError, MemoryBudgetError; the last before anything is read."""
    begin = time.perf_counter()
    platform, account = device.platform, device.account
    dtype = _dtype(request, platform)
    _check_plan(request)
    attention = choose_attention(platform, dtype, request.config, wanted=request.attention)
    ops = fused_ops_of(platform.device) if request.fused else PLAIN_OPS
    decoder = _empty_decoder(request, platform, attention.backend, ops)
    kernel = choose(_kernels_of(platform, dtype), sorted(decoder.linear_shapes), dtype=dtype)
    weight_bytes = decoder.weight_bytes(kernel)
    cost = kv_cost(request)
    gather_bytes = attention.backend.gather_bytes if cost.cache_bytes else 0
    _budget(request, weight_bytes, gather_bytes, account).kv_budget_bytes(cost)
    with account.apart(), request.open_weights(request.directory) as checkpoint:
        decoder.load(checkpoint, kernel)
    load_s = time.perf_counter() - begin
    logger.info("rank %d: loaded %s of weights in %.1f s", request.rank, mib(weight_bytes), load_s)
    kernels = (f"linear={kernel.name}", f"attention={attention}", f"fused={ops.name}")
    return LoadedShard(request, decoder, kernel, weight_bytes, kernels, load_s, gather_bytes, account)


def empty_decoder(request: LoadRequest, platform: Platform) -> Decoder:
    """The rank's part of the model without weights: it can say what a cache looks like."""
    attention = choose_attention(platform, DTYPES[request.dtype], request.config, wanted=request.attention)
    return _empty_decoder(request, platform, attention.backend)


def _kernels_of(platform: Platform, dtype: torch.dtype) -> tuple[LinearKernel, ...]:
    return available_kernels(dtype) if platform.packs_weights else (PlainKernel(),)


def _empty_decoder(
    request: LoadRequest, platform: Platform, attention: AttentionBackend, ops: FusedOps = PLAIN_OPS
) -> Decoder:
    return Decoder(
        request.config,
        request.shard_plan,
        rank=request.rank,
        dtype=DTYPES[request.dtype],
        max_length=request.max_model_len,
        attention=attention,
        device=platform.device,
        ops=ops,
    )


def kv_cost(request: LoadRequest) -> KvCost:
    shard = request.shard_plan.ranks[request.rank]
    return KvCost.of(request.config, shard, element_bytes=DTYPES[request.dtype].itemsize)


def _budget(request: LoadRequest, weight_bytes: int, gather_bytes: int, account: MemoryAccount) -> MemoryBudget:
    limits = StepLimits(request.max_num_batched_tokens, request.max_num_seqs, request.max_model_len)
    shard = request.shard_plan.ranks[request.rank]
    step_bytes = workspace_bytes(request.config, shard, limits, element_bytes=DTYPES[request.dtype].itemsize)
    return MemoryBudget(
        memory_bytes=int(request.memory_bytes * request.memory_utilization),
        weight_bytes=weight_bytes,
        workspace_bytes=step_bytes + gather_bytes,
        runtime_bytes=account.runtime_bytes(),
        remedy=account.remedy,
    )


def _dtype(request: LoadRequest, platform: Platform) -> torch.dtype:
    supported = [name for name in DTYPES if name in platform.dtypes]
    if request.dtype not in supported:
        raise ModelError(
            f"dtype {request.dtype!r} is not supported on {platform.name}; supported there: {', '.join(supported)}"
        )
    return DTYPES[request.dtype]


def _check_plan(request: LoadRequest) -> None:
    config = request.config
    if not 0 <= request.rank < request.shard_plan.world_size:
        raise PlanError(f"rank {request.rank} is not in a plan for {request.shard_plan.world_size} ranks")
    request.shard_plan.validate_for(config)
    if request.max_model_len > config.max_position:
        raise ModelError(
            f"max_model_len {request.max_model_len} exceeds the model's {config.max_position} positions; lower it"
        )


def _identity(request: LoadRequest) -> tuple[object, ...]:
    return (
        request.directory,
        request.config,
        request.dtype,
        request.shard_plan,
        request.rank,
        request.attention,
        request.fused,
    )
