"""GroupCoordinator: makes every group of an epoch, on all ranks, in one order.

    rendezvous store → Gloo over all ranks → the host exchange: agree on its kind, probe it → device group of the GPU
    ranks → (measure) … a plan → its subgroups and links on the host → its device subgroups and device links

Groups of the host are collective over the world: a rank that skipped one, or made it earlier, would hang the others. So
nothing else in the worker makes a group. Members alone make device groups (groups.py).

Teardown is the reverse: devices' links and groups, the host exchange, Gloo, and the store with it. It is bounded, and
leaves the process able to form the next epoch. A group of one rank has no process group and no socket.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.device_group import in_rank_order
from hetero_worker.distributed.exchange import Exchange, HostExchange, LocalExchange
from hetero_worker.distributed.groups import DeviceGroups, HostGroups
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.rendezvous import Agreement, GroupRequest, StoreListener, meet_over_gloo
from hetero_worker.distributed.routes import NO_ROUTES, Routes, device_routes_of, host_part, routes_of
from hetero_worker.distributed.staging import direct_links
from hetero_worker.errors import ExchangeError

_log = logging.getLogger(__name__)

_TEARDOWN_S: Final = 3.0
SIZES: Final = {4 * 1024: 17, 64 * 1024: 9, 1024 * 1024: 5}
"""Repetitions of a measured all-reduce, by its bytes."""
_WARM_UPS: Final = 2
TURNS: Final = 8
"""Number of turns; ranks so far apart in rank order share a turn, since they are mostly on different hosts."""

Round = Callable[[torch.Tensor], None]
"""Sums a host tensor over the ranks that meet on the host; all of them call."""


@dataclass(frozen=True, slots=True)
class _Formed:
    """Parts of a group of several ranks before there is a plan."""

    agreement: Agreement
    host: HostGroups
    devices: DeviceGroups
    first: HostExchange
    """Rounds of all ranks, and of those that meet on the host."""


class GroupCoordinator:
    """Groups of one epoch on one rank. One thread calls; any thread may abort."""

    def __init__(self, request: GroupRequest, formed: _Formed | None) -> None:
        """`formed` is None in a group of one rank."""
        self._request = request
        self._formed = formed
        self._is_closed = False

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._request.epoch

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the group."""
        return self._request.world_size

    def formed(self, *, measure: bool) -> ranks_pb2.Formed:
        """Return the host exchange that stands and, if `measure`, what an all-reduce takes there and among GPU ranks.

        Collective over all ranks, and well under a third of a second where the exchange is fast; before `connect`. All
        ranks measure the same sizes the same number of times, so nobody has to decide how long it goes on.
        """
        if self._formed is None:
            return ranks_pb2.Formed(exchange=self._request.kind_asked)
        formed = ranks_pb2.Formed(exchange=self._formed.host.kind, exchange_reason=self._formed.host.reason)
        if not measure:
            return formed
        self.meet()
        if (host_round := self.host_round()) is not None:
            formed.host_times.extend(_all_reduce_times(host_round, device=torch.device("cpu")))
        if (group := self._formed.devices.everyone) is not None:
            device = self._request.device
            times = _all_reduce_times(group.all_reduce, device=device, synchronize=group.synchronize)
            formed.device_times.extend(times)
        return formed

    def shared_bandwidth(self, read: Callable[[], float]) -> tuple[float, float]:
        """Return what `read` returns (bytes/s) while all ranks read, and while this rank reads alone. Collective.

        Ranks of one host share its memory, so each is slower while others read.
        """
        self.meet()
        together = read()
        return together, self.in_turn(read)

    def meet(self) -> None:
        """Wait for all ranks, so that they begin what follows at once. Collective; a round of a few bytes."""
        if self._formed is not None:
            self._formed.first.all_reduce(torch.zeros(1), range(self._request.world_size))

    def all_can(self, can: bool) -> bool:
        """Return True if all ranks say so. Collective."""
        return can if self._formed is None else not self._formed.agreement.ranks_voting_no(vote=can)

    def host_round(self) -> Round | None:
        """Return a sum over the ranks that meet on the host; None if this rank is not one of several.

        All of these ranks must call the sum the same number of times. Before `connect`.
        """
        meeting = self._meeting
        if self._formed is None or self._request.rank not in meeting or len(meeting) < 2:
            return None
        sums = self._formed.first.among(meeting)
        return lambda tensor: sums.all_reduce(tensor, meeting)

    def in_turn(self, work: Callable[[], float]) -> float:
        """Do `work` and return its result while other ranks wait: every TURNS-th rank at a time. Collective."""
        if self._formed is None:
            return work()
        result = 0.0
        for turn in range(min(TURNS, self._request.world_size)):
            self.meet()
            if self._request.rank % TURNS == turn:
                result = work()
        self.meet()
        return result

    def connect(
        self,
        plan: ShardPlan,
        *,
        draft_plan: ShardPlan | None = None,
        inputs_everywhere: bool = False,
        batch_invariant: bool = False,
    ) -> Exchange:
        """Return the exchange of a decoder with this plan, and of the sampler. Collective over all ranks, in one order.

        `draft_plan`: of a draft model that sums over the same exchange, and needs no links; else PlanError.
        `inputs_everywhere`: all stages need embeddings, as for `input_ranks`.
        `batch_invariant`: sums among GPU ranks are in rank order, too, as those on the host always are. May be called
        again with another plan; that closes the exchange before. Costs a segment or process groups for what this plan
        needs and no earlier plan had; nothing for a group of one. Raises ExchangeError, on every rank.
        """
        num_gpu_ranks = self._request.num_gpu_ranks
        routes, devices = routes_of(plan, num_gpu_ranks, inputs_everywhere=inputs_everywhere), NO_ROUTES
        if num_gpu_ranks:
            devices = device_routes_of(plan, num_gpu_ranks, inputs_everywhere=inputs_everywhere)
        if draft_plan is not None:
            routes = routes.beside(routes_of(draft_plan, num_gpu_ranks))
            devices = devices.beside(device_routes_of(draft_plan, num_gpu_ranks))
        return self.connect_routes(routes, devices, batch_invariant=batch_invariant)

    def connect_routes(
        self, routes: Routes, device_routes: Routes = NO_ROUTES, *, batch_invariant: bool = False
    ) -> Exchange:
        """Return the exchange for these routes, as `connect` does for a plan's."""
        if self._formed is None:
            return LocalExchange()
        host = self._formed.host.make_exchange(routes)
        if not self._request.num_gpu_ranks:
            return host
        self._formed.devices.make_missing(device_routes)
        table = f"{self._formed.host.table}; {self._formed.devices.table}"
        _log.info("epoch=%d rank=%d groups: %s", self.epoch, self._request.rank, table)
        staging = self._request.staging
        groups = self._formed.devices.groups
        return HierarchicalExchange(
            host,
            num_gpu_ranks=self._request.num_gpu_ranks,
            groups=in_rank_order(groups) if batch_invariant else groups,
            links=self._formed.devices.links,
            staging=staging,
            host_links=direct_links(host, staging) if self._request.is_gpu_rank else None,
        )

    def abort(self) -> None:
        """Make blocked and later calls of every kind raise ExchangeAborted. From any thread; does not block."""
        if self._formed is not None:
            self._formed.agreement.abort()
            self._formed.devices.abort()
            self._formed.first.abort()
            if (exchange := self._formed.host.exchange) is not None:
                exchange.abort()

    def close(self) -> None:
        """Free all groups, in order. Idempotent.

        Raises ExchangeError when they cannot be left in time because a collective cannot be interrupted: the process
        cannot form another group then.
        """
        if self._formed is not None and not self._is_closed:
            self._is_closed = True
            self._formed.agreement.abort()
            self._formed.devices.stop()
            self._formed.host.close()
            _leave(self._formed.devices, self.epoch)

    @property
    def _meeting(self) -> tuple[int, ...]:
        """Ranks that meet on the host."""
        return host_part(tuple(range(self._request.world_size)), self._request.num_gpu_ranks)


