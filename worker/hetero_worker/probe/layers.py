"""Copies of a decoder layer, made of the rank's own kernels, and steps that go through them.

A copy's halves add to the residual stream as in a step; what peers would add is left out, for that is the exchange's
cost. The layers' numbers go round, so that windows and rotations are as mixed as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np
import torch

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.attention.base import AttentionBackend, AttentionBatch, DecodeRows, PrefillSpan, StepAttention
from hetero_worker.attention.kv_cache import LayerCache, Zeros
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.layers.blocks import Attention, GatedMlp, layer_norm, mlp_norm
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.layers.norm import RmsNorm
from hetero_worker.layers.rotary import RotaryTables, Rotation
from hetero_worker.memory.huge_pages import empty_on_huge_pages
from hetero_worker.models.decoder_layer import self_attention
from hetero_worker.native.op_queue import Arena, OpQueue
from hetero_worker.probe.sizes import UNIT, LayerSize
from hetero_worker.probe.synthetic import EvenRouter, even_units
from hetero_worker.probe.timing import Point, Work
from hetero_worker.runners.recorded.guard import RecordingGuard
from hetero_worker.sampling.base import HOST_SAMPLER, ShardSampler

BLOCK_SIZE: Final = 16
CACHE_BYTES: Final = 48 * 1024**2
"""Bytes of all caches of a stack of layers: what a large batch reads exceeds the processor's caches by itself."""
_NULL_BLOCKS: Final = 1


T = TypeVar("T")


class Record(Protocol):
    """Function that turns work into the form it has in a step that only decodes."""

    def __call__(self, work: Callable[[], T], /) -> Callable[[], T]:
        """Return the work in that form."""
        ...


def as_it_is(work: Callable[[], T], /) -> Callable[[], T]:
    """For ranks whose steps are not recorded."""
    return work


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how the rank computes."""

    device: torch.device
    dtype: torch.dtype
    kernel: LinearKernel
    backend: AttentionBackend
    checkpoint: Checkpoint
    ops: FusedOps = PLAIN_OPS
    sampler: ShardSampler = HOST_SAMPLER
    zeros: Zeros = empty_on_huge_pages
    """Allocates caches on the device."""
    record: Record = as_it_is


@dataclass(frozen=True, slots=True)
class SyntheticStep:
    """Rows of one step: `rows` sequences that decode with `context` tokens each, or (context 0) one whole prompt."""

    rows: int
    context: int
    hidden: torch.Tensor
    rotations: list[Rotation]
    batch: AttentionBatch
    attention: StepAttention

    @property
    def attention_point(self) -> Point:
        """Point that attention in this step is measured at."""
        if self.context:
            return Point(ranks_pb2.MODEL_PART_ATTENTION_DECODE, self.rows, self.context)
        return Point(ranks_pb2.MODEL_PART_ATTENTION_PREFILL, self.rows)


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One half of one copy: what it is a measurement of, its units, and how to do it."""

    point: Point
    units: float
    work: Work


def make_step(config: ModelConfig, site: Site, rotary: RotaryTables, *, rows: int, context: int) -> SyntheticStep:
    """With inputs of its own; `rotary` must reach as far."""
    length = context or rows
    positions = torch.full((rows,), length - 1) if context else torch.arange(rows)
    hidden = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(rows))
    batch = _batch(rows, context, site.device)
    return SyntheticStep(
        rows=rows,
        context=context,
        hidden=hidden.to(device=site.device, dtype=site.dtype),
        rotations=rotary.at(positions.to(site.device)),
        batch=batch,
        attention=site.backend.begin(batch),
    )


def _batch(rows: int, context: int, device: torch.device) -> AttentionBatch:
    """Blocks in a row, the first one after the null block."""
    if not context:
        span = PrefillSpan(0, rows, 0, np.arange(_NULL_BLOCKS, _NULL_BLOCKS + _blocks_of(rows), dtype=np.int32))
        slots = torch.arange(rows) + _NULL_BLOCKS * BLOCK_SIZE
        none = DecodeRows(np.zeros(0, dtype=np.int32), np.zeros((0, 1), dtype=np.int32))
        return AttentionBatch(slots.to(device), none, (span,))
    blocks = _blocks_of(context)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks) + _NULL_BLOCKS
    slots = torch.from_numpy(tables[:, 0].astype(np.int64)) * BLOCK_SIZE + context - 1
    decode = DecodeRows(np.full(rows, context, dtype=np.int32), tables, np.arange(rows, dtype=np.int64))
    return AttentionBatch(slots.to(device), decode, ())


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def positions_of(rows: int, context: int) -> int:
    """Positions that a step needs in a cache, null block included."""
    return (_NULL_BLOCKS + (rows * _blocks_of(context) if context else _blocks_of(rows))) * BLOCK_SIZE


