"""Arithmetic of draws where the logits lie: noise, filters, and the order of tokens.

The torch implementation runs on every device and is the reference for the kernels of `kernels.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

from hetero_worker.memory.streams import to_device
from hetero_worker.sampling.noise import noise_of_range
from hetero_worker.sampling.request import SamplingRow

MAX_SELECTED: Final = 1024
"""More candidates than this are found by sorting whole rows."""
_LOW_WORD: Final = (1 << 32) - 1


class Best(NamedTuple):
    """Best vocabulary row of each draw."""

    scores: torch.Tensor
    """float32 [draws]; not finite if the row's logits are not."""
    ids: torch.Tensor
    """int64 [draws]: always a row of the shard. Among equal scores it is the lowest id."""


class SamplingKernels(Protocol):
    """Noise on one device. A draw's numbers are the same in every batch."""

    @property
    def name(self) -> str:
        """Name for reports."""
        ...

    def noisy_best(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Best:
        """Return the largest logit / temperature + noise of each draw.

        Draws are from the `rows` (int64 [draws]) of `logits` (float32 [any, shard rows], each row contiguous), the
        first column being vocabulary row `begin`. `keys` is `noise.key_tensor`'s; `temperatures` is float32 [draws].
        """
        ...


class TorchSamplingKernels:
    """SamplingKernels of torch's operators; takes some ten times the memory of a chunk of logits."""

    name = "torch"

    def __init__(self, *, chunk_elements: int = 1 << 20) -> None:
        self._chunk_elements = chunk_elements

    def noisy_best(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Best:
        """As SamplingKernels.noisy_best."""
        size = max(1, self._chunk_elements // logits.shape[1])
        parts = [
            _noisy_best(
                logits.index_select(0, rows[i : i + size]), keys[i : i + size], temperatures[i : i + size], begin
            )
            for i in range(0, len(rows), size)
        ]
        return Best(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _noisy_best(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int) -> Best:
    scores = noise_of_range(keys, begin, logits.shape[1]).add_(logits.div_(temperatures.unsqueeze(1)))
    best, columns = scores.max(dim=1)
    return Best(best, columns + begin)


def filter_logits(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Set all that top_k, top_p and min_p cut off to -inf, in place.

    `scaled` is float32 [draws, vocabulary]; all filters leave a head of one order. Rows that all have a small top_k
    select their candidates; any other row has all rows sorted.
    """
    vocabulary = scaled.shape[1]
    order = first_columns(scaled, min(vocabulary, max(row.top_k or vocabulary for row in rows)))
    limit, top_p, min_log = _filter_numbers(rows, scaled.device)
    kept = torch.arange(order.shape[1], device=scaled.device) < limit
    values = scaled.gather(1, order).double().masked_fill_(~kept, -torch.inf)
    # The nucleus has a share of the mass that top_k leaves.
    shares = values.softmax(dim=1)
    kept &= shares.cumsum(dim=1).sub_(shares) < top_p
    kept &= values >= values[:, :1] + min_log
    last = order.gather(1, kept.sum(dim=1, keepdim=True).sub_(1).clamp_(min=0))
    floor = scaled.gather(1, last)
    columns = torch.arange(vocabulary, device=scaled.device)
    scaled.masked_fill_((scaled < floor) | ((scaled == floor) & (columns > last)), -torch.inf)


def _filter_numbers(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    """Return top_k, the nucleus's mass and min_p's logarithm, infinite where a filter is off: float64 [3, draws, 1]."""
    numbers = [
        (
            row.top_k or math.inf,
            row.top_p if row.has_nucleus else math.inf,
            math.log(row.min_p) if row.min_p > 0.0 else -math.inf,
        )
        for row in rows
    ]
    return to_device(torch.tensor(numbers, dtype=torch.float64).T.contiguous(), device).unsqueeze(2)


def first_columns(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` first columns in the order (value descending, column ascending): int64 [draws, count].

    A device's topk may return equal values in any order. Here it selects integers no two of which are equal: a
    float32's bits in an order of their own, and the column.
    """
    values = scaled + 0.0  # -0.0, which equals 0.0, becomes it
    if count > MAX_SELECTED:
        return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    bits = values.view(torch.int32).long()
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    columns = torch.arange(scaled.shape[1], device=scaled.device)
    keys = (ascending << 32) + (_LOW_WORD - columns)
    return _LOW_WORD - (keys.topk(count, dim=1).values & _LOW_WORD)
