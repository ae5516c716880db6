"""What attention is asked and answers, whatever the kernel behind it.

Once a step the runner describes the batch (`AttentionBatch`); the backend derives its indices from it (`begin`),
and every layer then calls `attend` with its own cache. Decode rows (one token, all earlier ones cached) come
first in the step's token order, spans of several tokens after them: one batched kernel serves the former,
the latter are worked off sequence by sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from hetero_worker.attention.kv_cache import LayerCache

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences that compute one token each, longest first; row i of the step belongs to entry i."""

    lengths: IntArray
    """[rows]: tokens to attend to, the new one included."""
    block_tables: IntArray
    """[rows, at least blocks of the longest]: block ids; what lies behind a row's last block is not read."""

    @property
    def num_rows(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A sequence that computes rows [begin, end) of the step, after `num_computed` tokens that are cached."""

    begin: int
    end: int
    num_computed: int
    block_ids: IntArray
    """Blocks of the sequence, at least those that hold its first num_computed + end − begin tokens."""

    @property
    def length(self) -> int:
        """Tokens that the last row attends to."""
        return self.num_computed + self.end - self.begin


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's sequences: decode rows [0, decode.num_rows), then the spans, in ascending row order."""

    slot_mapping: torch.Tensor
    """int64 [tokens], on the backend's device: where each token's key and value go: block id · block size + offset."""
    decode: DecodeRows
    prefills: tuple[PrefillSpan, ...]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends. Layers of one model may differ in it."""

    scale: float
    """What scores are multiplied by."""
    window: int | None = None
    """A token attends to so many tokens up to and including itself; None: to all."""
    soft_cap: float | None = None
    """Scaled scores s become cap · tanh(s / cap)."""


class StepAttention(Protocol):
    """A backend, prepared for one step."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        """Write key and value to the cache, attend causally; returns [tokens, heads · head_dim], contiguous.

        `query` is [tokens, heads, head_dim], `key` and `value` [tokens, kv_heads, head_dim]; query heads
        [h·g, (h+1)·g) read KV head h.
        """
        ...


class CacheReadingAttention(ABC):
    """What a StepAttention derives from, beside, that reads all keys and values from the cache, this step's too.

    Who has written them there in another pass, that of FusedOps.rotate_and_write, then need not hand them over.
    """

    slot_mapping: torch.Tensor
    """AttentionBatch's."""

    @abstractmethod
    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """`attend`, once the step's keys and values are in the cache. `query` may be a view with a row stride."""


class AttentionBackend(Protocol):
    """Chosen when the model is built (`selection.py`), for a device: tensors of the batch are on it."""

    @property
    def name(self) -> str: ...

    @property
    def gather_bytes(self) -> int:
        """What decode rows of a step may take at most, beside what memory.budget counts for every cached token."""
        ...

    def begin(self, batch: AttentionBatch) -> StepAttention: ...

    def release(self) -> None:
        """Give up memory that is kept from step to step. No step may be under way."""
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend whose steps a CUDA graph may capture, when they only decode: it has tables that stay where they are.

    What a step launches then depends on the number of its rows and on what was reserved, not on lengths.
    """

    def reserve(self, *, max_rows: int, max_blocks: int, block_size: int) -> None:
        """Make tables for up to so many rows and blocks a row. Those of before are gone, and graphs over them."""
        ...

    def prepared(self, batch: AttentionBatch) -> AbstractContextManager[None]:
        """Fill the tables now, on the present stream; a step that begins within takes them and copies nothing.

        The batch only decodes; a row of one token in the null block pads it. Raises ValueError when there is no room.
        """
        ...
