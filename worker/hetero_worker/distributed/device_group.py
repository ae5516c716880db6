"""DeviceGroup: collectives among GPU ranks, on their devices.

`TorchDeviceGroup` is one over a backend of torch's: NCCL, or Gloo for pseudo-GPU ranks, whose device is the host. Its
members alone make it, on a prefix of the epoch's store: a rank on host cores never touches NCCL, and nothing is
collective over the world. Tensors stay on the device; with NCCL a call returns once the work is given to the device,
and what the caller gives to the device afterwards sees the result. An abort ends the work (NCCL), or the wait for it
(Gloo, which cannot be interrupted).

Sums round as the backend does, at every addition in the tensor's own type, and are bitwise the same on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from hetero_worker.distributed.exchange import Arrived, PendingTensor
from hetero_worker.distributed.gloo_links import PendingBroadcast
from hetero_worker.distributed.gloo_rounds import GlooWaits
from hetero_worker.distributed.routes import Link, Ranks
from hetero_worker.distributed.store import PrefixStore
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout

_log = logging.getLogger(__name__)

NCCL: Final = "nccl"
GLOO: Final = "gloo"
MAX_UNSENT: Final = 16
"""Tensors that may be on their way over one device link: each is a copy in the device's memory."""
_NCCL_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_POLL_S: Final = 20e-6


class DeviceGroup(Protocol):
    """Ranks are named by their number in the whole group. Tensors are contiguous and on the rank's device.

    All of the group's ranks take part in every call, in one order. n ranks, b bytes: each says what it costs.
    """

    @property
    def ranks(self) -> Ranks: ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place, the sum over all ranks. About 2·b over each rank's link; 2·(n-1) latencies (ring) or fewer."""
        ...

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """In place at the root, the sum over all ranks; elsewhere what the tensor holds is undefined. b a link."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """In place, the source's. b a link."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; all of one shape. (n-1)·b a link."""
        ...

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. From any thread; never blocks."""
        ...

    def close(self) -> None:
        """Free the backend's resources; may block as long as work that was left behind."""
        ...


class DeviceWaits(Protocol):
    """How a rank waits for work that it gave to a backend."""

    timeout_s: float

    def abort(self) -> None: ...

    def check_open(self) -> None: ...

    def deadline(self) -> float: ...

    def await_work(self, work: dist.Work, deadline: float) -> bool:
        """Until its result can be used by what comes next; False when the time is over."""
        ...

    def await_sent(self, work: dist.Work, deadline: float) -> bool:
        """Until the work itself is done; False when the time is over."""
        ...


class HostWaits(GlooWaits):
    """Of pseudo-GPU ranks."""

    def await_sent(self, work: dist.Work, deadline: float) -> bool:
        return self.await_work(work, deadline)


class StreamWaits:
    """Of CUDA devices: the device waits for the work, in the order of its stream, the thread does not."""

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True

    def check_open(self) -> None:
        if self._aborted:
            raise ExchangeAborted("the epoch was aborted")

    def deadline(self) -> float:
        return time.monotonic() + self.timeout_s

    def await_work(self, work: dist.Work, deadline: float) -> bool:  # noqa: ARG002
        try:
            work.wait()
        except RuntimeError as error:
            self.check_open()
            raise ExchangeError(f"the exchange among GPU ranks failed: {error}") from error
        self.check_open()
        return True

    def await_sent(self, work: dist.Work, deadline: float) -> bool:
        while not work.is_completed():
            self.check_open()
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


