"""Makes the host exchange of an epoch: which kind, and over which memory or process groups.

Asked for shared memory, the ranks agree on it if all of them have the native library, else on Gloo, and on the reason.
A probe checks that the memory is really shared. What one rank alone fails at ends in a vote (control.py).

The first exchange, with the rounds of the whole group, stands as soon as the group is formed. Each plan then gets one
with its own subgroups and links; an earlier plan's is closed, its process groups are kept for plans that use them too.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import torch.distributed as dist

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.control import Control
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.gloo_exchange import GlooExchange, GlooGroups
from hetero_worker.distributed.group_request import GroupRequest
from hetero_worker.distributed.native_exchange import Loaded, load
from hetero_worker.distributed.routes import Link, Ranks, Routes
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment
from hetero_worker.errors import ExchangeError, SegmentNotShared

_log = logging.getLogger(__name__)

SHM: Final = ranks_pb2.EXCHANGE_KIND_SHM
GLOO: Final = ranks_pb2.EXCHANGE_KIND_GLOO


class HostGroups:
    """One rank's; see the module. Every method is collective over all ranks, `close` and `abort` apart."""

    def __init__(self, request: GroupRequest, world: dist.ProcessGroup, control: Control) -> None:
        self._request = request
        self._world = world
        self._control = control
        self._everyone: Ranks = tuple(range(request.world_size))
        self._rounds: dict[Ranks, dist.ProcessGroup] = {self._everyone: world}
        self._links: dict[Link, dist.ProcessGroup] = {}
        self._num_segments = 0
        self._exchange: HostExchange | None = None
        self._loaded = Loaded(None, "the group is not formed yet")
        self.kind: ranks_pb2.ExchangeKind.ValueType = GLOO
        self.reason = ""
        """Why `kind` is not the one that was asked for; empty if it is; the same on every rank."""

    def form(self, routes: Routes) -> HostExchange:
        """Settle the kind, and make the first exchange. Raises ExchangeError, on every rank."""
        self.kind, self.reason = self._best_kind()
        if self.kind != GLOO:
            exchange, problem = self._try_shm(routes)
            if exchange is not None:
                self._warn()
                self._exchange = exchange
                return exchange
            self.kind, self.reason = GLOO, problem
        self._warn()
        return self.make(routes)

    def _warn(self) -> None:
        if self.reason:
            kind = ranks_pb2.ExchangeKind.Name(self.kind)
            _log.warning("epoch=%d rank=%d: all use %s: %s", self._request.epoch, self._request.rank, kind, self.reason)

    def make(self, routes: Routes) -> HostExchange:
        """The exchange of a plan; the one before is closed. Raises ExchangeError, on every rank."""
        if self.kind == GLOO:
            exchange: HostExchange = self._make_gloo(routes)
        else:
            made, problem = self._try_shm(routes)
            if made is None:
                raise ExchangeError(f"epoch {self._request.epoch}: shared memory was had before, not now: {problem}")
            exchange = made
        self.close()
        self._exchange = exchange
        return exchange

    @property
    def exchange(self) -> HostExchange | None:
        """The one that stands."""
        return self._exchange

    @property
    def table(self) -> str:
        """The process groups that this epoch has, for the log."""
        groups = [f"rounds {list(ranks)}" for ranks in self._rounds]
        return ", ".join([*groups, *(f"link {link.source}->{list(link.receivers)}" for link in self._links)])

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def _best_kind(self) -> tuple[ranks_pb2.ExchangeKind.ValueType, str]:
        if self._request.kind_asked != SHM:
            return GLOO, ""
        self._loaded = load(self._request.native_library)
        reason = self._control.problem(self._loaded.reason)
        return (GLOO, reason) if reason else (SHM, "")

    def _try_shm(self, routes: Routes) -> tuple[HostExchange | None, str]:
        """An exchange over a new segment, or why the ranks do not share one. Raises ExchangeError, on every rank."""
        request = self._request
        layout = SegmentLayout(request.world_size, request.area_bytes, routes)
        segment: ShmSegment | None = None
        problem = ""
        try:
            segment = self._create(layout)
            segment, problem = self._attach(segment, layout)
            if not problem and segment is not None:
                problem = self._probe(segment)
        except BaseException:
            if segment is not None:
                segment.leave()
            raise
        finally:
            if segment is not None:
                segment.unlink()
        if problem or segment is None:
            if segment is not None:
                segment.leave()
            return None, problem
        if self._loaded.library is None:
            raise ExchangeError(f"shared memory needs the native exchange: {self._loaded.reason}")
        return ShmExchange(segment, timeout_s=request.timeout_s, library=self._loaded.library), ""

    def _create(self, layout: SegmentLayout) -> ShmSegment | None:
        """Rank 0's; None elsewhere."""
        self._num_segments += 1
        segment, problem = None, None
        if self._request.rank == 0:
            try:
                segment = ShmSegment.create(self._segment_name, layout, folder=self._request.shm_folder)
            except ExchangeError as error:
                problem = error
        try:
            self._control.agree(problem, f"create the shared segment {self._segment_name!r}")
        except BaseException:
            if segment is not None:
                segment.unlink()
            raise
        return segment

    def _attach(self, segment: ShmSegment | None, layout: SegmentLayout) -> tuple[ShmSegment | None, str]:
        """The others' too, and why not all of them share it."""
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
        self._control.agree(no_room, f"reserve room in the shared segment {self._segment_name!r}")
        return segment, self._control.problem(not_shared)

    def _probe(self, segment: ShmSegment) -> str:
        """Why the ranks do not share the segment; empty if they do."""
        nonce = int(self._control.texts(str(secrets.randbits(64)))[0])
        segment.mark(nonce)
        self._control.ranks_voting_no(vote=True)
        unseen = ", ".join(map(str, segment.unmarked(nonce)))
        return self._control.problem(f"what rank(s) {unseen} wrote into it cannot be seen" if unseen else "")

    @property
    def _segment_name(self) -> str:
        return f"{self._request.segment_name}.{self._num_segments}"

    def _make_gloo(self, routes: Routes) -> GlooExchange:
        """A process group for every subgroup and link; all ranks make all of them, in the same order."""
        self._control.meet()
        for ranks in routes.subgroups:
            if ranks not in self._rounds:
                self._rounds[ranks] = self._new_gloo(ranks)
        for link in routes.links:
            if link not in self._links:
                self._links[link] = self._new_gloo(link.ranks)
        groups = GlooGroups(
            {ranks: self._rounds[ranks] for ranks in (self._everyone, *routes.subgroups)},
            {link: self._links[link] for link in routes.links},
        )
        return GlooExchange(groups, rank=self._request.rank, timeout_s=self._request.timeout_s)

    def _new_gloo(self, ranks: Ranks) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._request.gloo_timeout, backend="gloo")
        except RuntimeError as error:
            raise ExchangeError(f"epoch {self._request.epoch}: Gloo group of ranks {list(ranks)}: {error}") from error
        return group
