"""The host's attention backend: a batched kernel for decode rows, SDPA span by span for the rest."""

from __future__ import annotations

import weakref

import torch

from hetero_worker.attention.base import AttentionBatch, AttentionRule, StepAttention
from hetero_worker.attention.decode import DecodeAttention, DecodeKernel, GatherDecode, SparseDecode
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.spans import Span
from hetero_worker.attention.workspace import Workspace


class PagedAttention:
    """Holds nothing between steps but memory for the next: a workspace is free again when its step is gone."""

    def __init__(self, decode: DecodeKernel) -> None:
        self._decode = decode
        self._leases: list[_Lease] = []

    @property
    def name(self) -> str:
        return self._decode.name

    @property
    def gather_bytes(self) -> int:
        return 0

    def begin(self, batch: AttentionBatch) -> StepAttention:
        lease = next((lease for lease in self._leases if lease.is_free), None)
        if lease is None:
            self._leases.append(lease := _Lease())
        return lease.give(batch, self._decode)

    def release(self) -> None:
        self._leases.clear()


class _Lease:
    """A workspace, and the step that has it."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self._holder: weakref.ref[_PagedStep] | None = None

    @property
    def is_free(self) -> bool:
        return self._holder is None or self._holder() is None

    def give(self, batch: AttentionBatch, decode: DecodeKernel) -> _PagedStep:
        step = _PagedStep(batch, decode, self._workspace)
        self._holder = weakref.ref(step)
        return step


def paged_attention(dtype: torch.dtype) -> PagedAttention:
    """The backend for a dtype: the sparse kernel where its operators support it."""
    return PagedAttention(SparseDecode() if dtype == torch.float32 else GatherDecode())


class _PagedStep:
    """Indices are made by the first layer that needs them and shared by all with as many heads and the same window."""

    def __init__(self, batch: AttentionBatch, decode: DecodeKernel, workspace: Workspace) -> None:
        self._batch = batch
        self._decode = decode
        self._workspace = workspace
        self._prepared: dict[tuple[int, int | None], DecodeAttention] = {}
        self._spans = [Span(span) for span in batch.prefills]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        cache.write(self._batch.slot_mapping, key, value)
        if not self._spans:
            return self._attend_decode(query, cache, rule)
        out = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype)
        if num_decode := self._batch.decode.num_rows:
            out[:num_decode] = self._attend_decode(query[:num_decode], cache, rule)
        for span in self._spans:
            rows = span.rows
            out[rows] = span.attend(query[rows], key[rows], value[rows], cache, rule)
        return out

    def _attend_decode(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        kind = (query.shape[1], rule.window)
        attention = self._prepared.get(kind)
        if attention is None:
            attention = self._prepared[kind] = self._decode.prepare(
                self._batch.decode,
                num_heads=query.shape[1],
                window=rule.window,
                cache=cache,
                workspace=self._workspace.section(kind),
            )
        return attention(query, cache, rule)
