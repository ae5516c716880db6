"""ModelState: the weights and the cache that a rank holds between steps, and whether they are asleep.

Weights outlive epochs; a cache and sleep do not: a new epoch is awake. One object, changed only between steps, so that
a command is prepared beside it and then changes it at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.errors import MemoryBudgetError, ProtocolError
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.memory.budget import mib
from hetero_worker.memory.weight_offload import OffloadedWeights
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest, WorkProgress
from hetero_worker.runners.forward import ForwardPass
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.shard import LoadedShard
from hetero_worker.runners.slots import SlotTable
from hetero_worker.runners.step_parts import DeviceTokenInputs, MultiStepParts, StepInputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SleepingWeights:
    """Record of weights that are asleep, so that they come back as they went.

    `request` is what they were loaded for, `checksum` what `rehearsal.checksum` computes of them. `are_dropped`: they
    must be read again (level 2).
    """

    request: LoadRequest
    kernel: LinearKernel
    checksum: int
    are_dropped: bool


class ModelState:
    """Weights and cache of one rank; see the module. `progress` is told how far reading weights has come.

    `on_leaving` is called before the weights leave their memory.
    """

    def __init__(self, backend: DeviceBackend, progress: WorkProgress, *, on_leaving: Callable[[], None]) -> None:
        self.backend = backend
        self.progress = progress
        self._on_leaving = on_leaving
        self.shard: LoadedShard | None = None
        self.offloaded: OffloadedWeights | None = None
        """The shard's weights, while they sleep on the host: then the shard cannot be used."""
        self.cache: ServingCache | None = None
        self.sleeping: SleepingWeights | None = None
        """Record of weights that are asleep; None: they are awake."""
        self.cache_sleeps = False
        self.sharing_problem: str | None = None
        """Why no experts are shared, empty if they are; None: not tried since what was shared was dropped."""
        self._request: LoadRequest | None = None
        self._report: ranks_pb2.Loaded | None = None

    @property
    def held(self) -> LoadRequest | None:
        """Order that the weights in memory were loaded for; None: there are none."""
        return None if self.shard is None else self.shard.request

    @property
    def is_asleep(self) -> bool:
        """Whether weights or cache are asleep."""
        return self.sleeping is not None or self.cache_sleeps

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return 0 if self.shard is None else self.shard.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache in memory."""
        return 0 if self.cache is None else self.cache.num_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that graphs of steps on the cache have taken so far. Thread-safe."""
        cache = self.cache
        return 0 if cache is None else cache.forward.graph_bytes

    def begin_epoch(self) -> None:
        """Wake up, drop the cache and adapters; weights that are in memory stay."""
        self.drop_cache()
        if self.shard is not None:
            for number in list(self.shard.decoder.adapters):
                self.shard.decoder.drop_adapter(number)
        self.sleeping = self._request = self._report = None
        self.cache_sleeps = False

    def drop_cache(self) -> None:
        """Drop the cache, with everything that is kept from step to step."""
        self.cache = None
        self.sharing_problem = None
        if self.shard is not None:
            self.shard.decoder.release_buffers()

    def take_shard(self) -> LoadedShard | None:
        """Give up the weights and return them on their device; None if there are none, or no room for them."""
        self.begin_epoch()
        shard, self.shard = self.shard, None
        offloaded, self.offloaded = self.offloaded, None
        if offloaded is not None:
            try:
                offloaded.restore()
            except RuntimeError as error:
                logger.warning("weights that slept on the host do not fit the device any more: %s", error)
                return None
        return shard

    def drop_shard(self) -> None:
        """Drop the weights: they are read again when they are needed."""
        self._on_leaving()
        self.shard = self.offloaded = None

    def offload(self, offloaded: OffloadedWeights) -> None:
        """Let the weights sleep on the host from now on."""
        self._on_leaving()
        self.offloaded = offloaded
        offloaded.release()

    def hold(self, shard: LoadedShard, request: LoadRequest, report: ranks_pb2.Loaded) -> None:
        """Keep weights, with the order that they serve and the report on it."""
        # The shard remembers what it was read for, and which plan that is by its latest name.
        kept = replace(shard.request, plan_key=request.plan_key)
        self.shard, self._request, self._report = replace(shard, request=kept), request, report

    def adopt(self, plan: ShardPlan) -> None:
        """Note that the weights in memory are a shard of this plan now; they are kept, and read again, as such."""
        if self.shard is not None:
            self.shard = replace(self.shard, request=replace(self.shard.request, shard_plan=plan))
        if self._request is not None:
            self._request = replace(self._request, shard_plan=plan)

    def ordered(self, what: str) -> tuple[LoadRequest, ranks_pb2.Loaded]:
        """Return the last load order and its report. Raises ProtocolError, naming `what`, which came too early."""
        if self._request is None or self._report is None:
            raise ProtocolError(f"{what} came before LoadModel")
        return self._request, self._report

    def loaded(self, what: str) -> tuple[LoadedShard, LoadRequest, ranks_pb2.Loaded]:
        """Return the weights, which must be in memory, with what `ordered` returns. Raises ProtocolError."""
        request, report = self.ordered(what)
        if self.shard is None:
            raise ProtocolError(f"{what} came while the weights are asleep; wake them first")
        return self.shard, request, report

    def check_awake(self, plan: ranks_pb2.StepPlan) -> None:
        """Raise ProtocolError when the plan touches slots of a rank that is asleep."""
        if self.is_asleep and any(_touches(plan)):
            parts = self.asleep_parts
            raise ProtocolError(
                f"step plan {plan.step_id} came while the rank is asleep ({', '.join(parts)}); wake the group first"
            )

    def check_adapters(self, plan: ranks_pb2.StepPlan) -> None:
        """Raise ProtocolError when the plan binds a slot to an adapter that is not loaded."""
        for sequence in plan.new_sequences:
            if sequence.adapter and (self.shard is None or sequence.adapter not in self.shard.decoder.adapters):
                raise ProtocolError(
                    f"step plan {plan.step_id}: slot {sequence.slot} wants adapter {sequence.adapter}, which is not "
                    "loaded"
                )

    @property
    def asleep_parts(self) -> list[str]:
        """Names of the parts that are asleep."""
        parts = {"weights": self.sleeping is not None, "KV cache": self.cache_sleeps}
        return [name for name, is_asleep in parts.items() if is_asleep]


