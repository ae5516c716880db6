"""GlooExchange: the exchange for any network, and the reference that ShmExchange is tested against.

Everything is built of one step: those who contribute broadcast their bytes to all, then every rank adds what
it has in ascending rank order. Gloo's own reductions are not used: their order depends on the algorithm.

Gloo cannot be interrupted. A blocked call polls instead: after `abort` it leaves its operation behind and raises
within a poll. What was left behind ends when its sockets break or the group's timeout passes, and until then the
process group cannot be destroyed; whoever cannot wait that long ends the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from hetero_worker.distributed.reduction import check_summable, sum_in_order
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout

_POLL: Final = timedelta(milliseconds=20)


class GlooExchange:
    """HostExchange over a Gloo process group; see the module. One thread calls; any thread may abort."""

    def __init__(self, group: dist.ProcessGroup, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._aborted = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        check_summable(tensor)
        self._share(tensor, sorted(set(contributors)))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._share(tensor, [source])

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        if len(counts) != self._world_size or tensor.numel() != counts[self._rank]:
            raise ValueError(f"counts {list(counts)} do not fit {tensor.numel()} elements of rank {self._rank}")
        gathered = [torch.empty(count, dtype=tensor.dtype) for count in counts]
        gathered[self._rank].copy_(tensor)
        self._send_all(dict(enumerate(gathered)))
        return gathered

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True

    def _share(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        if not contributors or not set(contributors) <= set(range(self._world_size)):
            raise ValueError(f"contributors {contributors} are no ranks of a group of {self._world_size}")
        parts = {rank: tensor if rank == self._rank else torch.empty_like(tensor) for rank in contributors}
        self._send_all(parts)
        if contributors != [self._rank]:
            total = torch.empty_like(tensor)
            sum_in_order([parts[rank] for rank in contributors], total)
            tensor.copy_(total)

    def _send_all(self, parts: Mapping[int, torch.Tensor]) -> None:
        """Every rank's part reaches all. Bytes travel, so that the type does not matter."""
        if self._aborted:
            raise ExchangeAborted("the epoch was aborted")
        deadline = time.monotonic() + self._timeout_s
        pending = {
            source: dist.broadcast(_as_bytes(part), source, group=self._group, async_op=True)
            for source, part in parts.items()
            if part.numel()
        }
        for work in pending.values():
            if work is None:
                raise ExchangeError(f"rank {self._rank} is no member of the process group")
            if not self._await(work, deadline):
                raise ExchangeTimeout(self._late(pending))

    def _await(self, work: dist.Work, deadline: float) -> bool:
        """False when the time is over."""
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # the poll's own timeout, or a failure that is told below
                work.wait(_POLL)
            if self._aborted:
                raise ExchangeAborted("the epoch was aborted while waiting for a peer")
            if time.monotonic() > deadline:
                return work.is_completed()
        try:
            work.wait()
        except RuntimeError as error:
            raise ExchangeError(f"the exchange with a peer failed: {error}") from error
        return True

    def _late(self, pending: Mapping[int, dist.Work | None]) -> str:
        """Gloo forwards along a tree, so a rank that waits behind the late one is named with it."""
        late = [r for r, work in pending.items() if r != self._rank and work and not work.is_completed()]
        peers = f"rank(s) {', '.join(map(str, late))}" if late else "the receiving ranks"
        return f"the exchange with {peers} was not done within {self._timeout_s:g} s"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