class TorchDeviceGroup:
    """DeviceGroup over a backend; see the module."""

    def __init__(self, backend: Any, ranks: Ranks, *, waits: DeviceWaits) -> None:
        self._backend = backend
        self._ranks = ranks
        self._waits = waits

    @classmethod
    def make(
        cls, kind: str, ranks: Ranks, *, rank: int, store: PrefixStore, timeout_s: float, device: torch.device
    ) -> TorchDeviceGroup:
        """Meet the other members; collective over `ranks` alone. Raises ExchangeError."""
        own = PrefixStore(f"device-{'-'.join(map(str, ranks))}", store)
        make_backend = _make_nccl if kind == NCCL else _make_gloo
        try:
            backend = make_backend(own, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s), device)
        except RuntimeError as error:
            raise ExchangeError(f"device group ({kind}) of ranks {list(ranks)}: {error}") from error
        waits: DeviceWaits = StreamWaits(timeout_s=timeout_s) if kind == NCCL else HostWaits(timeout_s=timeout_s)
        return cls(backend, ranks, waits=waits)

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    @property
    def waits(self) -> DeviceWaits:
        return self._waits

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._do(lambda backend: backend.allreduce([tensor], dist.AllreduceOptions()))

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        options = dist.ReduceOptions()
        options.rootRank = self._ranks.index(root)
        self._do(lambda backend: backend.reduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self._finish(self.start_broadcast(tensor, source))

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Bytes travel, so that the type does not matter."""
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(source)
        return self._start(lambda backend: backend.broadcast([tensor.view(-1).view(torch.uint8)], options))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self._ranks]
        self._do(lambda backend: backend.allgather([gathered], [tensor]))
        return gathered

    def abort(self) -> None:
        self._waits.abort()
        if isinstance(self._waits, StreamWaits):  # what hangs on the device ends; on a thread, for that may take long
            threading.Thread(target=self._abort_backend, name="abort-device-group", daemon=True).start()

    def close(self) -> None:
        backend, self._backend = self._backend, None
        self._waits.abort()
        if backend is not None and isinstance(self._waits, StreamWaits):
            backend.abort()  # not shutdown: that waits for peers, which may be gone

    def _do(self, start: Callable[[Any], dist.Work]) -> None:
        self._finish(self._start(start))

    def _start(self, start: Callable[[Any], dist.Work]) -> dist.Work:
        self._waits.check_open()
        try:
            return start(self._backend)
        except RuntimeError as error:
            self._waits.check_open()
            raise ExchangeError(f"the exchange among GPU ranks {list(self._ranks)} failed: {error}") from error

    def _finish(self, work: dist.Work) -> None:
        if not self._waits.await_work(work, self._waits.deadline()):
            raise ExchangeTimeout(
                f"the exchange among GPU ranks {list(self._ranks)} was not done within {self._waits.timeout_s:g} s"
            )

    def _abort_backend(self) -> None:
        backend = self._backend
        if backend is not None:
            with contextlib.suppress(RuntimeError):
                backend.abort()


class DeviceLink:
    """One rank's end of a link between GPU ranks: a broadcast in a group of its own, as GlooLink has it. In order."""

    def __init__(self, group: TorchDeviceGroup, link: Link) -> None:
        self._group = group
        self._link = link
        self._unsent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        waits = self._group.waits
        waits.check_open()
        deadline = waits.deadline()
        while self._unsent and (len(self._unsent) >= MAX_UNSENT or self._unsent[0][0].is_completed()):
            if not waits.await_sent(self._unsent.popleft()[0], deadline):
                raise ExchangeTimeout(self._late(self._link.receivers, "take what was sent to them"))
        if tensor.numel():
            copy = tensor.clone()
            self._unsent.append((self._group.start_broadcast(copy, self._link.source), copy))

    def receive(self, out: torch.Tensor) -> PendingTensor:
        self._group.waits.check_open()
        if not out.numel():
            return Arrived(out)
        return PendingBroadcast(self.await_receipt, out, self._group.start_broadcast(out, self._link.source))

    def await_receipt(self, work: dist.Work) -> None:
        waits = self._group.waits
        waits.check_open()
        if not waits.await_work(work, waits.deadline()):
            raise ExchangeTimeout(self._late((self._link.source,), "send"))

    def _late(self, ranks: Sequence[int], did_not: str) -> str:
        timeout_s = self._group.waits.timeout_s
        return f"rank(s) {', '.join(map(str, ranks))} did not {did_not} within {timeout_s:g} s"


def _make_gloo(store: PrefixStore, place: int, size: int, timeout: timedelta, _device: torch.device) -> Any:
    return dist.ProcessGroupGloo(store, place, size, timeout)


def _make_nccl(store: PrefixStore, place: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    # A peer that is lost must not take this process, and its weights, with it: the epoch's abort ends the work.
    os.environ.setdefault(_NCCL_ERROR_HANDLING, "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        backend = dist.ProcessGroupNCCL(store, place, size, options)
        backend.eager_connect_single_device(device)
    return backend
