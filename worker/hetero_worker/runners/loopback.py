"""An Exchange that plays all peers itself: for steps that one rank makes alone, to see what they take or give.

What the other ranks would have sent is made up (a constant); what this rank sends is kept as a checksum. So a step
runs as it would in the group, with buffers of the same sizes, but waits for nobody, and its numbers are of no use
but to be compared with those of the same step at another time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor, SendsAtOnce, SumExchange
from hetero_worker.distributed.routes import Link

_PEERS_VALUE: Final = 0.5
_LINK_BYTES: Final = 2 * 1024 * 1024
"""Such as a real link takes."""


class LoopbackExchange(SendsAtOnce):
    """Implements Exchange, for tensors on any device."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self.checksum = 0
        """Of all that this rank has sent."""

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def link_bytes(self) -> int:
        return _LINK_BYTES

    def add(self, tensor: torch.Tensor) -> None:
        """Take the tensor's bits into the checksum."""
        self.checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).cpu().numpy().data, self.checksum)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._share(tensor, is_sender=self._rank in contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._share(tensor, is_sender=self._rank == source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        self.add(tensor)
        gathered = [torch.full((count,), _PEERS_VALUE).to(tensor.dtype) for count in counts]
        gathered[self._rank].copy_(tensor)
        return gathered

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        return _LoopbackSubgroup(self, len(ranks))

    def send(self, tensor: torch.Tensor, link: Link) -> None:  # noqa: ARG002
        self.add(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:  # noqa: ARG002
        return Arrived(out.fill_(_PEERS_VALUE))

    def abort(self) -> None:
        """No call ever blocks."""

    def close(self) -> None:
        """Nothing is held."""

    def _share(self, tensor: torch.Tensor, *, is_sender: bool) -> None:
        if is_sender:
            self.add(tensor)
        else:
            tensor.fill_(_PEERS_VALUE)


class _LoopbackSubgroup:
    """Some of the ranks that a LoopbackExchange plays, this one among them."""

    def __init__(self, whole: LoopbackExchange, world_size: int) -> None:
        self._whole = whole
        self._world_size = world_size

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._whole.all_reduce(tensor, contributors)
