"""Paged attention of a GPU by torch's own kernel, `torch.nn.attention.varlen.varlen_attn`.

It takes block tables and lengths from torch 2.12 on: decode rows and spans are then one call, and all keys and values
are read from the cache, this step's too. It caps no scores. Which sizes of blocks it takes is its kernel's affair: the
kernel of older devices wants multiples of 256 tokens, and refuses others when it is called. Nobody chooses it who has
not asked for it by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Protocol, cast

import torch

from hetero_worker.attention.base import AttentionBatch, AttentionRule, CacheReadingAttention, StepAttention
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.sequence_tables import SequenceTables, tables_of

_NEEDED = frozenset({"block_table", "seqused_k", "num_splits", "window_size", "enable_gqa", "scale"})


class VarlenAttend(Protocol):
    """varlen_attn, as far as it is used here."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        num_splits: int | None,
    ) -> torch.Tensor:
        """query [rows, heads, head_dim], key and value [blocks, block size, kv_heads, head_dim]: as query."""
        ...


@functools.cache
def varlen_attend() -> VarlenAttend | None:
    """torch's, if it takes block tables; None if not."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not set(inspect.signature(varlen_attn).parameters) >= _NEEDED:
        return None
    return cast(VarlenAttend, varlen_attn)  # which returns more than that only when told to


def varlen_refusal(device: torch.device, dtype: torch.dtype, rules: Iterable[AttentionRule]) -> str | None:
    """Why torch's kernel does not serve a model with these rules; None if it does."""
    if device.type != "cuda":
        return f"varlen_attn has no paged kernel on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn does not compute in {dtype}"
    if any(rule.soft_cap is not None for rule in rules):
        return "varlen_attn caps no scores"
    if varlen_attend() is None:
        return f"varlen_attn of torch {torch.__version__} takes no block tables; torch 2.12 does"
    return None


class VarlenAttention:
    """AttentionBackend of a CUDA device. `batch_invariant`: tokens are never cut into splits."""

    name = "paged-varlen"

    def __init__(self, device: torch.device, attend: VarlenAttend, *, batch_invariant: bool = False) -> None:
        self._device = device
        self._attend = attend
        self._num_splits = 1 if batch_invariant else None

    @property
    def gather_bytes(self) -> int:
        return 0

    def begin(self, batch: AttentionBatch) -> StepAttention:
        return _VarlenStep(batch, self._device, self._attend, self._num_splits)

    def release(self) -> None:
        """Nothing is kept."""


class _VarlenStep(CacheReadingAttention):
    """Tables are copied by the first layer, which knows the blocks' size."""

    def __init__(
        self, batch: AttentionBatch, device: torch.device, attend: VarlenAttend, num_splits: int | None
    ) -> None:
        self.slot_mapping = batch.slot_mapping
        self._batch = batch
        self._device = device
        self._attend = attend
        self._num_splits = num_splits
        self._tables: SequenceTables | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        cache.write(self.slot_mapping, key, value)
        return self.attend_written(query, cache, rule)

    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        if rule.soft_cap is not None:
            raise ValueError("varlen_attn caps no scores; choose another attention for this model")
        if self._tables is None:
            self._tables = tables_of(self._batch, block_size=cache.block_size, device=self._device)
        tables = self._tables
        attended = self._attend(
            query,
            _in_blocks(cache.keys, cache.block_size),
            _in_blocks(cache.values, cache.block_size),
            tables.starts,
            None,
            max(tables.longest_span, 1),
            tables.longest,
            scale=rule.scale,
            # So many tokens before a row's own, and none behind it.
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            enable_gqa=True,
            seqused_k=tables.lengths,
            block_table=tables.tables,
            num_splits=self._num_splits,
        )
        return attended.reshape(len(query), -1)


def _in_blocks(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    return rows.view(-1, block_size, *rows.shape[1:])
