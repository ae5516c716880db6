"""ForwardPass: how a step's hidden states come about. EagerForward: operator by operator.

Logits are made of them afterwards, or by the pass itself. Where a pass may begin before all draws of the one before are
known, they are in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hetero_api.sharding import UnitRange
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class ForwardStates:
    """What a pass gives; valid until the next."""

    hidden: torch.Tensor
    """[rows, hidden], of the step's logit rows; content only where this rank has a head."""
    logits: torch.Tensor | None = None
    """float32 [rows, vocabulary rows of this rank], where the pass has made them."""

    def logits_of(self, decoder: Decoder, num_draws: int) -> torch.Tensor:
        """Of the first rows, which are draws: float32 [draws, vocabulary rows of this rank].

        The caller's to keep on a rank that chains its steps, else valid until the next pass, as `hidden` is.
        """
        if self.logits is None:
            return decoder.logits(self.hidden[:num_draws])
        return self.logits if len(self.logits) == num_draws else self.logits[:num_draws]


class ForwardPass(Protocol):
    """Kept with the cache that it works on: what it remembers of it goes when that goes."""

    @property
    def graph_bytes(self) -> int:
        """Memory of the device that graphs of steps took so far, as the device told."""
        ...

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        """One step's. Raises as the exchange does."""
        ...


class StepDraws(NamedTuple):
    """What steps drew that followed one another. Valid until the next are made."""

    token_ids: npt.NDArray[np.int64]
    """[steps, draws]"""
    scores: npt.NDArray[np.float32]
    """[steps, draws]: the logits of these tokens."""


class MultiStepForward(ForwardPass, Protocol):
    """ForwardPass that also draws the largest logits, so that steps follow one another by themselves."""

    def can_draw(
        self,
        decoder: Decoder,
        batch: InputBatch,
        *,
        caches: Sequence[LayerCache | None],
        exchange: Exchange,
        head_ranges: Sequence[UnitRange],
    ) -> bool:
        """Whether `draw` would serve for steps as this one, of which one was run before.

        `head_ranges` are the vocabulary rows of all ranks. All ranks have to draw alike, for they meet at it.
        """
        ...

    def draw(
        self,
        decoder: Decoder,
        batch: InputBatch,
        *,
        caches: Sequence[LayerCache | None],
        exchange: Exchange,
        head_ranges: Sequence[UnitRange],
        steps: int,
        on_step: Callable[[], None],
    ) -> StepDraws:
        """So many steps, the first of which is this batch's, and each other what its draws make of the one before.

        `on_step` is called after each. Of logits that are no numbers the score is none, or infinite: that is the
        caller's to see. Raises as the exchange does.
        """
        ...


class EagerForward:
    """Remembers nothing."""

    graph_bytes = 0

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        return ForwardStates(decoder.hidden(batch.decoder_input, caches=caches, exchange=exchange))
