"""GroupCoordinator: every group of an epoch, made by one function, on all ranks, in one order.

    rendezvous store → Gloo over all ranks → the host exchange: agree on its kind, probe it → device group of the GPU
    ranks → (measure) … a plan → its subgroups and links on the host → its device subgroups and device links

Groups of the host are collective over the world: a rank that skipped one, or made it earlier, would hang the others. So
nothing else in the worker makes a group. Those of devices are made by their members alone (device_group.py).

Teardown is the reverse: devices' links and groups, the host exchange, Gloo, and the store with it. It is bounded, and
leaves the process able to form the next epoch. A group of one rank has no process group and no socket.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil
import torch
import torch.distributed as dist

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.company import Round
from hetero_worker.distributed.control import Control
from hetero_worker.distributed.device_groups import DeviceGroups
from hetero_worker.distributed.direct_links import direct_links
from hetero_worker.distributed.exchange import Exchange, HostExchange, LocalExchange
from hetero_worker.distributed.group_request import GroupRequest
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.host_groups import HostGroups
from hetero_worker.distributed.measuring import ExchangeTimes, Times, measure_all_reduce
from hetero_worker.distributed.rank_order import in_rank_order
from hetero_worker.distributed.routes import NO_ROUTES, Routes, device_routes_of, host_part, routes_of
from hetero_worker.distributed.staging import staging_for
from hetero_worker.distributed.store import PrefixStore, StoreListener, open_store
from hetero_worker.errors import ExchangeError

__all__ = ["GroupCoordinator", "GroupRequest", "form_group"]

_log = logging.getLogger(__name__)

_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_TEARDOWN_S: Final = 3.0
TURNS: Final = 8
"""More turns would take too long; so far apart in rank order, ranks mostly are on different hosts."""


@dataclass(frozen=True, slots=True)
class _Formed:
    """What a group of several ranks consists of before there is a plan."""

    control: Control
    host: HostGroups
    devices: DeviceGroups
    first: HostExchange
    """Rounds of all ranks, and of those that meet on the host."""


class GroupCoordinator:
    """The groups of one epoch on one rank. One thread calls; any thread may abort."""

    def __init__(self, request: GroupRequest, formed: _Formed | None) -> None:
        """`formed` is None in a group of one rank."""
        self._request = request
        self._formed = formed
        self._is_closed = False

    @property
    def epoch(self) -> int:
        return self._request.epoch

    @property
    def num_ranks(self) -> int:
        return self._request.world_size

    @property
    def kind(self) -> ranks_pb2.ExchangeKind.ValueType:
        """The host exchange that stands."""
        return self._request.kind_asked if self._formed is None else self._formed.host.kind

    @property
    def exchange_reason(self) -> str:
        """Why it is not the one that was asked for; empty if it is; the same on every rank."""
        return "" if self._formed is None else self._formed.host.reason

    def measure(self) -> ExchangeTimes:
        """What an all-reduce takes, on the host and among GPU ranks. Collective over all ranks; before `connect`."""
        if self._formed is None:
            return ExchangeTimes()
        formed, request = self._formed, self._request
        self.meet()
        host: Times = ()
        device: Times = ()
        if (host_round := self.host_round()) is not None:
            host = measure_all_reduce(host_round, device=torch.device("cpu"))
        if (group := formed.devices.everyone) is not None:
            device = measure_all_reduce(group.all_reduce, device=request.device, synchronize=formed.devices.synchronize)
        return ExchangeTimes(host, device)

    def meet(self) -> None:
        """Wait for all ranks, so that they begin what follows at once. Collective; a round of a few bytes."""
        if self._formed is not None:
            self._formed.first.all_reduce(torch.zeros(1), range(self._request.world_size))

    def all_can(self, can: bool) -> bool:
        """Whether all ranks say so. Collective."""
        return can if self._formed is None else not self._formed.control.ranks_voting_no(vote=can)

    def host_round(self) -> Round | None:
        """Sums a tensor over the ranks that meet on the host, all of which must call it as often. None where this rank
        is not one of several. Before `connect`."""
        meeting = self._meeting
        if self._formed is None or self._request.rank not in meeting or len(meeting) < 2:
            return None
        sums = self._formed.first.among(meeting)
        return lambda tensor: sums.all_reduce(tensor, meeting)

    def in_turn(self, work: Callable[[], float]) -> float:
        """Do `work` while other ranks wait: one after another, or every TURNS-th rank at once. Collective."""
        if self._formed is None:
            return work()
        result = 0.0
        for turn in range(min(TURNS, self._request.world_size)):
            self.meet()
            if self._request.rank % TURNS == turn:
                result = work()
        self.meet()
        return result

    def connect(self, plan: ShardPlan, *, batch_invariant: bool = False) -> Exchange:
        """What a decoder with this plan, and the sampler, exchange through. Collective over all ranks, in one order.

        `batch_invariant`: sums among GPU ranks are in rank order, too, as those on the host always are. May be called
        again, with another plan: the exchange before is closed. Costs a segment, or process groups, for what the plan
        needs and no plan before it had; nothing for a group of one. Raises ExchangeError, on every rank.
        """
        num_gpu_ranks = self._request.num_gpu_ranks
        devices = device_routes_of(plan, num_gpu_ranks) if num_gpu_ranks else NO_ROUTES
        return self.connect_routes(routes_of(plan, num_gpu_ranks), devices, batch_invariant=batch_invariant)

    def connect_routes(
        self, routes: Routes, device_routes: Routes = NO_ROUTES, *, batch_invariant: bool = False
    ) -> Exchange:
        """As `connect`, by what a plan needs."""
        if self._formed is None:
            return LocalExchange()
        host = self._formed.host.make(routes)
        if not self._request.num_gpu_ranks:
            return host
        self._formed.devices.make(device_routes)
        _log.info("epoch=%d rank=%d groups: %s", self.epoch, self._request.rank, self._table())
        staging = staging_for(self._request.device)
        groups = self._formed.devices.groups
        return HierarchicalExchange(
            host,
            num_gpu_ranks=self._request.num_gpu_ranks,
            groups=in_rank_order(groups) if batch_invariant else groups,
            links=self._formed.devices.links,
            staging=staging,
            host_links=direct_links(host, staging) if self._is_gpu_rank else None,
        )

    def abort(self) -> None:
        """Make blocked and later calls of every kind raise ExchangeAborted. From any thread; does not block."""
        if self._formed is not None:
            self._formed.control.abort()
            self._formed.devices.abort()
            self._formed.first.abort()
            if (exchange := self._formed.host.exchange) is not None:
                exchange.abort()

    def close(self) -> None:
        """Free all groups, in order. Idempotent.

        Raises ExchangeError when they cannot be left in time (a collective that cannot be interrupted): the process is
        then of no more use.
        """
        if self._formed is not None and not self._is_closed:
            self._is_closed = True
            self._formed.control.abort()
            self._formed.devices.stop()
            self._formed.host.close()
            _leave(self._formed.devices, self.epoch)

    @property
    def _is_gpu_rank(self) -> bool:
        return self._request.rank < self._request.num_gpu_ranks

    @property
    def _meeting(self) -> tuple[int, ...]:
        """Ranks that meet on the host."""
        return host_part(tuple(range(self._request.world_size)), self._request.num_gpu_ranks)

    def _table(self) -> str:
        return "" if self._formed is None else f"{self._formed.host.table}; {self._formed.devices.table}"


def form_group(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> GroupCoordinator:
    """Meet the other ranks and make the epoch's groups.

    `listener` is the socket whose address this rank told in Hello; it is used up. `aborted` is polled. Raises
    ExchangeAborted, ExchangeTimeout, ExchangeError, and leaves nothing behind.
    """
    if request.world_size == 1:
        listener.close()
        return GroupCoordinator(request, None)
    devices = DeviceGroups(request)
    try:
        store = _init_gloo(request, listener, aborted)
        formed = _form(request, store, devices, aborted)
    except BaseException:
        devices.stop()
        with suppress(ExchangeError):
            _leave(devices, request.epoch)
        raise
    finally:
        listener.close()
    coordinator = GroupCoordinator(request, formed)
    _log.info(
        "epoch=%d rank=%d formed: world_size=%d gpu_ranks=%d exchange=%s store=%s",
        request.epoch, request.rank, request.world_size, request.num_gpu_ranks,
        ranks_pb2.ExchangeKind.Name(coordinator.kind), request.store_address,
    )  # fmt: skip
    return coordinator


def _form(request: GroupRequest, store: PrefixStore, devices: DeviceGroups, aborted: Callable[[], bool]) -> _Formed:
    world = dist.group.WORLD
    if world is None:
        raise ExchangeError("the Gloo group is gone")
    control = Control(
        world,
        store,
        rank=request.rank,
        world_size=request.world_size,
        timeout_s=request.timeout_s,
        aborted=aborted,
    )
    host = HostGroups(request, world, control)
    meeting = host_part(tuple(range(request.world_size)), request.num_gpu_ranks)
    first = host.form(Routes((meeting,)) if 1 < len(meeting) < request.world_size else NO_ROUTES)
    control.meet()
    devices.form(store, control)
    return _Formed(control, host, devices, first)


def _init_gloo(request: GroupRequest, listener: StoreListener, aborted: Callable[[], bool]) -> PrefixStore:
    interface = _interface_of(request.host)
    store = open_store(
        address=request.store_address,
        listener=listener,
        epoch=request.epoch,
        rank=request.rank,
        world_size=request.world_size,
        timeout_s=request.timeout_s,
        aborted=aborted,
    )
    os.environ[_GLOO_INTERFACE] = interface  # Gloo takes its interface from nowhere else
    try:
        dist.init_process_group(
            backend="gloo",
            store=store,
            rank=request.rank,
            world_size=request.world_size,
            timeout=request.gloo_timeout,
        )
    except RuntimeError as error:
        raise ExchangeError(f"epoch {request.epoch}: Gloo group: {error}") from error
    return store


def _interface_of(host: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    raise ExchangeError(f"--store-host {host}: no network interface of this machine has this address")


def _leave(devices: DeviceGroups, epoch: int) -> None:
    """Device groups first, for they need the store; then Gloo, and the store with it."""

    def leave() -> None:
        devices.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    worker = threading.Thread(target=leave, name=f"leave-epoch-{epoch}", daemon=True)
    worker.start()
    worker.join(_TEARDOWN_S)
    if worker.is_alive():
        raise ExchangeError(f"epoch {epoch}: process groups could not be left within {_TEARDOWN_S:g} s")
