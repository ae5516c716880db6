"""The interface of attention, for every kernel behind it.

Once a step the runner describes the batch (`AttentionBatch`) and a backend derives its indices from it (`begin`).
Every layer then writes its keys and values to its own cache and attends. Decode rows (one token each, all earlier ones
cached) come first in the step's token order, spans of several tokens after them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hetero_api.model_parts import LatentShape
from hetero_api.rank_memory import EXPANDED_AT_ONCE
from hetero_worker.attention.kv_cache import LayerCache

IntArray = npt.NDArray[np.int32]
Made = TypeVar("Made")
SlotArray = npt.NDArray[np.int64]
NO_SLOTS: Final[SlotArray] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences that compute one token each, longest first; row i of the step belongs to entry i."""

    lengths: IntArray
    """[rows]: tokens to attend to, the new one included."""
    block_tables: IntArray
    """[rows, at least blocks of the longest]: block ids; entries behind a row's last block are not read."""
    slots: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """[rows]: where each sequence's states lie; models without states do not read it."""
    saves: IntArray | None = None
    """[rows]: where a copy of the states behind each row is saved, below 0 for none; None: none is. Only such rows are
    followed by another one of the same sequence."""

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)


class SavedStates(NamedTuple):
    """A copy of a sequence's states as they are behind its first `num_tokens` tokens."""

    num_tokens: int
    place: int


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A sequence that computes rows [begin, end) of the step, after `num_computed` cached tokens."""

    begin: int
    end: int
    num_computed: int
    block_ids: IntArray
    """Blocks of the sequence, at least those that hold its first num_computed + end - begin tokens."""
    slot: int = 0
    """Where the sequence's states lie; models without states do not read it."""
    states_from: int | None = None
    """Where the states lie that the sequence begins with; None: it goes on with its own, or with empty ones."""
    saves: tuple[SavedStates, ...] = ()
    """Copies to make of the states, in the order of tokens."""

    @property
    def length(self) -> int:
        """Tokens that the last row attends to."""
        return self.num_computed + self.end - self.begin


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's sequences: decode rows [0, decode.num_rows), then the spans, in ascending row order."""

    slot_mapping: torch.Tensor
    """int64 [tokens], on the backend's device: the cache slot of each token, block id · block size + offset."""
    decode: DecodeRows
    prefills: tuple[PrefillSpan, ...]

    @property
    def only_decodes(self) -> bool:
        """Whether rows decode and save no states: such batches of one size are computed by the same operations."""
        return not self.prefills and self.decode.saves is None


@dataclass(frozen=True, slots=True)
class LatentExpansion:
    """The choice of spans for which latent attention makes keys and values of each head again from what is cached.

    A pair of a row and a token then takes far fewer products than in the cache's space, but each token must be brought
    to all heads. Rows that are computed one way and another differ in the last bits.
    """

    shape: LatentShape
    least_rows: int = 64
    """A shorter span is not worth launches of its own."""

    def split(self, batch: AttentionBatch) -> tuple[AttentionBatch, tuple[PrefillSpan, ...]]:
        """Return the batch without its last spans, and these: from one on for which it pays, all of which fit."""
        spans = batch.prefills
        kept = len(spans)
        for i in reversed(range(len(spans))):
            if not self.heads_at_once(spans[i]):
                break
            if self._pays(spans[i]):
                kept = i
        return (batch, ()) if kept == len(spans) else (replace(batch, prefills=spans[:kept]), spans[kept:])

    def heads_at_once(self, span: PrefillSpan) -> int:
        """Return for how many heads keys and values of the span's tokens may be in memory together."""
        return EXPANDED_AT_ONCE // (span.length * self.shape.expanded_elements)

    def _pays(self, span: PrefillSpan) -> bool:
        """Return whether it takes fewer products: a row's query and result are brought to the cache's space and back
        by as many as a token is expanded by.
        """
        shape, rows = self.shape, span.end - span.begin
        saved_a_pair = shape.cached_dim + shape.rank - shape.query_dim - shape.value_dim
        pairs = rows * span.num_computed + rows * (rows + 1) // 2
        expanding = span.num_computed * shape.by_head_elements
        return rows >= self.least_rows and expanding < pairs * saved_a_pair


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends. Layers of one model may differ in it."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Number of tokens, the row's own included, that a row attends to; None: all."""
    soft_cap: float | None = None
    """Scaled scores s become cap · tanh(s / cap)."""
    sinks: torch.Tensor | None = None
    """float32 [heads]: a score more of each query head in the softmax, of a token without a value; None: there is none.
    Not together with `soft_cap`."""


class StepAttention(ABC):
    """A backend, prepared for one step. It reads all keys and values from the cache, this step's too."""

    slot_mapping: torch.Tensor
    """The batch's, see AttentionBatch."""
    batch: AttentionBatch
    """The step's sequences, for layers that keep states of them."""
    expanded: tuple[PrefillSpan, ...] = ()
    """The last spans, if latent attention is to expand their tokens: `attend_written` is not asked for these rows."""
    expansion: LatentExpansion | None = None
    """What chose them."""

    def once(self, make: Callable[[AttentionBatch], Made]) -> Made:
        """Return `make(batch)`, which is called for the first layer and kept for the others of the step."""
        if make not in self._made:
            self._made[make] = make(self.batch)
        made: Made = self._made[make]
        return made

    @cached_property
    def _made(self) -> dict[Callable[[AttentionBatch], Any], Any]:
        return {}

    @abstractmethod
    def attend_written(self, query: torch.Tensor, cache: LayerCache, rule: AttentionRule) -> torch.Tensor:
        """Attend causally, with the step's keys and values already in the cache at `slot_mapping`.

        `query` is [tokens, heads, head_dim], maybe a view with a row stride; query heads [h·g, (h+1)·g) read KV head h.
        Returns [tokens, heads · head_dim], contiguous.
        """

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rule: AttentionRule
    ) -> torch.Tensor:
        """Write key and value [tokens, kv_heads, head_dim] to the cache, then `attend_written`."""
        cache.write(self.slot_mapping, key, value)
        return self.attend_written(query, cache, rule)


class AttentionBackend(ABC):
    """A kernel for one model on one device, chosen when the model is built; the batch's tensors are on that device."""

    gather_bytes: int = 0
    """The most bytes that a step's decode rows take beyond what the memory budget counts per cached token."""
    expansion: LatentExpansion | None = None
    """What chooses spans whose tokens latent attention expands; None: no span's."""
    is_capturable: bool = False
    """True if a graph may capture decode-only steps: `reserve` and `prepared` keep tables at fixed addresses."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that is reported."""

    @abstractmethod
    def begin(self, batch: AttentionBatch) -> StepAttention:
        """Prepare a step."""

    def release(self) -> None:
        """Free memory that is kept from step to step. No step may be under way."""
        return

    def reserve(self, *, max_rows: int, max_blocks: int, block_size: int) -> None:
        """Allocate tables for decode-only steps of up to `max_rows` rows of `max_blocks` blocks.

        Graphs over earlier tables are invalid then. The launches of a step depend on its number of rows and on this
        reservation, not on lengths. Only for capturable backends.
        """
        raise NotImplementedError(f"{self.name} has no tables at fixed addresses")

    def prepared(self, batch: AttentionBatch) -> AbstractContextManager[None]:
        """Fill the reserved tables on the current stream; a step that begins inside uses them and copies nothing.

        The batch only decodes; a row of one token in the null block pads it. Raises ValueError if there is no room.
        Only for capturable backends.
        """
        raise NotImplementedError(f"{self.name} has no tables at fixed addresses")
