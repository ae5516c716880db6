"""Experts that move from rank to rank: a rank reads what it is to hold, and then holds it.

While nothing is served, a rank reads between two steps. While requests run, it reads one expert of a layer at a time by
a thread of its own, for which memory is kept (`ModelMemory.arriving_expert`), and goes over between two steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import CommandRefused, MemoryBudgetError
from hetero_worker.layers.moe import Expert
from hetero_worker.memory.budget import mib
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import DTYPES, LoadedShard, kv_cost

_NICENESS: Final = 10
"""Of the thread that reads beside steps: it takes little from the threads that compute."""


@dataclass(frozen=True, slots=True)
class ReadExperts:
    """Weights that a rank needs to go over to another plan."""

    plan: ShardPlan
    layers: Mapping[int, Mapping[int, Expert]]
    """Layer → number → expert, of the layers whose experts on this rank change."""

    def hold_in(self, decoder: Decoder) -> None:
        """Compute with them from now on. Cannot fail."""
        for layer, mlp in decoder.expert_mlps.items():
            if layer in self.layers:
                mlp.hold(self.layers[layer])


class ReadingAhead:
    """Experts of a plan that are read while steps go on."""

    def __init__(self, plan: ShardPlan, decoder: Decoder, read: Callable[[], ReadExperts]) -> None:
        """Begin to read, by a thread that ends with it. `decoder`: whose experts these are to be."""
        self.plan = plan
        self._decoder = decoder
        thread = ThreadPoolExecutor(1, "reading-experts", initializer=_step_back)
        self._read = thread.submit(read)
        thread.shutdown(wait=False)

    @property
    def is_reading(self) -> bool:
        """True until all is read, or could not be."""
        return not self._read.done()

    def serves(self, plan: ShardPlan, decoder: Decoder) -> bool:
        """Return whether these are the plan's experts, for these weights."""
        return self._decoder is decoder and self.plan == plan

    def take(self) -> ReadExperts:
        """Return what was read. Raises CommandRefused while it is being read, and what reading raised."""
        if self.is_reading:
            raise CommandRefused("experts are still being read")
        return self._read.result()


def take_counts(decoder: Decoder) -> list[ranks_pb2.ExpertCounts]:
    """How many tokens chose each of this rank's experts since the last time, by layer.

    All tokens that were computed count, also those of the few steps that a rank makes for itself to prove its weights.
    """
    return [ranks_pb2.ExpertCounts(layer=layer, tokens=mlp.take_counts()) for layer, mlp in decoder.expert_mlps.items()]


def read_experts(shard: LoadedShard, request: LoadRequest, plan: ShardPlan, *, kv_bytes: int) -> ReadExperts:
    """Read the experts that `plan` gives this rank and the plan in force does not. `kv_bytes`: the cache's.

    Moving experts changes who computes them and nothing else, so logits stay the same up to the order of summation,
    and the KV cache stays valid. The number of experts that a rank holds of a layer does not change, and neither do
    its bytes. But the old experts are still there while the new ones are read. No step runs then, so the memory of
    the largest step is free for them. A caller that changes many layers moves them one at a time.

    Raises CommandRefused when the plan differs in more than expert_orders, MemoryBudgetError before anything is read,
    ModelError.
    """
    wanted = _wanted(shard, request, plan)
    if not wanted.new_bytes:
        return ReadExperts(plan, {})
    _check_room(shard, request, wanted.new_bytes, kv_bytes=kv_bytes)
    with shard.memory_pool.apart():
        return wanted.read(shard, request)


def read_ahead(shard: LoadedShard, request: LoadRequest, plan: ShardPlan) -> Callable[[], ReadExperts]:
    """Return a function that reads as `read_experts`, on another thread while steps go on.

    Raises CommandRefused if the plan differs in more than expert_orders, or has more than one new expert for this rank.
    """
    wanted = _wanted(shard, request, plan)
    if wanted.number > 1:
        raise CommandRefused(f"{wanted.number} experts cannot be read beside steps, for which one has room; move fewer")
    kernel = shard.kernel.beside_steps()
    # Not in memory apart: to begin such a piece, a device gives memory back, for which its steps would wait.
    return lambda: wanted.read(replace(shard, kernel=kernel), request)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Experts that a plan gives this rank, of the layers where they change."""

    plan: ShardPlan
    layers: Mapping[int, frozenset[int]]
    number: int
    """Number of those that it does not hold yet."""
    new_bytes: int

    def read(self, shard: LoadedShard, request: LoadRequest) -> ReadExperts:
        """Read those that the rank does not hold. Raises ModelError."""
        mlps, dtype = shard.decoder.expert_mlps, DTYPES[request.dtype]
        with request.open_weights(request.directory) as checkpoint:
            layers = {
                layer: mlps[layer].read(numbers, checkpoint, dtype=dtype, kernel=shard.kernel)
                for layer, numbers in self.layers.items()
            }
        return ReadExperts(self.plan, layers)


def _wanted(shard: LoadedShard, request: LoadRequest, plan: ShardPlan) -> _Wanted:
    """Raise CommandRefused when the plan differs in more than expert_orders."""
    _check(plan, request)
    mlps = shard.decoder.expert_mlps
    numbers = {layer: frozenset(plan.experts_of(request.rank, layer)) for layer in mlps}
    changed = {layer: own for layer, own in numbers.items() if own != frozenset(mlps[layer].numbers)}
    new = {layer: len(own.difference(mlps[layer].numbers)) for layer, own in changed.items()}
    dtype = DTYPES[request.dtype]
    new_bytes = sum(count * mlps[layer].expert_bytes(dtype, shard.kernel) for layer, count in new.items())
    return _Wanted(plan, changed if new_bytes else {}, sum(new.values()), new_bytes)


def _check(plan: ShardPlan, request: LoadRequest) -> None:
    if replace(plan, expert_orders=()) != replace(request.shard_plan, expert_orders=()):
        raise CommandRefused("place_experts.shard_plan differs from the plan in force in more than expert_orders")
    try:
        plan.validate_for(request.config)
    except PlanError as error:
        raise CommandRefused(f"place_experts.shard_plan: {error}") from error


def _check_room(shard: LoadedShard, request: LoadRequest, new_bytes: int, *, kv_bytes: int) -> None:
    cost, pool = kv_cost(request), shard.memory_pool
    scratch_bytes = kv_bytes * cost.scratch_bytes // cost.cache_bytes if cost.cache_bytes else 0
    given = int(request.memory_bytes * request.memory_utilization)
    runtime, kept = pool.runtime_bytes(), kv_bytes + scratch_bytes + shard.gather_bytes
    left = given - runtime - shard.weight_bytes - kept
    needed = f"{mib(new_bytes)} of experts have to be in memory beside those that they replace"
    if new_bytes > left:
        raise MemoryBudgetError(
            f"{needed}, and there are only {mib(given)} given - {mib(runtime)} runtime - {mib(shard.weight_bytes)} "
            f"weights - {mib(kept)} KV cache = {mib(left)}; {pool.remedy} or a smaller KV cache "
            "(kvCacheMemoryBytes)"
        )
    available = pool.available_bytes()
    if available is not None and new_bytes > available:
        raise MemoryBudgetError(f"{needed}, and the device has {mib(available)} available")


def _step_back() -> None:
    """Leave the cores to the threads that compute, as far as these want them."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