class LayerStack:
    """`copies` copies of a layer of one size; caches hold up to `positions` positions, and states of `slots`."""

    def __init__(
        self, config: ModelConfig, size: LayerSize, *, copies: int, positions: int, slots: int, site: Site
    ) -> None:
        self._size = size
        self._record = site.record
        self._layers = [_Copy(config, i, size, ops=site.ops) for i in range(copies)]
        for layer in self._layers:
            layer.load(site)
        self._caches = self._make_caches(positions, slots, site)

    def _make_caches(self, positions: int, slots: int, site: Site) -> list[LayerCache]:
        """Return a cache for each layer; layers whose caches are alike share them once there are enough."""
        taken, blocks = 0, positions // BLOCK_SIZE
        caches: list[LayerCache] = []
        made: dict[tuple[int, int], list[LayerCache]] = {}
        for i, layer in enumerate(self._layers):
            alike = made.setdefault(layer.cached_shape, [])
            if not alike or taken + alike[0].num_bytes <= CACHE_BYTES:
                cache = layer.allocate_cache(blocks, slots, site)
                cache.keys.fill_(1.0)
                cache.values.fill_(1.0)
                alike.append(cache)
                taken += cache.num_bytes
            caches.append(alike[i % len(alike)])
        return caches

    @property
    def halves(self) -> int:
        """Parts of one copy."""
        return len(self._layers[0].parts)

    def first_attention(self, step: SyntheticStep, site: Site) -> Work:
        """Return the work of a step's first layer: attention that also prepares what all layers share."""
        layer, cache = self._layers[0], self._caches[0]

        def work() -> None:
            layer.attend(step, site.backend.begin(step.batch), cache)

        return self._record(work) if step.context else work

    def works(self, step: SyntheticStep) -> list[TimedWork]:
        """All copies' halves in a step's order; of a step that decodes as they are in one, which may do them once."""
        record = self._record if step.context else as_it_is
        return [
            TimedWork(point, units, record(work))
            for i, layer in enumerate(self._layers)
            for point, units, work in layer.halves(step, self._caches[i])
        ]


class _Copy:
    """One layer: its attention, and its MLP of either kind that the model has. To be loaded."""

    def __init__(self, config: ModelConfig, number: int, size: LayerSize, *, ops: FusedOps = PLAIN_OPS) -> None:
        self._shape = config.experts
        self._number = number % config.num_layers
        self._size = size
        self._attention = self_attention(config, self._number, UnitRange(0, size.heads), adds_bias=True, ops=ops)
        self._mlp: GatedMlp | None = None
        self._experts: ExpertMlp | None = None
        if size.mlp:
            layer = _layer_of_kind(config, number, with_experts=False)
            self._mlp = GatedMlp(config, layer, UnitRange(0, size.mlp * UNIT), adds_bias=True, ops=ops)
        if size.experts:
            layer = _layer_of_kind(config, number, with_experts=True)
            self._experts = ExpertMlp(
                config,
                layer,
                range(size.experts),
                norm=mlp_norm(config, layer, ops),
                make_router=partial(EvenRouter, own=size.experts, ops=ops),
                ops=ops,
            )
        self._sum_norm: RmsNorm | None = None
        if config.norms.sums:
            self._sum_norm = layer_norm(config, self._number, config.norms.sums[-1], ops)

    @property
    def parts(self) -> tuple[Attention | GatedMlp | ExpertMlp, ...]:
        return tuple(part for part in (self._attention, self._mlp, self._experts) if part is not None)

    @property
    def cached_shape(self) -> tuple[int, int]:
        return self._attention.cached_shape

    def allocate_cache(self, blocks: int, slots: int, site: Site) -> LayerCache:
        return self._attention.allocate_cache(
            num_blocks=blocks, block_size=BLOCK_SIZE, num_slots=slots, dtype=site.dtype, zeros=site.zeros
        )

    def load(self, site: Site) -> None:
        for part in self.parts:
            part.load(site.checkpoint, dtype=site.dtype, kernel=site.kernel, device=site.device)
        if self._sum_norm is not None:
            self._sum_norm.load(site.checkpoint, dtype=site.dtype, device=site.device)

    def halves(self, step: SyntheticStep, cache: LayerCache) -> Iterator[tuple[Point, float, Work]]:
        yield step.attention_point, self._size.heads, lambda: self.attend(step, step.attention, cache)
        if self._mlp is not None:
            point = Point(ranks_pb2.MODEL_PART_MLP, step.rows)
            yield point, self._size.mlp, partial(self._add, step, self._mlp)
        if self._experts is not None and self._shape is not None:
            point = Point(ranks_pb2.MODEL_PART_EXPERTS, step.rows)
            units = even_units(self._shape, own=self._size.experts, rows=step.rows)
            yield point, units, partial(self._add, step, self._experts)

    def attend(self, step: SyntheticStep, attention: StepAttention, cache: LayerCache) -> None:
        rotation = step.rotations[self._number]
        self._add(step, lambda hidden: self._attention(hidden, rotation, attention, cache))

    def _add(self, step: SyntheticStep, half: Callable[[torch.Tensor], torch.Tensor]) -> None:
        total = half(step.hidden)[:, : step.hidden.shape[1]].contiguous()
        step.hidden.add_(total if self._sum_norm is None else self._sum_norm(total))


def _layer_of_kind(config: ModelConfig, number: int, *, with_experts: bool) -> int:
    """Layers of one kind go round."""
    layers = [layer for layer in range(config.num_layers) if (layer in config.expert_layers) is with_experts]
    return layers[number % len(layers)]


_FUSED_IN_STEPS: Final = frozenset({"aten.add_.Tensor"})
"""The residual sum: in a step the norm behind it takes it."""


class WorkRecorder:
    """Recorder of pieces of work that share the memory they compute in: one runs at a time.

    Work that is measured operator by operator has Python between kernels, which a recorded step has not: at one row
    that is more than the kernels take, and a placement made from it would keep attention on few ranks to save what it
    does not cost.
    """

    def __init__(self, op_queue: OpQueue) -> None:
        self._op_queue = op_queue
        self._arena = Arena()

    def __call__(self, work: Callable[[], T], /) -> Callable[[], T]:
        """Do the work, and give what does it again without Python, or the work itself where torch has a part in it."""
        guard = RecordingGuard()
        with self._op_queue.computing_in(self._arena), self._op_queue.recording() as recorded, guard:
            outcome = work()
        if not recorded.ops or set(guard.seen) - _FUSED_IN_STEPS:
            return work

        def replay() -> T:
            self._op_queue.replay(recorded)
            return outcome

        return replay
