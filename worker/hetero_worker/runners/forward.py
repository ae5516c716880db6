"""ForwardPass: how a step's hidden states come about. EagerForward: operator by operator.

Logits are made of them afterwards, in memory of their own: they outlive the next pass, which may have begun by the time
that all draws are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.input_batch import InputBatch


@dataclass(frozen=True, slots=True)
class ForwardStates:
    """What a pass gives; valid until the next."""

    hidden: torch.Tensor
    """[rows, hidden], of the step's logit rows; content only where this rank has a head."""

    def logits_of(self, decoder: Decoder, num_draws: int) -> torch.Tensor:
        """Of the first rows, which are draws: float32 [draws, vocabulary rows of this rank], the caller's to keep."""
        return decoder.logits(self.hidden[:num_draws])


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


class EagerForward:
    """Remembers nothing."""

    graph_bytes = 0

    def run(
        self, decoder: Decoder, batch: InputBatch, *, caches: Sequence[LayerCache | None], exchange: Exchange
    ) -> ForwardStates:
        return ForwardStates(decoder.hidden(batch.decoder_input, caches=caches, exchange=exchange))
