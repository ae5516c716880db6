"""ForwardPass: how a step's hidden states are computed. EagerForward: operator by operator.

Logits are computed from them afterwards, or by the pass itself. Where a pass may begin before all draws of the one
before are known, logits have memory of their own.
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
from hetero_worker.sampling.request import SamplingRow


@dataclass(frozen=True, slots=True)
class ForwardStates:
    """Outcome of a pass; valid until the next pass."""

    hidden: torch.Tensor
    """[rows, hidden]: the step's logit rows; no content on a rank without a head."""
    logits: torch.Tensor | None = None
    """float32 [rows, vocabulary rows of this rank]; None if the pass has not computed them."""

    def logits_of(self, decoder: Decoder, num_draws: int) -> torch.Tensor:
        """Return the logits of the first rows, which are draws: float32 [draws, vocabulary rows of this rank].

        On a rank with asynchronous steps the caller may keep them; otherwise they are valid until the next pass.
        """
        if self.logits is None:
            return decoder.logits(self.hidden[:num_draws])
        return self.logits if len(self.logits) == num_draws else self.logits[:num_draws]


class ForwardPass(Protocol):
    """Forward pass on one cache, which it lives and ends with."""

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory that graphs of steps have taken so far, as the device reports them."""
        ...

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        """Compute one step. Raises as the exchange does."""
        ...


class StepDraws(NamedTuple):
    """Draws of consecutive steps; valid until the next steps."""

    token_ids: npt.NDArray[np.int64]
    """[steps, draws]"""
    scores: npt.NDArray[np.float32]
    """[steps, draws]: the logits of these tokens, or where there was noise scaled logits with it."""


class MultiStepForward(ForwardPass, Protocol):
    """ForwardPass that also draws, where no draw edits or filters logits: steps follow one another by themselves."""

    def can_draw(
        self,
        decoder: Decoder,
        batch: InputBatch,
        *,
        caches: Sequence[LayerCache | None],
        exchange: Exchange,
        head_ranges: Sequence[UnitRange],
    ) -> bool:
        """Return whether `draw` would serve for steps like this one, of which one was run before.

        `head_ranges` are the vocabulary rows of all ranks. All ranks have to draw in the same way, because they meet in
        the same rounds.
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
        rows: Sequence[SamplingRow],
        steps: int,
        on_step: Callable[[], None],
    ) -> StepDraws:
        """Compute this batch's step and the steps that continue it, so many in all; each takes the tokens of the last.

        `rows` are the draws of the first step, and those of the others but for their positions. `on_step` is called
        after each. A score is not finite where logits are not; the caller checks that. Raises as the exchange does.
        """
        ...


class EagerForward:
    """ForwardPass that computes operator by operator and records nothing."""

    graph_bytes = 0

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        """As ForwardPass.run."""
        return ForwardStates(decoder.hidden(batch.decoder_input, caches=caches, exchange=exchange))
