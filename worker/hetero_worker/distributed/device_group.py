"""DeviceGroup: collectives among GPU ranks, on their devices.

`TorchDeviceGroup` is one over a backend of torch's: NCCL, or Gloo for pseudo-GPU ranks, whose device is the host. Only
its members make it, on a prefix of the epoch's store: a rank on host cores never touches NCCL, and nothing is
collective over the world. Tensors stay on the device. With NCCL a call returns once the device has the work, and later
work of the caller sees the result. An abort ends the work (NCCL) or the wait for it (Gloo, which cannot be
interrupted).

Sums round as the backend does, at every addition in the tensor's own type, and are bitwise the same on all ranks. But a
backend cuts a tensor into pieces by its size and adds each piece in another order of ranks, so a row's sum depends on
the rows beside it. `RankOrderGroup` adds in rank order instead, for batch-invariant groups.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from hetero_worker.distributed.exchange import sum_in_order
from hetero_worker.distributed.gloo_exchange import GlooWaits
from hetero_worker.distributed.rendezvous import PrefixStore
from hetero_worker.distributed.routes import Ranks
from hetero_worker.errors import ExchangeError, ExchangeTimeout

NCCL: Final = "nccl"
CONNECTING_SIZES: Final = (1, 4 * 1024**2)
"""Elements of float32: what a decode step sums, and what a large prefill does."""
_NCCL_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_POLL_S: Final = 20e-6
_ORDERED_ANYHOW: Final = 2
"""Number of ranks whose order does not matter: x + y is y + x, and both are rounded once."""


class DeviceGroup(Protocol):
    """Collectives among some GPU ranks.

    Ranks are named by their number in the whole group. Tensors are contiguous and on the rank's device. All of the
    group's ranks take part in every call, in one order. Costs are for n ranks and b bytes.
    """

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks in place. About 2·b over each rank's link; 2·(n-1) latencies (ring) or fewer."""
        ...

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Sum over all ranks in place at the root; elsewhere the tensor becomes undefined. b over each link."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's. b over each link."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor in rank order; all have one shape. (n-1)·b over each link."""
        ...


class StreamWaits(GlooWaits):
    """Waits of a CUDA device: the device waits for the work in the order of its stream, the thread does not."""

    def await_work(self, work: dist.Work, deadline: float) -> bool:  # noqa: ARG002
        """Make the device wait until the work's result can be used. Raises ExchangeAborted, ExchangeError."""
        try:
            work.wait()
        except RuntimeError as error:
            self.check_open()
            raise ExchangeError(f"the exchange among GPU ranks failed: {error}") from error
        self.check_open()
        return True

    def await_sent(self, work: dist.Work, deadline: float) -> bool:
        """Wait until the work is done and its tensor free; return False when the time is over."""
        while not work.is_completed():
            self.check_open()
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


