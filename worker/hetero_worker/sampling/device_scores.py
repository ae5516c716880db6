"""What draws need computed where logits lie: the protocol, and its implementation by plain torch operators.

The torch implementation runs on every device and is what kernels are tested against.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from hetero_worker.sampling.noise import COARSE, to_gumbel
from hetero_worker.sampling.philox import words_at, words_of_range


class Contest(NamedTuple):
    """Who can win a draw without filters, by scores that are nearly right."""

    ids: torch.Tensor
    """int64 [draws]: the vocabulary row of the largest score; of a row of logits with NaN, one that is NaN or +inf."""
    rivals: torch.Tensor
    """float32 [draws]: no other row's score is larger than this, but for the rounding of `device_draws.slack`."""


class DrawKernels(Protocol):
    """Draws' arithmetic on one device. Every draw's numbers are the same whatever other draws there are."""

    @property
    def name(self) -> str:
        """As reports have it."""
        ...

    def contest(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Contest:
        """Of draws from the `rows` (int64 [draws]) of `logits` (floating [any, shard rows], each row contiguous).

        `keys` is int64 [draws, 2], seed and position by their bits; `temperatures` float32 [draws]; `begin` is the
        vocabulary row of the first column. Reads the logits once.
        """
        ...

    def words_at(self, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Words of noise, as `philox.words_at`: int64 [draws, n], of vocabulary rows `ids` int64 [draws, n]."""
        ...


class TorchDrawKernels:
    """Implements DrawKernels; takes some ten times the memory of a chunk of rows."""

    name = "torch"

    def __init__(self, *, chunk_elements: int = 1 << 20) -> None:
        self._chunk_elements = chunk_elements

    def contest(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Contest:
        size = max(1, self._chunk_elements // logits.shape[1])
        parts = [
            _contest(logits.index_select(0, rows[i : i + size]), keys[i : i + size], temperatures[i : i + size], begin)
            for i in range(0, len(rows), size)
        ]
        return Contest(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def words_at(self, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return words_at(keys, ids)


def _contest(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int) -> Contest:
    scores = upper_noise(words_of_range(keys, begin, logits.shape[1]))
    scores += logits / temperatures.unsqueeze(1)
    # NaN comes of logits that are none, and of the infinite noise of a word of 0 on a logit of -inf.
    scores.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    winners = scores.argmax(dim=1, keepdim=True)
    rivals = scores.scatter_(1, winners, -torch.inf).amax(dim=1)
    return Contest(winners.squeeze(1) + begin, rivals)


def upper_noise(words: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of words; of coarse ones the largest that their fraction can make it: float32."""
    numbers = words.float()
    numbers += torch.where(words < COARSE, 0.0, 0.5)
    return to_gumbel(numbers)
