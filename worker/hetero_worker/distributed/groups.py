"""Makes the groups of an epoch: the host's exchange, and the device groups and links of GPU ranks.

Asked for shared memory or TCP, the ranks agree on it if all of them have the native library and it works, else on the
next of shared memory, TCP, Gloo, and on the reason. A probe checks that memory is really shared.

The first host exchange, with the rounds of the whole group, stands as soon as the group is formed. Each plan then gets
one with its own subgroups and links. The one before is closed; its process groups are kept for plans that use them too.

Groups of the host are collective over all ranks. Device groups are made by their members alone, in the order of the
routes, which is the same on every rank; they are kept for later plans. A rank on host cores has none.
"""

from __future__ import annotations

import logging
import secrets
from functools import cached_property
from typing import Final

import torch.distributed as dist

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.device_group import TorchDeviceGroup
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.gloo_exchange import BroadcastLink, GlooExchange
from hetero_worker.distributed.native_exchange import load
from hetero_worker.distributed.rendezvous import Agreement, GroupRequest, PrefixStore
from hetero_worker.distributed.routes import Link, Ranks, Routes
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment, unlink
from hetero_worker.distributed.tcp.exchange import connect
from hetero_worker.errors import ExchangeError, SegmentNotShared
from hetero_worker.native.loading import Loaded

_log = logging.getLogger(__name__)

_SHM: Final = ranks_pb2.EXCHANGE_KIND_SHM
_TCP: Final = ranks_pb2.EXCHANGE_KIND_TCP
_GLOO: Final = ranks_pb2.EXCHANGE_KIND_GLOO
_TRIED: Final = {_SHM: (_SHM, _TCP), _TCP: (_TCP,), _GLOO: ()}
"""Kinds that need the native library and are tried one after another, by the kind that was asked for."""


