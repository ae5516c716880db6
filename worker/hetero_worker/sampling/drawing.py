"""ShardDrawing: how a rank comes by what it tells of its vocabulary rows, which is where its logits lie's to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from hetero_worker.platforms.base import HOST
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import ShardDraws, draws_of_shard, take_rows


class ShardDrawing(Protocol):
    """Implemented by HostDrawing and device_draws.DeviceDrawing, which tell the same to the bit but for nuclei's sums.

    `logits` is float32 [draws, shard rows] where the rank computed it, the shard's first row being vocabulary row
    `begin`; it stays as it is.
    """

    @property
    def name(self) -> str:
        """As reports have it."""
        ...

    def draw(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> ShardDraws:
        """What the shard tells of each draw; it has at least one row."""
        ...

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """A copy of some rows on the host."""
        ...

    def summary(self) -> str | None:
        """What was drawn since the last call, and how; None if there is nothing to tell."""
        ...


class HostDrawing:
    """Implements ShardDrawing for logits on the host; others are copied there whole."""

    name = "host"

    def draw(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> ShardDraws:
        return draws_of_shard(logits.to(HOST), rows, begin)

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        return take_rows(logits.to(HOST), chosen)

    def summary(self) -> str | None:
        return None


HOST_DRAWING: Final = HostDrawing()
