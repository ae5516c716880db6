"""Rendezvous: how the ranks of an epoch meet and agree, before and while they make groups.

Rank 0 hosts the epoch's store, on a socket that every rank binds before it says Hello. So the address in Hello stays
bound until the store runs on it, and nobody else can take the port. The socket listens only once the store runs: until
then others are refused and try again, instead of hanging on a store that never answers. All waits are short polls, so
an Abort ends them. Only when all ranks have met do they enter Gloo, which cannot be interrupted.

What one rank alone can fail at (shared memory, a missing library) ends in a vote (`Agreement`): all ranks raise or all
take the other way, and none is left waiting.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]  # as below; others take it from here
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs omit them

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.gloo_exchange import GlooRounds, GlooWaits
from hetero_worker.distributed.shm_exchange import AREA_BYTES
from hetero_worker.distributed.shm_segment import SHM_FOLDER
from hetero_worker.distributed.staging import PlainStaging, Staging
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout
from hetero_worker.memory.streams import HOST
from hetero_worker.native.build import EXCHANGE_LIBRARY

POLL_S: Final = 0.01
"""Interval at which whoever waits for others checks that the epoch goes on."""
_BACKLOG: Final = 128
_CONNECT: Final = timedelta(seconds=2)
"""Longest single try to connect."""
_GLOO_GRACE_S: Final = 2.0
"""Gloo waits this much longer than the exchange, so that the exchange is the one to name the late rank."""
_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One rank's place in an epoch, and how its group is to be made."""

    epoch: int
    rank: int
    world_size: int
    store_address: str
    kind_asked: ranks_pb2.ExchangeKind.ValueType
    """SHM: shared memory if all ranks can, else as TCP. TCP: native TCP if all ranks can, else Gloo. GLOO: Gloo."""
    segment_name: str
    timeout_s: float
    host: str
    """This machine's address on the network that ranks meet on: nothing listens on another."""
    num_gpu_ranks: int = 0
    """Ranks [0, num_gpu_ranks) compute on GPUs."""
    device: torch.device = HOST
    """Device that this rank computes on."""
    staging: Staging = field(default_factory=PlainStaging)
    """Copies between that device and the host."""
    device_backend: str | None = None
    """torch's backend among GPU ranks: "nccl", or "gloo" for pseudo-GPU ranks; None on host cores."""
    shm_folder: Path = SHM_FOLDER
    area_bytes: int = AREA_BYTES
    native_library: Path = EXCHANGE_LIBRARY
    """Library for the exchanges through shared memory and over TCP."""

    @property
    def is_gpu_rank(self) -> bool:
        """True if this rank computes on a GPU."""
        return self.rank < self.num_gpu_ranks

    @property
    def gloo_timeout(self) -> timedelta:
        """Timeout of Gloo process groups."""
        return timedelta(seconds=self.timeout_s + _GLOO_GRACE_S)


class StoreListener:
    """Bound socket on `host`, on a port that the system chooses. It listens once it is handed over.

    The store of rank 0 takes it over, and so does the TCP exchange of each rank with one of its own.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._socket: socket.socket | None = None

    def open(self) -> str:
        """Bind, and return "host:port". Raises ExchangeError when the host is no address of this machine."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))
        except OSError as error:
            listener.close()
            raise ExchangeError(
                f"--store-host {self._host}: cannot listen: {error.strerror}; give an address of this machine"
            ) from error
        self._socket = listener
        return format_address(self._host, listener.getsockname()[1])

    def detach(self) -> int:
        """Listen, and hand over the file descriptor, which the caller closes."""
        if self._socket is None:
            raise ExchangeError("the store's socket is not open")
        listener, self._socket = self._socket, None
        listener.listen(_BACKLOG)
        return listener.detach()

    def close(self) -> None:
        """Close the socket unless it was handed over. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def format_address(host: str, port: int) -> str:
    """Return "host:port", or "[host]:port" for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises ExchangeError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ExchangeError(f"store_address {address!r} is no host:port")
    return host.strip("[]"), int(port)


def meet_over_gloo(
    request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]
) -> tuple[PrefixStore, dist.ProcessGroup]:
    """Meet all ranks in the epoch's store, and make the Gloo process group of all.

    Raises ExchangeTimeout naming the ranks that did not come, ExchangeAborted, ExchangeError.
    """
    interface = _interface_of(request.host)
    store = _open_store(request, listener, aborted)
    os.environ[_GLOO_INTERFACE] = interface  # Gloo takes its interface from nowhere else
    try:
        dist.init_process_group(
            "gloo", store=store, rank=request.rank, world_size=request.world_size, timeout=request.gloo_timeout
        )
    except RuntimeError as error:
        raise ExchangeError(f"epoch {request.epoch}: Gloo group: {error}") from error
    if (world := dist.group.WORLD) is None:
        raise ExchangeError("the Gloo group is gone")
    return store, world


