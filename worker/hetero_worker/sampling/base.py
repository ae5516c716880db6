"""ShardSampler: a rank's part of a step's draws, computed on the host or on the device that holds the logits.

A draw has two halves: `start` asks for all that is needed of the logits, and `StartedDraws.read` waits for it. On a
device that holds the whole vocabulary the tokens exist before the host has read them, so the next step may begin with
`StartedDraws.token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch

from hetero_worker.memory.streams import HOST
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import BestDraws, Float64Array, best_of_shard, noisy_best, take_rows


class PendingCopy(Protocol):
    """A copy on its way to the host."""

    @property
    def is_here(self) -> bool:
        """True if `wait` would not wait."""
        ...

    def wait(self) -> torch.Tensor:
        """Return the copy; the same tensor when called again."""
        ...


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Last tokens of some sequences, which the host does not know yet and so cannot count for penalties."""

    draws: Sequence[int]
    """The draws of these sequences."""
    ids: torch.Tensor
    """int64 [len(draws)], on the device."""


class StartedDraws(Protocol):
    """A step's draws that have been asked for."""

    @property
    def is_here(self) -> bool:
        """True if `read` would not wait."""
        ...

    @property
    def token_ids(self) -> torch.Tensor | None:
        """The tokens where they were drawn: int64 [draws] on the device; None if rank 0's host decides them."""
        ...

    def read(self) -> Float64Array:
        """Wait for the shard's best (score, id) of each draw, and return them: float64 [draws, 2]."""
        ...


class ShardSampler(Protocol):
    """Implemented by HostSampler and device.DeviceSampler; both draw the same tokens up to rounding of near ties."""

    @property
    def name(self) -> str:
        """Name for reports."""
        ...

    def start(
        self,
        rows: Sequence[SamplingRow],
        logits: torch.Tensor,
        begin: int,
        *,
        is_whole: bool = False,
        unknown: UnknownTokens | None = None,
    ) -> StartedDraws:
        """Ask for the shard's part of each draw.

        `logits` is float32 [draws, shard rows], the first column being vocabulary row `begin`; there is at least one
        column. It stays unchanged. With `is_whole` the shard is the whole vocabulary, and filters are applied; draws
        that have some get no meaning otherwise. `unknown` is for penalties of a whole shard. Raises ProtocolError when
        a mask is shorter than the vocabulary.
        """
        ...

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Return a copy of some rows on the host."""
        ...


class HostSampler:
    """ShardSampler for logits on the host; others are copied there whole."""

    name = "host"

    def __init__(self, best_of: BestDraws = noisy_best) -> None:
        """Create a sampler by torch, or by the native kernel."""
        self._best_of = best_of

    def start(
        self,
        rows: Sequence[SamplingRow],
        logits: torch.Tensor,
        begin: int,
        *,
        is_whole: bool = False,
        unknown: UnknownTokens | None = None,  # noqa: ARG002
    ) -> StartedDraws:
        """As ShardSampler.start."""
        begun = partial(best_of_shard, logits.to(HOST), rows, begin, is_whole=is_whole, best_of=self._best_of)
        return _HostDraws(begun)

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """As ShardSampler.to_host."""
        return take_rows(logits.to(HOST), chosen)


@dataclass(frozen=True, slots=True)
class _HostDraws:
    """StartedDraws that are computed when they are read."""

    read: Callable[[], Float64Array]
    is_here: bool = True
    token_ids: None = None


HOST_SAMPLER: Final = HostSampler()
