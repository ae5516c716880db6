"""LoopbackExchange: an Exchange that plays all peers itself, for steps that one rank runs alone.

It makes up what the other ranks would send (a constant), and keeps a checksum of what this rank sends. So a step runs
as in the group, with buffers of the same sizes, but waits for nobody. Its numbers serve only to be compared with those
of the same step at another time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch

from hetero_worker.distributed.exchange import Arrived, PendingTensor, SendsAtOnce, SumExchange
from hetero_worker.distributed.routes import Link

_PEERS_VALUE: Final = 0.5
_LINK_BYTES: Final = 2 * 1024 * 1024
"""As many as a real link takes."""


class LoopbackExchange(SendsAtOnce):
    """Exchange with played peers, for tensors on any device."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self.checksum = 0
        """CRC of everything that this rank has sent."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks that are played."""
        return self._world_size

    @property
    def link_bytes(self) -> int:
        """Bytes that a link takes in."""
        return _LINK_BYTES

    def add(self, tensor: torch.Tensor) -> None:
        """Add the tensor's bits to the checksum."""
        self.checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).cpu().numpy().data, self.checksum)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Add a contributor's tensor to the checksum; replace any other by the constant."""
        self._share(tensor, is_sender=self._rank in contributors)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Add the source's tensor to the checksum; replace any other by the constant."""
        self._share(tensor, is_sender=self._rank == source)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's tensor among constants."""
        self.add(tensor)
        gathered = [torch.full((count,), _PEERS_VALUE).to(tensor.dtype) for count in counts]
        gathered[self._rank].copy_(tensor)
        return gathered

    def among(self, ranks: tuple[int, ...]) -> SumExchange:
        """Return an exchange that plays these ranks."""
        return _LoopbackSubgroup(self, len(ranks))

    def send(self, tensor: torch.Tensor, link: Link) -> None:  # noqa: ARG002
        """Add the tensor to the checksum."""
        self.add(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:  # noqa: ARG002
        """Return `out` filled with the constant."""
        return Arrived(out.fill_(_PEERS_VALUE))

    def abort(self) -> None:
        """Return at once: no call ever blocks."""

    def close(self) -> None:
        """Return at once: there is nothing to free."""

    def _share(self, tensor: torch.Tensor, *, is_sender: bool) -> None:
        if is_sender:
            self.add(tensor)
        else:
            tensor.fill_(_PEERS_VALUE)


class _LoopbackSubgroup:
    """Ranks that a LoopbackExchange plays, including this one."""

    def __init__(self, whole: LoopbackExchange, world_size: int) -> None:
        self._whole = whole
        self._world_size = world_size

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        self._whole.all_reduce(tensor, contributors)
