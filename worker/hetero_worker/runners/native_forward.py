"""NativeForward: on host cores, steps that only decode are recorded once for each number of rows, and then run by a
call or few.

All that differs between two such steps lies in the inputs' buffers and the cache, at the same addresses (input_batch).
So the operations of the first can be run again as they are. Recorded code is ordinary code, and the step that is
recorded is a step like any other. Sums that the native exchange takes are recorded with the rest; what else crosses the
host breaks the recording, as it does a GPU's (`graphs.breaks`), and is called anew each time. What torch computes would
be lost: while a step is recorded somebody looks for that (`recording_guard`), and a decoder that needs it goes on
operator by operator, and says why.

Every row of such a step is drawn from, so its logits are recorded with it. They are in memory that all recordings have
in common, for they are large: a rank on host cores has drawn from them before the next pass begins.

A recording holds addresses of weights, cache and inputs. It is of one decoder and one exchange, and goes with the
cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch

from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.memory.budget import mib
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.native.issuing import Arena, CommonArena, Issuer, RecordedOps
from hetero_worker.runners.forward import EagerForward, ForwardStates
from hetero_worker.runners.graphs.breaks import Breaks, RecordedPass
from hetero_worker.runners.graphs.current_step import CurrentStep
from hetero_worker.runners.input_batch import InputBatch
from hetero_worker.runners.native_sums import NativeSumsExchange
from hetero_worker.runners.recording_guard import RecordingGuard

logger = logging.getLogger(__name__)

MAX_RECORDINGS: Final = 128
"""Numbers of rows that steps are kept of; when there are more, all are made anew."""


class NothingPadded(CurrentStep):
    """All rows are the step's own, or a micro-batch's of it."""

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def clear_padding(self, tensor: torch.Tensor) -> None:
        """There is none."""


class NativeBackend:
    """Implements graphs.backend.GraphBackend for native operations."""

    records_device_sums = False

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._segment = ExitStack()
        self._recorded: RecordedOps | None = None
        self._guard = RecordingGuard()
        self.num_ops = 0
        """Recorded in the last pass."""
        self.num_bytes = 0
        """That it computes in."""

    @property
    def not_recorded(self) -> list[str]:
        """What torch did within the last pass's segments; calls between them may do what they like."""
        return self._guard.seen

    def reserve(self, num_bytes: int) -> None:
        """Memory comes as it is needed."""

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[None]:
        arena = Arena()
        self.num_ops = 0
        self._guard = RecordingGuard()
        with self._issuer.computing_in(arena), self._segment:
            yield
        self.num_bytes = arena.num_bytes

    def begin(self) -> None:
        self._recorded = self._segment.enter_context(self._issuer.recording())
        self._segment.enter_context(self._guard)

    def end(self) -> Callable[[], object] | None:
        recorded, self._recorded = self._recorded, None
        self._segment.close()
        if recorded is None or not recorded.ops:
            return None
        self.num_ops += len(recorded.ops)
        return lambda: self._issuer.replay(recorded)

    def free_bytes(self) -> int:
        """Nobody asks: what recordings compute in is small, and the host's."""
        return 0


@dataclass(slots=True)
class _Bound:
    """What steps have been recorded of, and with."""

    decoder: Decoder
    caches: Sequence[LayerCache | None]
    outer: Exchange
    exchange: NativeSumsExchange
    passes: dict[int, tuple[DecoderInput, RecordedPass[ForwardStates] | None]] = field(default_factory=dict)
    """By the inputs' identity, which lasts as long as they are kept here; None of a step that cannot be recorded."""


class NativeForward:
    """Implements ForwardPass; see the module."""

    graph_bytes = 0

    def __init__(self, issuer: Issuer, *, logits_bytes: int) -> None:
        """`logits_bytes`: what logits of a step, and what they are made of, take at most; 0: they are not recorded."""
        self._backend = NativeBackend(issuer)
        self._breaks = Breaks(self._backend)
        self._step = NothingPadded()
        self._issuer = issuer
        self._eager = EagerForward()
        self._bound: _Bound | None = None
        self._logits = CommonArena(logits_bytes) if logits_bytes else None

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        step = batch.decoder_input
        bound = self._bind(decoder, caches, exchange)
        if step.attention.prefills:
            return self._run_eagerly(bound, batch)
        if id(step) not in bound.passes:
            return self._record(bound, step)
        _, recorded = bound.passes[id(step)]
        if recorded is None:
            return self._run_eagerly(bound, batch)
        return recorded.replay()

    def _record(self, bound: _Bound, step: DecoderInput) -> ForwardStates:
        began_s = time.perf_counter()
        if len(bound.passes) >= MAX_RECORDINGS:
            bound.passes.clear()
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
        """None: made by whoever wants them, in memory of their own."""
        if self._logits is None or not len(hidden):
            return None
        self._logits.restart()
        with self._issuer.computing_in(self._logits):
            return decoder.logits(hidden)

    def _bind(self, decoder: Decoder, caches: Sequence[LayerCache | None], exchange: Exchange) -> _Bound:
        """Recordings of anything else are dropped."""
        bound = self._bound
        if bound is None or bound.decoder is not decoder or bound.outer is not exchange or bound.caches is not caches:
            outer = NativeSumsExchange(exchange, self._breaks, self._step, self._issuer)
            bound = self._bound = _Bound(decoder, caches, exchange, outer)
        return bound
