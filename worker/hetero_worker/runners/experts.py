"""Experts that move from rank to rank: a rank reads what it is to hold, beside steps, and then holds it.

It reads one expert at a time, by a thread of its own, for which memory is kept (`ModelMemory.arriving_expert`), and
goes over between two steps. Who computes an expert changes then and nothing else: logits stay the same up to the order
of summation, and the KV cache stays valid. A rank holds as many experts of a layer as before, and as many bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import CommandRefused
from hetero_worker.layers.moe import Expert
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import DTYPES, LoadedShard

_NICENESS: Final = 10
"""Of the thread that reads beside steps: it takes little from the threads that compute."""


class ReadingAhead:
    """Experts of a plan that are read while steps go on."""

    def __init__(self, shard: LoadedShard, request: LoadRequest, plan: ShardPlan) -> None:
        """Begin to read, by a thread that ends with it, the expert that `plan` gives this rank beside those it has.

        Raises CommandRefused if the plan differs in more than expert_orders, or has more than one new expert.
        """
        _check(plan, request)
        mlps = shard.decoder.expert_mlps
        numbers = {layer: frozenset(plan.experts_of(request.rank, layer)) for layer in mlps}
        changed = {layer: own for layer, own in numbers.items() if own != frozenset(mlps[layer].numbers)}
        new = [layer for layer, own in changed.items() for _ in own.difference(mlps[layer].numbers)]
        if len(new) > 1:
            raise CommandRefused(f"{len(new)} experts cannot be read beside steps, for which one has room; move fewer")
        self.plan = plan
        self.read_bytes = sum(mlps[layer].expert_bytes(DTYPES[request.dtype], shard.kernel) for layer in new)
        self._decoder = shard.decoder
        # Not in memory apart: to begin such a piece, a device gives memory back, for which its steps would wait.
        beside = replace(shard, kernel=shard.kernel.beside_steps())
        thread = ThreadPoolExecutor(1, "reading-experts", initializer=_step_back)
        self._read = thread.submit(_read, beside, request, changed)
        thread.shutdown(wait=False)

    @property
    def is_reading(self) -> bool:
        """True until all is read, or could not be."""
        return not self._read.done()

    def serves(self, plan: ShardPlan, decoder: Decoder) -> bool:
        """Return whether these are the plan's experts, for these weights."""
        return self._decoder is decoder and self.plan == plan

    def require(self) -> None:
        """Raise CommandRefused while it is being read, and what reading raised."""
        if self.is_reading:
            raise CommandRefused("experts are still being read")
        self._read.result()

    def hold(self) -> None:
        """Compute with them from now on. Cannot fail once `require` has returned."""
        for layer, experts in self._read.result().items():
            self._decoder.expert_mlps[layer].hold(experts)


def take_counts(decoder: Decoder) -> list[ranks_pb2.ExpertCounts]:
    """How many tokens chose each of this rank's experts since the last time, by layer.

    All tokens that were computed count, also those of the few steps that a rank makes for itself to prove its weights.
    """
    return [ranks_pb2.ExpertCounts(layer=layer, tokens=mlp.take_counts()) for layer, mlp in decoder.expert_mlps.items()]


def _read(
    shard: LoadedShard, request: LoadRequest, layers: Mapping[int, Collection[int]]
) -> dict[int, Mapping[int, Expert]]:
    """Return each layer's experts, those that the rank holds and those read. Raises ModelError."""
    if not layers:
        return {}
    mlps, dtype = shard.decoder.expert_mlps, DTYPES[request.dtype]
    with request.open_weights(request.directory) as checkpoint:
        return {
            layer: mlps[layer].read(numbers, checkpoint, dtype=dtype, kernel=shard.kernel)
            for layer, numbers in layers.items()
        }


def _check(plan: ShardPlan, request: LoadRequest) -> None:
    if replace(plan, expert_orders=()) != replace(request.shard_plan, expert_orders=()):
        raise CommandRefused("place_experts.shard_plan differs from the plan in force in more than expert_orders")
    try:
        plan.validate_for(request.config)
    except PlanError as error:
        raise CommandRefused(f"place_experts.shard_plan: {error}") from error


def _step_back() -> None:
    """Leave the cores to the threads that compute, as far as these want them."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
