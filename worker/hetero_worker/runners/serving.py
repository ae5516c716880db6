"""KV caches, slots and buffers that a rank works plans off with. They are made together, and go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.backends.base import HOST
from hetero_worker.errors import MemoryBudgetError, ProtocolError
from hetero_worker.memory.budget import mib
from hetero_worker.memory.memory_pool import memory_pool_of
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadReport, LoadRequest
from hetero_worker.runners.forward import ForwardPass
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.runner_device import DeviceTokenInputs, MultiStepParts, StepInputs, StepMaker
from hetero_worker.runners.slots import SlotTable

TOUCHED_BYTES: Final = 1 << 30
"""Bytes of a host's KV cache that are touched at start: a few tenths of a second."""


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


def make_cache(
    order: ranks_pb2.AllocateCache,
    *,
    decoder: Decoder,
    request: LoadRequest,
    report: LoadReport,
    steps: StepMaker,
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
    )
    parts = steps.make(bounds, request)
    if layers is None:
        with memory_pool_of(decoder.device).apart():
            layers = decoder.allocate_caches(num_blocks=num_blocks, block_size=block_size)
        if decoder.device == HOST:
            _touch_first(layers)
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


def _touch_first(layers: Sequence[LayerCache | None]) -> None:
    """Touch the first blocks, which are given out first. A whole large cache would take seconds."""
    filled = [layer for layer in layers if layer is not None]
    for layer in filled:
        layer.touch(TOUCHED_BYTES // (2 * len(filled)))


def check_order(order: ranks_pb2.AllocateCache, report: LoadReport) -> None:
    """Raise ProtocolError or MemoryBudgetError unless the rank can make the cache, by the arithmetic."""
    if order.num_blocks < 2 or order.block_size < 1:
        raise ProtocolError(
            f"a cache of {order.num_blocks} blocks of {order.block_size} tokens holds nothing beside the null block"
        )
    check_budget(report, order.num_blocks * order.block_size)


def check_budget(report: LoadReport, positions: int) -> None:
    """Raise MemoryBudgetError when so many KV positions are more than the rank has said that it can hold."""
    kv_bytes = positions * report.kv_bytes_per_token
    if kv_bytes > report.kv_budget_bytes:
        raise MemoryBudgetError(
            f"{positions} KV positions of {report.kv_bytes_per_token} bytes are {mib(kv_bytes)}, the rank has "
            f"{mib(report.kv_budget_bytes)} for them; ask for fewer blocks (kvCacheMemoryBytes)"
        )
