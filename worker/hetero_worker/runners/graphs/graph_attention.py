"""Attention in a pass that is recorded: within segments where the backend's launches are always alike, else between.

A capturable backend has tables that stay where they are, and launches the same for every step of a size, however long
the sequences are: its calls are recorded, and its tables alone are filled again before a replay. Any other may make
shapes of lengths, so each of its calls breaks the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.runners.graphs.breaks import Breaks
from hetero_worker.runners.plan_check import PlanBounds


class GraphAttention(AttentionBackend):
    """AttentionBackend for steps that only decode, of up to `max_rows` padded rows, and are not cut."""

    def __init__(self, backend: AttentionBackend, breaks: Breaks, *, max_rows: int, bounds: PlanBounds) -> None:
        self._backend = backend
        self.gather_bytes = backend.gather_bytes
        self._breaking = _BreakingAttention(breaks)
        if backend.is_capturable:
            backend.reserve(max_rows=max_rows, max_blocks=bounds.max_blocks, block_size=bounds.block_size)

    @property
    def name(self) -> str:
        """Name of the attention that is recorded."""
        return self._backend.name

    @contextmanager
    def prepared(self, batch: AttentionBatch) -> Iterator[None]:
        """For a pass over this batch that is made, recorded or replayed within."""
        if self._backend.is_capturable:
            with self._backend.prepared(batch):
                yield
            return
        with self._breaking.using(self._backend.begin(batch)):
            yield

    def begin(self, batch: AttentionBatch) -> StepAttention:
        """Within `prepared`, of the same batch."""
        return self._backend.begin(batch) if self._backend.is_capturable else self._breaking

    def release(self) -> None:
        """Release the attention's buffers."""
        self._backend.release()


class _BreakingAttention(StepAttention):
    """Attention whose calls run between segments, each time by the attention of the current step."""

    def __init__(self, breaks: Breaks) -> None:
        self._breaks = breaks
        self._results: dict[torch.Size, torch.Tensor] = {}
        self._step: StepAttention | None = None

    @contextmanager
    def using(self, step: StepAttention) -> Iterator[None]:
        """Attend by this step within."""
        self._step, self.batch, self.slot_mapping = step, step.batch, step.slot_mapping
        try:
            yield
        finally:
            self._step = None

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """Attend between two segments. The result lasts until the next call of its shape."""
        return self._breaks.call(lambda: self._attend(query, cache, rule))

    def _attend(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        if self._step is None:
            raise RuntimeError("attention was not prepared for this step")
        result = self._step.attend_written(query, cache, rule)
        kept = self._results.setdefault(result.shape, result)
        return kept if kept is result else kept.copy_(result)