class HostGroups:
    """One rank's part in the host exchanges of an epoch. Every method but `close` is collective over all ranks."""

    def __init__(self, request: GroupRequest, world: dist.ProcessGroup, agreement: Agreement) -> None:
        self._request = request
        self._agreement = agreement
        self._everyone: Ranks = tuple(range(request.world_size))
        self._rounds: dict[Ranks, dist.ProcessGroup] = {self._everyone: world}
        self._links: dict[Link, dist.ProcessGroup] = {}
        self._num_segments = 0
        self.exchange: HostExchange | None = None
        """Exchange of the latest plan."""
        self.kind: ranks_pb2.ExchangeKind.ValueType = _GLOO
        self.reason = ""
        """Why `kind` is not the one that was asked for; empty if it is; the same on every rank."""

    def form(self, routes: Routes) -> HostExchange:
        """Settle the kind, and make the first exchange. Raises ExchangeError, on every rank."""
        kinds = _TRIED[self._request.kind_asked]
        if kinds and (problem := self._agreement.problem(self._loaded.reason)):
            self.reason, kinds = problem, ()
        for kind in kinds:
            exchange, problem = self._try(kind, routes)
            if exchange is not None:
                self.kind, self.exchange = kind, exchange
                break
            self.reason = f"{self.reason}; over TCP, {problem}" if self.reason else problem
        if self.reason:
            epoch, rank, name = self._request.epoch, self._request.rank, ranks_pb2.ExchangeKind.Name(self.kind)
            _log.warning("epoch=%d rank=%d: all exchange by %s: %s", epoch, rank, name, self.reason)
        return self.exchange or self.make_exchange(routes)

    def make_exchange(self, routes: Routes) -> HostExchange:
        """Make the exchange of a plan, and close the one before. Raises ExchangeError, on every rank."""
        exchange, problem = self._try(self.kind, routes)
        if exchange is None:
            name = ranks_pb2.ExchangeKind.Name(self.kind)
            raise ExchangeError(f"epoch {self._request.epoch}: {name} was had before, not now: {problem}")
        self.close()
        self.exchange = exchange
        return exchange

    @property
    def table(self) -> str:
        """Process groups of this epoch, for the log."""
        groups = [f"rounds {list(ranks)}" for ranks in self._rounds]
        return ", ".join([*groups, *(f"link {link.source}->{list(link.receivers)}" for link in self._links)])

    def close(self) -> None:
        """Close the latest exchange. Its process groups stay."""
        if self.exchange is not None:
            self.exchange.close()

    @cached_property
    def _loaded(self) -> Loaded:
        return load(self._request.native_library)

    def _try(self, kind: ranks_pb2.ExchangeKind.ValueType, routes: Routes) -> tuple[HostExchange | None, str]:
        """Return an exchange of this kind, or why there can be none. Raises ExchangeError, on every rank."""
        if kind == _SHM:
            return self._try_shm(routes)
        if kind == _TCP:
            return connect(self._request, routes, self._agreement, self._loaded.library)
        return self._make_gloo(routes), ""

    def _try_shm(self, routes: Routes) -> tuple[HostExchange | None, str]:
        """Return an exchange over a new segment, or why the ranks share none. Raises ExchangeError, on every rank."""
        request = self._request
        layout = SegmentLayout(request.world_size, request.area_bytes, routes)
        self._num_segments += 1
        segment, no_room = self._create(layout) if request.rank == 0 else (None, None)
        try:
            self._agreement.agree(no_room, f"create the shared segment {self._segment_name!r}")
            segment, problem = self._attach(segment, layout)
            if not problem and segment is not None:
                problem = self._probe(segment)
        except BaseException:
            if segment is not None:
                segment.leave()
            raise
        finally:
            # Every rank does so: rank 0 may have died in between.
            if no_room is None:
                unlink(self._segment_name, folder=request.shm_folder)
        if problem or segment is None:
            if segment is not None:
                segment.leave()
            return None, problem
        return ShmExchange(segment, timeout_s=request.timeout_s, library=self._loaded.library), ""

    def _create(self, layout: SegmentLayout) -> tuple[ShmSegment | None, ExchangeError | None]:
        """Create the segment; return it or why there is none."""
        try:
            return ShmSegment.create(self._segment_name, layout, folder=self._request.shm_folder), None
        except ExchangeError as error:
            return None, error

    def _attach(self, segment: ShmSegment | None, layout: SegmentLayout) -> tuple[ShmSegment | None, str]:
        """Attach the other ranks; return the segment and why not all ranks share it."""
        not_shared, no_room = "", None
        if segment is None:
            try:
                segment = ShmSegment.attach(
                    self._segment_name, layout, rank=self._request.rank, folder=self._request.shm_folder
                )
            except SegmentNotShared as error:
                not_shared = str(error)
            except ExchangeError as error:
                no_room = error
        self._agreement.agree(no_room, f"reserve room in the shared segment {self._segment_name!r}")
        return segment, self._agreement.problem(not_shared)

    def _probe(self, segment: ShmSegment) -> str:
        """Return why the ranks do not share the segment's memory; empty if they do."""
        nonce = int(self._agreement.texts(str(secrets.randbits(64)))[0])
        segment.mark(nonce)
        self._agreement.ranks_voting_no(vote=True)
        unseen = ", ".join(map(str, segment.unmarked(nonce)))
        return self._agreement.problem(f"what rank(s) {unseen} wrote into it cannot be seen" if unseen else "")

    @property
    def _segment_name(self) -> str:
        return f"{self._request.segment_name}.{self._num_segments}"

    def _make_gloo(self, routes: Routes) -> GlooExchange:
        """Make a process group for every subgroup and link; all ranks make all of them, in the same order."""
        self._agreement.meet()
        for ranks in routes.subgroups:
            if ranks not in self._rounds:
                self._rounds[ranks] = self._new_gloo(ranks)
        for link in routes.links:
            if link not in self._links:
                self._links[link] = self._new_gloo(link.ranks)
        rounds = {ranks: self._rounds[ranks] for ranks in (self._everyone, *routes.subgroups)}
        links = {link: self._links[link] for link in routes.links}
        return GlooExchange(rounds, links, rank=self._request.rank, timeout_s=self._request.timeout_s)

    def _new_gloo(self, ranks: Ranks) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._request.gloo_timeout, backend="gloo")
        except RuntimeError as error:
            raise ExchangeError(f"epoch {self._request.epoch}: Gloo group of ranks {list(ranks)}: {error}") from error
        return group