def form_group(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> GroupCoordinator:
    """Meet the other ranks and make the epoch's groups.

    `listener` is the socket whose address this rank sent in Hello; it is used up. `aborted` is polled. Raises
    ExchangeAborted, ExchangeTimeout, ExchangeError, and leaves nothing behind.
    """
    if request.world_size == 1:
        listener.close()
        return GroupCoordinator(request, None)
    devices = DeviceGroups(request)
    try:
        formed = _form(request, listener, devices, aborted)
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
        ranks_pb2.ExchangeKind.Name(formed.host.kind), request.store_address,
    )  # fmt: skip
    return coordinator


def _form(
    request: GroupRequest, listener: StoreListener, devices: DeviceGroups, aborted: Callable[[], bool]
) -> _Formed:
    store, world = meet_over_gloo(request, listener=listener, aborted=aborted)
    agreement = Agreement(request, store, world, aborted=aborted)
    host = HostGroups(request, world, agreement)
    meeting = host_part(tuple(range(request.world_size)), request.num_gpu_ranks)
    first = host.form(Routes((meeting,)) if 1 < len(meeting) < request.world_size else NO_ROUTES)
    agreement.meet()
    devices.form(store, agreement)
    return _Formed(agreement, host, devices, first)


def _all_reduce_times(
    all_reduce: Round, *, device: torch.device, synchronize: Callable[[], None] = lambda: None
) -> Iterator[ranks_pb2.ExchangeTime]:
    """Yield medians of `all_reduce`, which all ranks call, by ascending size. `synchronize` waits for the device."""
    for size, repeats in SIZES.items():
        tensor, times = torch.zeros(size // torch.float32.itemsize, device=device), []
        for _ in range(_WARM_UPS + repeats):
            synchronize()
            began = time.perf_counter()
            all_reduce(tensor)
            synchronize()
            times.append(time.perf_counter() - began)
        yield ranks_pb2.ExchangeTime(bytes=size, seconds=statistics.median(times[_WARM_UPS:]))


def _leave(devices: DeviceGroups, epoch: int) -> None:
    """Leave device groups first, for they need the store; then Gloo, and the store with it."""

    def leave() -> None:
        devices.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    worker = threading.Thread(target=leave, name=f"leave-epoch-{epoch}", daemon=True)
    worker.start()
    worker.join(_TEARDOWN_S)
    if worker.is_alive():
        raise ExchangeError(f"epoch {epoch}: process groups could not be left within {_TEARDOWN_S:g} s")
