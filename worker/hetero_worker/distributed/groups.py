"""Makes every process group of an epoch: one function, called by all ranks, in one order.

    rendezvous store → Gloo over all ranks → agree on the exchange → the exchange, with its subgroups and links

Groups are collective over the world: a rank that skipped one, or made it earlier, would hang the others. So
nothing else in the worker makes a group. Teardown is the reverse, is bounded, and leaves the process able to
form the next epoch. A group of one rank has no process group and no socket.

Steps after the rendezvous that one rank alone can fail (shared memory) end in a vote: all ranks learn of it and
all raise, none is left waiting.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import psutil
import torch
import torch.distributed as dist

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange, LocalExchange
from hetero_worker.distributed.gloo_exchange import GlooExchange, GlooGroups
from hetero_worker.distributed.routes import NO_ROUTES, Routes
from hetero_worker.distributed.shm_exchange import AREA_BYTES, ShmExchange, unsupported_reason
from hetero_worker.distributed.shm_segment import SHM_FOLDER, SegmentLayout, ShmSegment
from hetero_worker.distributed.store import StoreListener, open_store
from hetero_worker.errors import ExchangeError

_log = logging.getLogger(__name__)

_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_GLOO_GRACE_S: Final = 2.0
"""Gloo waits this much longer than the exchange, so that the exchange is the one to name the late rank."""
_TEARDOWN_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What FormGroup says, as far as groups go."""

    epoch: int
    rank: int
    world_size: int
    store_address: str
    exchange: ranks_pb2.ExchangeKind.ValueType
    segment_name: str
    timeout_s: float
    host: str
    """Address of this machine on the network that ranks meet on: nothing listens on another."""
    shm_folder: Path = SHM_FOLDER
    routes: Routes = NO_ROUTES
    """Subgroups and links of the exchange; the same on every rank."""
    area_bytes: int = AREA_BYTES
    machine: str | None = None
    """Machine type, if not the one that this runs on."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The groups of one epoch on one rank."""

    epoch: int
    exchange: HostExchange
    kind: ranks_pb2.ExchangeKind.ValueType

    def close(self) -> None:
        """Free exchange and process groups. Idempotent.

        Raises ExchangeError when the process groups cannot be left in time (a collective that Gloo cannot
        interrupt): the process is then of no more use.
        """
        self.exchange.close()
        if dist.is_initialized():
            _destroy_process_groups(self.epoch)


def form_group(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> RankGroup:
    """Meet the other ranks and make the epoch's groups.

    `listener` is the socket whose address this rank told in Hello; it is used up. `aborted` is polled. Raises
    ExchangeAborted, ExchangeTimeout, ExchangeError, and leaves nothing behind.
    """
    if request.world_size == 1:
        listener.close()
        return RankGroup(request.epoch, LocalExchange(), request.exchange)
    try:
        _init_gloo(request, listener, aborted)
        exchange, kind = _make_exchange(request)
    except BaseException:
        if dist.is_initialized():
            _destroy_process_groups(request.epoch)
        raise
    finally:
        listener.close()
    _log.info(
        "epoch=%d rank=%d formed: world_size=%d exchange=%s store=%s",
        request.epoch, request.rank, request.world_size,
        ranks_pb2.ExchangeKind.Name(kind), request.store_address,
    )  # fmt: skip
    return RankGroup(request.epoch, exchange, kind)


def _init_gloo(request: GroupRequest, listener: StoreListener, aborted: Callable[[], bool]) -> None:
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
            timeout=timedelta(seconds=request.timeout_s + _GLOO_GRACE_S),
        )
    except RuntimeError as error:
        raise ExchangeError(f"epoch {request.epoch}: Gloo group: {error}") from error


def _interface_of(host: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    raise ExchangeError(f"--store-host {host}: no network interface of this machine has this address")


def _make_exchange(request: GroupRequest) -> tuple[HostExchange, ranks_pb2.ExchangeKind.ValueType]:
    if request.exchange == ranks_pb2.EXCHANGE_KIND_SHM and _all_can_share(request):
        return _make_shm(request), ranks_pb2.EXCHANGE_KIND_SHM
    return GlooExchange(_gloo_groups(request), rank=request.rank, timeout_s=request.timeout_s), (
        ranks_pb2.EXCHANGE_KIND_GLOO
    )


def _gloo_groups(request: GroupRequest) -> GlooGroups:
    """A process group for all, and for every subgroup and link; all ranks make all of them, in the same order."""
    world = dist.group.WORLD
    if world is None:
        raise ExchangeError("the Gloo group is gone")
    everyone = tuple(range(request.world_size))
    subgroups = {ranks: _new_gloo(request, ranks) for ranks in request.routes.subgroups}
    links = {link: _new_gloo(request, (link.source, *link.receivers)) for link in request.routes.links}
    return GlooGroups({everyone: world, **subgroups}, links)


def _new_gloo(request: GroupRequest, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    timeout = timedelta(seconds=request.timeout_s + _GLOO_GRACE_S)
    try:
        group: dist.ProcessGroup = dist.new_group(sorted(ranks), timeout=timeout, backend="gloo")
    except RuntimeError as error:
        raise ExchangeError(f"epoch {request.epoch}: Gloo group of ranks {sorted(ranks)}: {error}") from error
    return group


def _all_can_share(request: GroupRequest) -> bool:
    reason = unsupported_reason(request.machine)
    unable = _ranks_voting_no(reason is None)
    if unable:
        _log.warning(
            "epoch=%d rank=%d: rank(s) %s cannot exchange through shared memory (%s); all use Gloo",
            request.epoch, request.rank, unable, reason or "see their logs",
        )  # fmt: skip
    return not unable


def _make_shm(request: GroupRequest) -> ShmExchange:
    layout = SegmentLayout(request.world_size, request.area_bytes, request.routes)
    segment: ShmSegment | None = None
    try:
        for turn in ("create", "attach"):
            problem: ExchangeError | None = None
            try:
                if (turn == "create") == (request.rank == 0):
                    open_segment = ShmSegment.create if turn == "create" else ShmSegment.attach
                    segment = open_segment(request.segment_name, layout, folder=request.shm_folder)
            except ExchangeError as error:
                problem = error
            _agree(problem, f"{turn} the shared segment {request.segment_name!r}")
    finally:
        if segment is not None:
            segment.unlink()
    if segment is None:
        raise ExchangeError(f"rank {request.rank} has no shared segment")
    return ShmExchange(segment, rank=request.rank, timeout_s=request.timeout_s, machine=request.machine)


def _agree(problem: ExchangeError | None, what: str) -> None:
    """All ranks raise if one has a problem: the one its own, the others a pointer to it."""
    failed = _ranks_voting_no(problem is None)
    if problem is not None:
        raise problem
    if failed:
        raise ExchangeError(f"rank(s) {failed} could not {what}; the reason is in their logs")


def _ranks_voting_no(vote: bool) -> list[int]:
    mine = torch.tensor([vote], dtype=torch.int64)
    votes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(votes, mine)
    except RuntimeError as error:
        raise ExchangeError(f"a peer left while the group was forming: {error}") from error
    return [rank for rank, ballot in enumerate(votes) if not ballot.item()]


def _destroy_process_groups(epoch: int) -> None:
    worker = threading.Thread(target=dist.destroy_process_group, name=f"leave-epoch-{epoch}", daemon=True)
    worker.start()
    worker.join(_TEARDOWN_S)
    if worker.is_alive():
        raise ExchangeError(f"epoch {epoch}: process groups could not be left within {_TEARDOWN_S:g} s")