class DeviceGroups:
    """One rank's device groups and device links: the group of all GPU ranks, and those that plans need beside it."""

    def __init__(self, request: GroupRequest) -> None:
        self._request = request
        self._store: PrefixStore | None = None
        self._agreement: Agreement | None = None
        self.groups: dict[Ranks, TorchDeviceGroup] = {}
        """Groups that this rank is in, by their ranks."""
        self.links: dict[Link, BroadcastLink] = {}
        """Device links that this rank is an end of."""
        self._link_groups: dict[Link, TorchDeviceGroup] = {}

    def form(self, store: PrefixStore, agreement: Agreement) -> None:
        """Make the group of all GPU ranks, if these are several. Collective over all ranks. Raises ExchangeError."""
        if not self._request.num_gpu_ranks:
            return
        agreement.agree(self._missing_backend(), "make device groups")
        self._store, self._agreement = store, agreement
        gpus = tuple(range(self._request.num_gpu_ranks))
        self.make_missing(Routes((gpus,)) if len(gpus) > 1 else Routes())

    def make_missing(self, routes: Routes) -> None:
        """Make the routes' missing groups and links. Collective over all ranks. Raises ExchangeError, on every rank."""
        if self._agreement is None or self._store is None:
            return
        self._agreement.meet()
        problem: ExchangeError | None = None
        try:
            self._make_own(routes, self._store)
        except ExchangeError as error:
            problem = error
        self._agreement.agree(problem, "make the device groups")

    @property
    def everyone(self) -> TorchDeviceGroup | None:
        """Group of all GPU ranks, if this rank is one of several."""
        return self.groups.get(tuple(range(self._request.num_gpu_ranks)))

    @property
    def table(self) -> str:
        """Groups and links of this rank, for the log."""
        groups = [f"device rounds {list(ranks)}" for ranks in self.groups]
        links = [f"device link {link.source}->{list(link.receivers)}" for link in self.links]
        return ", ".join([*groups, *links]) or "no device groups"

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. From any thread; never blocks."""
        for group in (*self.groups.values(), *self._link_groups.values()):
            group.abort()

    def stop(self) -> None:
        """Make later calls raise ExchangeAborted, without freeing anything."""
        for group in (*self.groups.values(), *self._link_groups.values()):
            group.waits.abort()

    def close(self) -> None:
        """Free all groups. May block until abandoned work ends."""
        for group in (*self._link_groups.values(), *self.groups.values()):
            group.close()
        self.groups, self._link_groups, self.links, self._store = {}, {}, {}, None

    def _missing_backend(self) -> ExchangeError | None:
        if self._request.device_backend is not None or not self._request.is_gpu_rank:
            return None
        return ExchangeError(
            f"rank {self._request.rank} is one of {self._request.num_gpu_ranks} GPU ranks, and its platform names no "
            "backend for collectives among them"
        )

    def _make_own(self, routes: Routes, store: PrefixStore) -> None:
        rank = self._request.rank
        for ranks in routes.subgroups:
            if rank in ranks and ranks not in self.groups:
                self.groups[ranks] = self._make(ranks, PrefixStore("sums", store))
        for link in routes.links:
            if rank in link.ranks and link not in self._link_groups:
                own = PrefixStore(f"link-{link.number}-{link.source}", store)
                self._link_groups[link] = group = self._make(link.ranks, own)
                self.links[link] = BroadcastLink(group.start_broadcast, link, waits=group.waits)

    def _make(self, ranks: Ranks, store: PrefixStore) -> TorchDeviceGroup:
        request = self._request
        backend = request.device_backend
        assert backend is not None, "form has checked it"
        return TorchDeviceGroup.make(
            backend, ranks, rank=request.rank, store=store, timeout_s=request.timeout_s, device=request.device
        )