def _interface_of(host: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    raise ExchangeError(f"--store-host {host}: no network interface of this machine has this address")


def _open_store(request: GroupRequest, listener: StoreListener, aborted: Callable[[], bool]) -> PrefixStore:
    """Host (rank 0) or join the store, whose keys are the epoch's own, and wait for all ranks."""
    address = request.store_address
    host, port = parse_address(address)
    wait = Wait(request.timeout_s, aborted)
    try:
        if request.rank == 0:
            store = TCPStore(
                host, port, is_master=True, timeout=_CONNECT, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        else:
            _await_listening(host, port, wait)
            store = TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=request.timeout_s))
        shared = PrefixStore(f"epoch-{request.epoch}", store)
        _await_all(shared, "here", rank=request.rank, world_size=request.world_size, wait=wait)
    except RuntimeError as error:  # torch's DistError
        reason = str(error).partition("\n")[0]
        raise ExchangeError(f"rendezvous store {address}: {reason}") from error
    return shared


def _await_listening(host: str, port: int, wait: Wait) -> None:
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT.total_seconds()).close()
            return
        except OSError:
            wait.pause("rank 0")


class Wait:
    """One bounded wait, which begins now, in polls that an Abort ends."""

    def __init__(self, timeout_s: float, aborted: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._aborted = aborted

    def check(self, missing: str) -> None:
        """Raise ExchangeAborted after an Abort, and ExchangeTimeout that names who is missing when the time is over."""
        if self._aborted():
            raise ExchangeAborted("the epoch was aborted while ranks were meeting")
        if time.monotonic() > self._deadline_s:
            raise ExchangeTimeout(f"{missing} did not come to the rendezvous within {self._timeout_s:g} s")

    def pause(self, missing: str) -> None:
        """Sleep for one poll. Raises as `check`."""
        self.check(missing)
        time.sleep(POLL_S)


def _await_all(store: PrefixStore, meeting: str, *, rank: int, world_size: int, wait: Wait) -> None:
    """Wait until every rank is at the meeting, whose name is used once. Raises as Wait.check, and RuntimeError."""
    store.set(f"{meeting}-{rank}", "here")
    missing = list(range(world_size))
    while missing := [peer for peer in missing if not store.check([f"{meeting}-{peer}"])]:
        wait.pause(f"rank(s) {', '.join(map(str, missing))}")


class Agreement:
    """One rank's part in votes and meetings of a forming group, over Gloo and the store.

    Every method but `abort` is a round that all ranks take part in, in one order; an abort of the epoch ends it. A vote
    is one round of a few bytes per rank; `texts` takes two.
    """

    def __init__(
        self, request: GroupRequest, store: PrefixStore, world: dist.ProcessGroup, *, aborted: Callable[[], bool]
    ) -> None:
        self._store = store
        self._rank = request.rank
        self._world_size = request.world_size
        self._timeout_s = request.timeout_s
        self._waits = GlooWaits(timeout_s=request.timeout_s, aborted=aborted)
        self._rounds = GlooRounds(world, tuple(range(request.world_size)), rank=request.rank, waits=self._waits)
        self._meetings = 0

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. From any thread."""
        self._waits.abort()

    @property
    def is_aborted(self) -> bool:
        """True after an abort of the epoch."""
        return self._waits.is_aborted

    def meet(self) -> None:
        """Wait for all ranks before they enter something that cannot be interrupted.

        Raises ExchangeAborted, ExchangeTimeout, ExchangeError.
        """
        self._meetings += 1
        wait = Wait(self._timeout_s, lambda: self.is_aborted)
        try:
            meeting = f"meeting-{self._meetings}"
            _await_all(self._store, meeting, rank=self._rank, world_size=self._world_size, wait=wait)
        except RuntimeError as error:  # torch's DistError: rank 0, which hosts the store, is gone
            raise ExchangeError(f"a peer left while the group was forming: {error}") from error

    def ranks_voting_no(self, *, vote: bool) -> list[int]:
        """Vote, and return the ranks that voted no, ascending."""
        votes = self._rounds.all_gather(torch.tensor([vote], dtype=torch.int64), [1] * self._world_size)
        return [rank for rank, ballot in enumerate(votes) if not ballot.item()]

    def texts(self, text: str) -> list[str]:
        """Return every rank's text in rank order."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self._rounds.all_gather(torch.tensor([len(mine)], dtype=torch.int64), [1] * self._world_size)
        gathered = self._rounds.all_gather(mine, [int(size.item()) for size in sizes])
        return [bytes(letters.tolist()).decode() for letters in gathered]

    def problem(self, text: str) -> str:
        """Return which ranks have a problem and the first one's, the same on every rank; empty if none has one."""
        problems = {rank: problem for rank, problem in enumerate(self.texts(text)) if problem}
        if not problems:
            return ""
        first = next(iter(problems.values()))
        return f"rank(s) {', '.join(map(str, problems))}: {first}"

    def agree(self, problem: ExchangeError | None, action: str) -> None:
        """Raise ExchangeError on all ranks if one has a problem: there its own, elsewhere one that names the rank."""
        failed = self.ranks_voting_no(vote=problem is None)
        if problem is not None:
            raise problem
        if failed:
            raise ExchangeError(f"rank(s) {failed} could not {action}; the reason is in their logs")
