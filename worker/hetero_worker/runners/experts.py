"""Other experts on a rank than it loaded: counted, read beside the old ones, and taken.

Moving experts changes who computes them and nothing else: the weights are the model's, so logits stay what they were up
to the order of summation, and what the KV cache holds stays right. The number of experts that a rank holds of a layer
does not change, and neither do its bytes; but while the new ones are read the old ones are there too. No step runs
then, so what the largest step would take is free for them. Whoever changes many layers does it one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import CommandRefused, MemoryBudgetError
from hetero_worker.layers.moe import Expert
from hetero_worker.memory.budget import mib
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import DTYPES, LoadedShard, kv_cost


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


def take_counts(decoder: Decoder) -> list[ranks_pb2.ExpertCounts]:
    """How many tokens chose each of this rank's experts since the last time, by layer.

    All tokens that were computed count, also those of the few steps that a rank makes for itself to prove its weights.
    """
    return [ranks_pb2.ExpertCounts(layer=layer, tokens=mlp.take_counts()) for layer, mlp in decoder.expert_mlps.items()]


def read_experts(shard: LoadedShard, request: LoadRequest, plan: ShardPlan, *, kv_bytes: int) -> ReadExperts:
    """Read the experts that `plan` gives this rank and the plan in force does not. `kv_bytes`: the cache's.

    Raises CommandRefused when the plan differs in more than expert_orders, MemoryBudgetError before anything is read,
    ModelError.
    """
    _check(plan, request)
    mlps = shard.decoder.expert_mlps
    wanted = {layer: frozenset(plan.experts_of(request.rank, layer)) for layer in mlps}
    changed = {layer: numbers for layer, numbers in wanted.items() if numbers != frozenset(mlps[layer].numbers)}
    dtype = DTYPES[request.dtype]
    new_bytes = sum(
        len(numbers.difference(mlps[layer].numbers)) * mlps[layer].expert_bytes(dtype, shard.kernel)
        for layer, numbers in changed.items()
    )
    if not new_bytes:
        return ReadExperts(plan, {})
    _check_room(shard, request, new_bytes, kv_bytes=kv_bytes)
    with shard.memory_pool.apart(), request.open_weights(request.directory) as checkpoint:
        layers = {
            layer: mlps[layer].read(numbers, checkpoint, dtype=dtype, kernel=shard.kernel)
            for layer, numbers in changed.items()
        }
    return ReadExperts(plan, layers)


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
