"""GraphForward: steps that only decode are replayed from graphs, one for each padded size; others go eagerly.

Steps with rows of adapters have graphs of their own, where our kernels compute the adapters' products, so that others
launch nothing for adapters. All steps of a rank go eagerly if some of its layers compute experts one by one.

The first step of a size goes eagerly, which prepares it: kernels are compiled, libraries take their workspaces. The
second is recorded while it is made, and all further ones are replays. Which steps these are follows from the plans, so
all ranks come to the same point together; but nothing depends on it, for a rank that records, replays or goes eagerly
does the same with its peers. With too little memory left a rank records no more, says so, and serves on: what is kept
for graphs (`hetero_api.graph_memory`) is an estimate, and reported beside what they took.

A graph holds addresses of weights, cache and inputs. It is of one decoder and one exchange, and goes with the cache. It
ends with the hidden states: the head is given to the device behind it, while the device is busy with it.

A pass may be asked for while the one before is under way: replays, and what they read and write, follow one another on
the device's stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from hetero_api.graph_memory import GraphMemory
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.memory.budget import mib
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.runners.forward import EagerForward, ForwardStates
from hetero_worker.runners.graphs.breaking_exchange import BreakingExchange
from hetero_worker.runners.graphs.breaks import Breaks, CurrentStep, GraphBackend, RecordedPass
from hetero_worker.runners.graphs.graph_attention import GraphAttention
from hetero_worker.runners.graphs.padding import LINK_BYTES
from hetero_worker.runners.input_batch import InputBatch
from hetero_worker.runners.plan_check import PlanBounds

logger = logging.getLogger(__name__)

SPARE_BYTES: Final = 256 * 1024**2
"""Memory that a graph leaves free at least, beside as much as the largest one took."""


_Kind = tuple[int, bool]
"""Of a graph: its number of rows, and whether some may have adapters."""


@dataclass(slots=True)
class _Bound:
    """Decoder and caches that graphs have been recorded of."""

    source: Decoder
    caches: Sequence[LayerCache | None]
    outer: Exchange
    decoder: Decoder
    attention: GraphAttention
    exchange: BreakingExchange
    waits: bool
    """Whether a pass waits for the device, which no graph can."""
    prepared: set[_Kind] = field(default_factory=set)
    graphs: dict[_Kind, RecordedPass[ForwardStates]] = field(default_factory=dict)

    def run(self, step: DecoderInput) -> ForwardStates:
        """Run the pass itself, padded."""
        return ForwardStates(self.decoder.hidden(step, caches=self.caches, exchange=self.exchange))


class GraphForward:
    """Implements ForwardPass for a device; see the module."""

    def __init__(
        self,
        backend: GraphBackend,
        sizes: Sequence[int],
        *,
        bounds: PlanBounds,
        reserved: GraphMemory,
        records_adapters: bool,
    ) -> None:
        """`sizes`: what steps that only decode have been padded to, at least one. `reserved`: what is kept for them.

        `records_adapters`: whether steps with rows of adapters have graphs, too.
        """
        backend.reserve(reserved.activations)
        self._backend = backend
        self._reserved = reserved
        self._sizes = frozenset(sizes)
        self._records_adapters = records_adapters
        self._most_graphs = len(self._sizes) * (2 if records_adapters else 1)
        self._bounds = bounds
        self._breaks = Breaks(backend)
        self._step = CurrentStep()
        self._bound: _Bound | None = None
        self._eager = EagerForward()
        self._records = True
        self._largest_bytes = reserved.activations
        self.graph_bytes = 0

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        """Replay the graph of the step's size, recording it first; other steps run as they are."""
        step = batch.decoder_input
        size, has_adapters = len(step.token_ids), step.adapters is not None
        is_recorded = size in self._sizes and (self._records_adapters or not has_adapters)
        if not step.attention.only_decodes or not is_recorded:
            return self._eager.run(decoder, batch, caches=caches, exchange=exchange)
        bound = self._bind(decoder, caches, exchange)
        if bound.waits:
            return self._eager.run(decoder, batch, caches=caches, exchange=exchange)
        self._step.begin(len(batch.draw_slots), size=size)
        with bound.attention.prepared(step.attention):
            return self._pass(bound, step, (size, has_adapters))

    def _pass(self, bound: _Bound, step: DecoderInput, kind: _Kind) -> ForwardStates:
        graph = bound.graphs.get(kind)
        if graph is not None:
            return graph.replay()
        if kind in bound.prepared and self._has_room():
            return self._record(bound, step, kind)
        bound.prepared.add(kind)
        with self._counting(), self._backend.aside():
            return bound.run(step)

    def _record(self, bound: _Bound, step: DecoderInput, kind: _Kind) -> ForwardStates:
        began_s, before_bytes = time.perf_counter(), self.graph_bytes
        with self._counting():
            graph = bound.graphs[kind] = self._breaks.record(lambda: bound.run(step))
        taken = self.graph_bytes - before_bytes
        self._largest_bytes = max(self._largest_bytes, taken)
        logger.info(
            "graph of %d rows%s: %d segments, %d calls between them, %s of memory, recorded in %.2f s",
            kind[0],
            " with adapters" if kind[1] else "",
            graph.num_segments,
            len(graph.parts) - graph.num_segments,
            mib(taken),
            time.perf_counter() - began_s,
        )
        self._tell_memory(len(bound.graphs), before_bytes)
        return graph.outcome

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the memory that the device has less after this context as graphs'."""
        free_bytes = self._backend.free_bytes()
        yield
        self.graph_bytes += max(0, free_bytes - self._backend.free_bytes())

    def _tell_memory(self, number: int, before_bytes: int) -> None:
        """When the last graph is there, or they have just become more than is kept for them."""
        taken, reserved = self.graph_bytes, self._reserved.total
        if taken > reserved >= before_bytes:
            logger.warning(
                "%d graphs took %s, and %s are kept for them: what is more is of what gpuMemoryUtilization leaves over",
                number,
                mib(taken),
                mib(reserved),
            )
        elif taken <= reserved and number == self._most_graphs:
            logger.info("all %d graphs took %s of the %s that are kept for them", number, mib(taken), mib(reserved))

    def _has_room(self) -> bool:
        if self._records:
            free_bytes = self._backend.free_bytes()
            self._records = free_bytes >= SPARE_BYTES + self._largest_bytes
            if not self._records:
                logger.warning(
                    "no more graphs are recorded: the device has %s free; lower gpuMemoryUtilization", mib(free_bytes)
                )
        return self._records

    def _bind(self, decoder: Decoder, caches: Sequence[LayerCache | None], exchange: Exchange) -> _Bound:
        """Graphs of anything else are dropped."""
        bound = self._bound
        if bound is None or bound.source is not decoder or bound.outer is not exchange or bound.caches is not caches:
            self.graph_bytes = 0
            bound = self._bound = self._new(decoder, caches, exchange)
        return bound

    def _new(self, decoder: Decoder, caches: Sequence[LayerCache | None], exchange: Exchange) -> _Bound:
        if exchange.world_size > 1 and exchange.link_bytes < LINK_BYTES:
            raise RuntimeError(f"the exchange's links hold {exchange.link_bytes} bytes, graphs count on {LINK_BYTES}")
        attention = GraphAttention(decoder.attention, self._breaks, max_rows=max(self._sizes), bounds=self._bounds)
        breaking = BreakingExchange(
            exchange, self._breaks, self._step, records_device_sums=self._backend.records_device_sums
        )
        one_by_one = [layer for layer, mlp in decoder.expert_mlps.items() if not mlp.is_joined]
        if one_by_one:
            logger.warning("steps are not recorded: experts of layers %s have weights of several kinds", one_by_one)
        return _Bound(
            decoder, caches, exchange, decoder.attending(attention), attention, breaking, waits=bool(one_by_one)
        )