def _touches(plan: ranks_pb2.StepPlan) -> Iterable[object]:
    yield from (plan.released_slots, plan.new_sequences, plan.decode_slots, plan.spans, plan.block_slots)


@dataclass(frozen=True, slots=True)
class ServingCache:
    """All that serves steps, for one number and size of blocks. `order` is what it was made for."""

    order: ranks_pb2.AllocateCache
    layers: tuple[LayerCache | None, ...]
    slots: SlotTable
    inputs: StepInputs
    forward: ForwardPass
    check: PlanCheck
    async_inputs: DeviceTokenInputs | None = None
    """The inputs, where a step may begin before the previous one is finished."""
    multi_step: MultiStepParts | None = None
    """Set where steps can draw by themselves."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(layer.num_bytes for layer in self.layers if layer is not None)

    def go_back(self, slot: int, snapshot: int) -> None:
        """Give a slot the states of a snapshot."""
        place = self.check.bounds.place_of(snapshot)
        for layer in self.layers:
            if layer is not None and layer.has_states:
                layer.copy_states(place, slot)


def make_cache(
    order: ranks_pb2.AllocateCache,
    backend: DeviceBackend,
    *,
    decoder: Decoder,
    request: LoadRequest,
    report: ranks_pb2.Loaded,
    layers: Sequence[LayerCache | None] | None = None,
) -> ServingCache:
    """Return an empty cache of the ordered size. `layers`: the KV tensors of one of the same size, to be kept.

    Raises ProtocolError, MemoryBudgetError, and what torch raises where memory is short.
    """
    check_order(order, report)
    num_blocks, block_size = order.num_blocks, order.block_size
    bounds = PlanBounds(
        max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens,
        max_model_len=request.max_model_len,
        vocab_size=request.config.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        num_snapshots=order.num_snapshots,
        keeps_states=request.config.delta is not None,
        tells_states=request.has_prediction_head,
    )
    parts = backend.steps.make(bounds, request)
    if layers is None:
        pool = backend.memory_pool
        with pool.apart():
            num_slots = request.max_num_seqs + order.num_snapshots
            layers = decoder.allocate_caches(
                num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, zeros=pool.zeros
            )
        backend.touch_cache(rows for layer in layers if layer is not None for rows in (layer.keys, layer.values))
    return ServingCache(
        order=order,
        layers=tuple(layers),
        slots=SlotTable(max_num_seqs=request.max_num_seqs, max_model_len=request.max_model_len, block_size=block_size),
        inputs=parts.inputs,
        forward=parts.forward,
        check=PlanCheck(bounds),
        async_inputs=parts.async_inputs,
        multi_step=parts.multi_step,
    )


def check_order(order: ranks_pb2.AllocateCache, report: ranks_pb2.Loaded) -> None:
    """Raise ProtocolError or MemoryBudgetError unless the rank can make the cache, by the arithmetic."""
    if order.num_blocks < 2 or order.block_size < 1:
        raise ProtocolError(
            f"a cache of {order.num_blocks} blocks of {order.block_size} tokens holds nothing beside the null block"
        )
    check_budget(report, order.num_blocks * order.block_size)
    if order.num_snapshots * report.snapshot_bytes > report.snapshot_budget_bytes:
        raise MemoryBudgetError(
            f"{order.num_snapshots} snapshots of {report.snapshot_bytes} bytes are more than the "
            f"{mib(report.snapshot_budget_bytes)} that the rank has for them"
        )


def check_budget(report: ranks_pb2.Loaded, positions: int) -> None:
    """Raise MemoryBudgetError when so many KV positions are more than the rank has said that it can hold."""
    kv_bytes = positions * report.kv_bytes_per_token
    if kv_bytes > report.kv_budget_bytes:
        raise MemoryBudgetError(
            f"{positions} KV positions of {report.kv_bytes_per_token} bytes are {mib(kv_bytes)}, the rank has "
            f"{mib(report.kv_budget_bytes)} for them; ask for fewer blocks (kvCacheMemoryBytes)"
        )
