"""NativeForward: the forward pass of host ranks, which records decode steps and replays them.

A step that only decodes is recorded once for each number of rows. Two such steps differ only in the content of the
input buffers and the cache, which stay at their addresses (input_batch.py), so the recorded operations can run again
as they are. The recorded step itself is an ordinary step. Sums and messages of the native exchange are recorded, too.
Anything else that crosses the host breaks the recording, as on a GPU (graphs/breaks.py), and is called in each
replay. Results of torch's operators would be missing from a replay: RecordingGuard finds them, and a decoder that
needs torch computes operator by operator and logs the reason.

A recorded step includes its logits. These are large and lie in memory that all recordings share: a host rank has
sampled from them before the next pass begins. If all rows draw from all logits as these are, sampling is recorded as
well (sampling.py), and `draw` computes several steps with nothing between their calls.

A recording holds addresses of weights, cache and inputs. It belongs to one decoder and one exchange, and ends with
the cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from hetero_api.sharding import UnitRange
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.layers.sampler import is_shared
from hetero_worker.memory.budget import mib
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.native.op_queue import Arena, CommonArena, OpQueue, RecordedOps
from hetero_worker.runners.forward import EagerForward, ForwardStates, StepDraws
from hetero_worker.runners.graphs.breaks import Breaks, CurrentStep, RecordedPass
from hetero_worker.runners.input_batch import InputBatch
from hetero_worker.runners.recorded.backend import NativeBackend, NativeSegment
from hetero_worker.runners.recorded.exchange import RecordedExchange
from hetero_worker.runners.recorded.sampling import NativeSampling
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import MAX_IDS

logger = logging.getLogger(__name__)

MAX_RECORDINGS: Final = 128
"""Largest number of recordings; one more drops all of them."""


class NothingPadded(CurrentStep):
    """CurrentStep without padding: all rows belong to the step or to one of its micro-batches."""

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, none of whose rows is padding."""
        return tensor

    def clear_padding(self, tensor: torch.Tensor) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Bound:
    """Decoder, caches and exchange that steps were recorded with, and the recordings."""

    decoder: Decoder
    caches: Sequence[LayerCache | None]
    outer: Exchange
    exchange: RecordedExchange
    passes: dict[int, tuple[DecoderInput, RecordedPass[ForwardStates] | None]] = field(default_factory=dict)
    """Passes by the identity of their inputs, which are kept here; None for a step that cannot be recorded."""
    drawn: dict[tuple[int, bool], RecordedOps] = field(default_factory=dict)
    """Passes of one piece followed by their draws, by the same key and whether these gather whole rows."""

    def only_segment(self, step: DecoderInput) -> RecordedOps | None:
        """Return the recording of such steps if it is a single piece, else None."""
        _, recorded = self.passes.get(id(step), (step, None))
        if recorded is None or len(recorded.parts) != 1:
            return None
        (segment,) = recorded.parts
        return segment.recorded if isinstance(segment, NativeSegment) else None