class TorchDeviceGroup:
    """DeviceGroup over a backend of torch's; see the module."""

    def __init__(self, backend: Any, ranks: Ranks, *, waits: GlooWaits, device: torch.device) -> None:
        self._backend = backend
        self._ranks = ranks
        self._device = device
        self._is_nccl = isinstance(waits, StreamWaits)
        self.waits = waits

    @classmethod
    def make(
        cls, kind: str, ranks: Ranks, *, rank: int, store: PrefixStore, timeout_s: float, device: torch.device
    ) -> TorchDeviceGroup:
        """Meet the other members and connect; collective over `ranks` alone. `kind` is "nccl" or "gloo".

        Raises ExchangeError.
        """
        own = PrefixStore(f"device-{'-'.join(map(str, ranks))}", store)
        make_backend = _make_nccl if kind == NCCL else _make_gloo
        try:
            backend = make_backend(own, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s), device)
        except RuntimeError as error:
            raise ExchangeError(f"device group ({kind}) of ranks {list(ranks)}: {error}") from error
        waits = StreamWaits(timeout_s=timeout_s) if kind == NCCL else GlooWaits(timeout_s=timeout_s)
        group = cls(backend, ranks, waits=waits, device=device)
        if kind == NCCL:
            take_memory(group, device)
        return group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks in place, as DeviceGroup.all_reduce."""
        self._do(lambda backend: backend.allreduce([tensor], dist.AllreduceOptions()))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """Sum over all ranks in place at the root, as DeviceGroup.reduce."""
        options = dist.ReduceOptions()
        options.rootRank = self._ranks.index(root)
        self._do(lambda backend: backend.reduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's."""
        self._finish(self.start_broadcast(tensor, source))

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Start a broadcast of bytes, so that any type can travel."""
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        return self._start(lambda backend: backend.broadcast([tensor.view(-1).view(torch.uint8)], options))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor in rank order."""
        gathered = [torch.empty_like(tensor) for _ in self._ranks]
        self._do(lambda backend: backend.allgather([gathered], [tensor]))
        return gathered

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self._is_nccl:
            torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. From any thread; never blocks."""
        self.waits.abort()
        if self._is_nccl:  # aborting what hangs on the device may take long, so a thread does it
            threading.Thread(target=self._abort_backend, name="abort-device-group", daemon=True).start()

    def close(self) -> None:
        """Free the backend's resources; may block until abandoned work ends."""
        backend, self._backend = self._backend, None
        self.waits.abort()
        if backend is not None and self._is_nccl:
            backend.abort()  # not shutdown: that waits for peers, which may be gone

    def _do(self, start: Callable[[Any], dist.Work]) -> None:
        self._finish(self._start(start))

    def _start(self, start: Callable[[Any], dist.Work]) -> dist.Work:
        self.waits.check_open()
        try:
            return start(self._backend)
        except RuntimeError as error:
            self.waits.check_open()
            raise ExchangeError(f"the exchange among GPU ranks {list(self._ranks)} failed: {error}") from error

    def _finish(self, work: dist.Work) -> None:
        if not self.waits.await_work(work, self.waits.deadline()):
            raise ExchangeTimeout(
                f"the exchange among GPU ranks {list(self._ranks)} was not done within {self.waits.timeout_s:g} s"
            )

    def _abort_backend(self) -> None:
        backend = self._backend
        if backend is not None:
            with contextlib.suppress(RuntimeError):
                backend.abort()


class RankOrderGroup:
    """DeviceGroup on top of another, which sums in rank order.

    Every rank gathers all tensors and adds them in fp32 and ascending rank order, rounded once, as the host's exchanges
    do. That takes (n-1)·b over each rank's link and n·b of its memory; the backend takes 2·b·(n-1)/n and no memory.
    """

    def __init__(self, group: DeviceGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over all ranks in place."""
        sum_in_order(self._group.all_gather(tensor), tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:  # noqa: ARG002
        """Sum over all ranks in place, on every rank: all have the gathered tensors anyway."""
        self.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's."""
        self._group.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor in rank order."""
        return self._group.all_gather(tensor)


def in_rank_order(groups: Mapping[Ranks, DeviceGroup]) -> dict[Ranks, DeviceGroup]:
    """Return the groups, with those of more than two ranks summing in rank order."""
    return {ranks: group if len(ranks) <= _ORDERED_ANYHOW else RankOrderGroup(group) for ranks, group in groups.items()}


def take_memory(group: DeviceGroup, device: torch.device) -> None:
    """Have the group take its memory now, before a rank measures what is left for its KV cache.

    NCCL connects ranks and allocates memory for it at the first use of an algorithm, which depends on the size.
    """
    for num_elements in CONNECTING_SIZES:
        group.all_reduce(torch.zeros(num_elements, device=device))


def _make_gloo(store: PrefixStore, place: int, size: int, timeout: timedelta, _device: torch.device) -> Any:
    return dist.ProcessGroupGloo(store, place, size, timeout)


def _make_nccl(store: PrefixStore, place: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    # A lost peer must not end this process, and its weights with it: the epoch's abort ends the work.
    os.environ.setdefault(_NCCL_ERROR_HANDLING, "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        backend = dist.ProcessGroupNCCL(store, place, size, options)
        backend.eager_connect_single_device(device)
    return backend