class NativeForward:
    """Implements MultiStepForward; see the module."""

    graph_bytes = 0

    def __init__(self, op_queue: OpQueue, *, logits_bytes: int, draws: NativeSampling) -> None:
        """`logits_bytes`: what logits of a step, and what they are made of, take at most; 0: they are not recorded."""
        self._draws = draws
        self._backend = NativeBackend(op_queue)
        self._breaks = Breaks(self._backend)
        self._step = NothingPadded()
        self._op_queue = op_queue
        self._eager = EagerForward()
        self._bound: _Bound | None = None
        self._logits = CommonArena(logits_bytes) if logits_bytes else None

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        """See `ForwardPass.run`."""
        step = batch.decoder_input
        bound = self._bind(decoder, caches, exchange)
        if not step.attention.only_decodes:
            return self._run_eagerly(bound, batch)
        if id(step) not in bound.passes:
            return self._record(bound, step)
        _, recorded = bound.passes[id(step)]
        if recorded is None:
            return self._run_eagerly(bound, batch)
        return recorded.replay()

    def can_draw(
        self,
        decoder: Decoder,
        batch: InputBatch,
        *,
        caches: Sequence[LayerCache | None],
        exchange: Exchange,
        head_ranges: Sequence[UnitRange],
    ) -> bool:
        """See `DrawingForward.can_draw`."""
        bound = self._bind(decoder, caches, exchange)
        if bound.only_segment(batch.decoder_input) is None or not bound.exchange.sums_natively:
            return False
        has_logits = self._logits is not None or not head_ranges[exchange.rank].size
        return has_logits and max(rows.end for rows in head_ranges) <= MAX_IDS

    def draw(
        self,
        decoder: Decoder,
        batch: InputBatch,
        *,
        caches: Sequence[LayerCache | None],
        exchange: Exchange,
        head_ranges: Sequence[UnitRange],
        rows: Sequence[SamplingRow],
        steps: int,
        on_step: Callable[[], None],
    ) -> StepDraws:
        """See `DrawingForward.draw`."""
        bound, step = self._bind(decoder, caches, exchange), batch.decoder_input
        gathers = is_shared(head_ranges) and any(row.is_filtered for row in rows)
        self._draws.restart(rows, steps)
        for _ in range(steps):
            if (recorded := bound.drawn.get((id(step), gathers))) is not None:
                self._op_queue.replay(recorded)
            else:
                self._draw_anew(bound, batch, head_ranges, gathers=gathers)
            on_step()
        return self._draws.of_steps(steps, len(step.token_ids))

    def _draw_anew(self, bound: _Bound, batch: InputBatch, head_ranges: Sequence[UnitRange], *, gathers: bool) -> None:
        """Compute a step and its draws, and record the draws to be replayed with the pass."""
        step = batch.decoder_input
        logits = self.run(bound.decoder, batch, caches=bound.caches, exchange=bound.outer).logits
        with self._op_queue.computing_in(Arena()), self._op_queue.recording() as draws:
            self._draws.submit(step, logits, head_ranges=head_ranges, exchange=bound.exchange, gathers=gathers)
        if (segment := bound.only_segment(step)) is not None:
            bound.drawn[id(step), gathers] = segment.followed_by(draws)

    def _record(self, bound: _Bound, step: DecoderInput) -> ForwardStates:
        began_s = time.perf_counter()
        if len(bound.passes) >= MAX_RECORDINGS:
            bound.passes.clear()
            bound.drawn.clear()
        recorded = self._breaks.record(lambda: self._pass(bound, step))
        if not_recorded := self._backend.not_recorded:
            bound.passes[id(step)] = step, None
            logger.info(
                "steps of %d rows are made operator by operator: torch computes %s",
                len(step.token_ids),
                ", ".join(sorted(set(not_recorded))),
            )
            return recorded.outcome
        bound.passes[id(step)] = step, recorded
        logger.info(
            "step of %d rows recorded: %d operations in %d pieces, %s to compute in, %.0f ms",
            len(step.token_ids), self._backend.num_ops, recorded.num_segments, mib(self._backend.num_bytes),
            (time.perf_counter() - began_s) * 1e3,
        )  # fmt: skip
        return recorded.outcome

    def _pass(self, bound: _Bound, step: DecoderInput) -> ForwardStates:
        hidden = bound.decoder.hidden(step, caches=bound.caches, exchange=bound.exchange)
        return ForwardStates(hidden, self._logits_of(bound.decoder, hidden))

    def _run_eagerly(self, bound: _Bound, batch: InputBatch) -> ForwardStates:
        states = self._eager.run(bound.decoder, batch, caches=bound.caches, exchange=bound.outer)
        return ForwardStates(states.hidden, self._logits_of(bound.decoder, states.hidden[: len(batch.draw_slots)]))

    def _logits_of(self, decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the logits, or None if the caller is to compute them, in memory of their own."""
        if self._logits is None or not len(hidden):
            return None
        self._logits.restart()
        with self._op_queue.computing_in(self._logits):
            return decoder.logits(hidden)

    def _bind(self, decoder: Decoder, caches: Sequence[LayerCache | None], exchange: Exchange) -> _Bound:
        """Return the recordings of these three; those of others are dropped."""
        bound = self._bound
        if bound is None or bound.decoder is not decoder or bound.outer is not exchange or bound.caches is not caches:
            outer = RecordedExchange(exchange, self._breaks, self._step, self._op_queue)
            bound = self._bound = _Bound(decoder, caches, exchange, outer)
        return bound
