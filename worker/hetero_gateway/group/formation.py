"""Group: its epochs, one after another, and who is in them.

    NEW ──all joined──► FORMING ──► LOADING ──► READY        any ──close──► DRAINING ──► CLOSED
                           ▲           │          │
                           ╰──all said Hello again── ABORTED ◄── a rank is lost, fails, hangs or misbehaves

What always holds:

- At most one epoch is live. Its number fences it: what is said in an ended epoch is dropped, what is said in one that
  has not begun is an error of the rank that says it.
- The end of an epoch ends the engine's streams first, then tells every rank that is still connected to abort.
- An epoch begins when every place has a rank that said Hello since the last one. After a permanent failure, or more
  ends than the restart budget allows, it takes besides a process that was not there at the failure.

Whoever serves the ranks' streams calls `receive` and `leave`; nothing here waits for a rank. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.group.epoch import Epoch, Phase
from hetero_gateway.group.errors import EpochEnded, RankMisbehaved, RankRefused
from hetero_gateway.group.rank_link import LinkEnd, RankLink
from hetero_gateway.group.restarts import RestartBudget
from hetero_gateway.group.roster import Member, MemberState, Roster
from hetero_gateway.group.settings import GroupSettings
from hetero_gateway.group.topology import GroupState, describe_ranks

logger = logging.getLogger(__name__)

_STATES: Final = {
    Phase.FORMING: GroupState.FORMING,
    Phase.LOADING: GroupState.LOADING,
    Phase.READY: GroupState.READY,
}
_LAST_STATES: Final = (GroupState.DRAINING, GroupState.CLOSED)


class Group:
    """See the module. `on_state` is told of every state after it was taken."""

    def __init__(
        self,
        settings: GroupSettings,
        *,
        core: EngineCore,
        on_state: Callable[[GroupState], None],
        observe_step: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = GroupState.NEW
        self.epoch = 0
        """Number of the current or last epoch; 0 before the first."""
        self.failed = False
        self.dropped_messages = 0
        """Messages of ended epochs, so far."""
        self._settings = settings
        self._core = core
        self._on_state = on_state
        self._observe_step = observe_step
        self._roster = Roster(settings.places, version=settings.version, model_fingerprint=settings.model_fingerprint)
        self._restarts = RestartBudget(
            max_restarts=settings.max_restarts, window_s=settings.restart_window_s, clock=clock
        )
        self._current: Epoch | None = None
        self._ended_reason = ""
        self._refusal = ""
        self._present_at_failure: frozenset[str] = frozenset()
        self._joined = asyncio.Event()
        self._eviction: asyncio.TimerHandle | None = None

    # --- what ranks' streams bring ----------------------------------------------------------------------

    def receive(self, link: RankLink, message: ranks_pb2.RankMessage) -> None:
        """A message came. A rank that may not say it loses its stream, and an epoch that it is in ends."""
        try:
            self._dispatch(link, message)
        except RankRefused as error:
            self._refusal = f"{link.peer} was refused: {error}"
            logger.warning("peer=%s refused: %s", link.peer, error)
            link.close(LinkEnd.REFUSED, str(error))
        except RankMisbehaved as error:
            logger.error("peer=%s misbehaved: %s", link.peer, error)
            link.close(LinkEnd.MISBEHAVED, str(error))
            self._remove(link, str(error))

    def leave(self, link: RankLink, reason: str) -> None:
        """Its stream is over."""
        self._remove(link, f"its stream ended: {reason}")

    def _dispatch(self, link: RankLink, message: ranks_pb2.RankMessage) -> None:
        if link.closing is not None:
            return
        member = self._roster.of(link)
        if message.HasField("hello"):
            self._join(link, message)
        elif member is None:
            raise RankMisbehaved(f"the first message must be hello, not {message.WhichOneof('body')}")
        elif message.epoch > self.epoch:
            raise RankMisbehaved(f"{member} spoke in epoch {message.epoch}, the current one is {self.epoch}")
        elif self._current is None or self._current.is_over or message.epoch < self.epoch:
            self._drop(member, message)
        elif member.state is not MemberState.ENGAGED:
            raise RankMisbehaved(f"{member} spoke in epoch {message.epoch}, which it is no part of")
        else:
            self._current.receive(member, message)

    def _join(self, link: RankLink, message: ranks_pb2.RankMessage) -> None:
        if message.epoch != 0:
            raise RankMisbehaved(f"hello is spoken in epoch 0, not {message.epoch}")
        if self.state in _LAST_STATES:
            raise RankRefused("the gateway is shutting down")
        member = self._roster.admit(link, message.hello)
        logger.info("%s joined from %s instance=%s", member, link.peer, message.hello.instance_id)
        if self.failed and message.hello.instance_id not in self._present_at_failure:
            logger.info("%s is a new process: the group may form again", member)
            self.failed = False
        self._refusal = ""
        self._joined.set()

    def _drop(self, member: Member, message: ranks_pb2.RankMessage) -> None:
        self.dropped_messages += 1
        kind = message.WhichOneof("body")
        logger.info("%s dropped=%s epoch=%d, which ended", member, kind, message.epoch)
        if message.HasField("failure") and message.failure.permanent:
            # It came second, but it is what a person has to know.
            self._fail(f"{member} failed: {message.failure.message}")

    def _remove(self, link: RankLink, reason: str) -> None:
        member = self._roster.remove(link)
        if member is None:
            return
        logger.info("%s left: %s", member, reason)
        if member.state is MemberState.ENGAGED and self._current is not None:
            self._current.end(f"{member}: {reason}")

    # --- epochs -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Form epochs until cancelled."""
        while True:
            while self.failed or self.state in _LAST_STATES or not self._roster.is_complete():
                self._joined.clear()
                await self._joined.wait()
            await self._live_epoch()

    async def _live_epoch(self) -> None:
        self._cancel_eviction()
        self.epoch += 1
        epoch = self._current = Epoch(
            self.epoch,
            self._roster.engage(),
            settings=self._settings,
            core=self._core,
            on_phase=lambda phase: self._enter(_STATES[phase]),
            observe_step=self._observe_step,
        )
        logger.info("epoch=%d forming: %s", self.epoch, ", ".join(map(str, epoch.members)))
        self._enter(GroupState.FORMING)
        try:
            await epoch.run()
        except EpochEnded as error:
            self._end_epoch(epoch, str(error), permanent=error.permanent)
        except Exception as error:
            logger.exception("epoch=%d: a bug ended the epoch", self.epoch)
            self._end_epoch(epoch, f"internal error: {type(error).__name__}: {error}", permanent=False)

    def _end_epoch(self, epoch: Epoch, reason: str, *, permanent: bool) -> None:
        logger.error("epoch=%d ended%s: %s", epoch.number, " for good" if permanent else "", reason)
        epoch.end(reason)
        self._current = None
        self._core.lose(reason)
        abort = ranks_pb2.GatewayMessage(epoch=epoch.number, abort=ranks_pb2.Abort(reason=reason))
        for member in self._roster.release():
            member.link.send(abort)
        if not self.failed:
            self._ended_reason = reason
        may_restart = self._restarts.spend()
        if permanent:
            self._fail(reason)
        elif not may_restart and not self.failed:
            self._fail(
                f"{reason}; the group has ended more than spec.recovery.maxRestarts ({self._settings.max_restarts}) "
                f"times within {self._settings.restart_window_s:g} s"
            )
        self._enter(GroupState.ABORTED)
        self._eviction = asyncio.get_running_loop().call_later(self._settings.rendezvous_timeout_s, self._evict)

    def _fail(self, reason: str) -> None:
        self.failed = True
        self._ended_reason = reason
        self._present_at_failure = frozenset(member.hello.instance_id for member in self._roster.members)

    def _evict(self) -> None:
        """Ranks that did not come back from the last epoch lose their streams."""
        for member in self._roster.leaving():
            logger.error("%s did not come back from epoch %d", member, self.epoch)
            member.link.close(LinkEnd.REPLACED, f"did not say Hello within {self._settings.rendezvous_timeout_s:g} s")
            self._roster.remove(member.link)

    def _cancel_eviction(self) -> None:
        if self._eviction is not None:
            self._eviction.cancel()
            self._eviction = None

    def _enter(self, state: GroupState) -> None:
        if self.state is GroupState.DRAINING and state is not GroupState.CLOSED:
            return  # the epoch may go on, and end; the group comes back from draining no more
        self.state = state
        self._on_state(state)

    # --- the end, and what there is to tell -------------------------------------------------------------

    def drain(self) -> None:
        """No new requests, no new epoch, no new rank; requests in flight go on. For good."""
        if self.state not in _LAST_STATES:
            self._core.drain()
            self._enter(GroupState.DRAINING)

    def close(self, reason: str) -> None:
        """Over: requests in flight end with EngineUnavailable, ranks are told. `run` must be cancelled."""
        if self.state is GroupState.CLOSED:
            return
        self.drain()
        self._cancel_eviction()
        self._core.lose(reason)
        self._current = None
        shutdown = ranks_pb2.GatewayMessage(epoch=self.epoch, shutdown=ranks_pb2.Shutdown(reason=reason))
        for member in self._roster.members:
            member.link.send(shutdown)
            member.link.close(LinkEnd.DONE, reason)
        self._enter(GroupState.CLOSED)

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.state is GroupState.READY and self._core.is_serving

    @property
    def stalled_s(self) -> float:
        """Seconds that the step which the ranks compute has been out; 0 when there is none."""
        return self._current.stalled_s if self._current is not None else 0.0

    @property
    def world_size(self) -> int:
        return len(self._settings.places)

    def topology(self) -> admin_pb2.GetTopologyResponse:
        """All of Admin.GetTopology's answer."""
        epoch = self._current
        return admin_pb2.GetTopologyResponse(
            name=self._settings.name,
            state=self.state.to_proto(),
            epoch=self.epoch,
            ranks=describe_ranks(self._settings, self._roster, epoch),
            exchange=epoch.exchange if epoch is not None else ranks_pb2.EXCHANGE_KIND_UNSPECIFIED,
            reason=self._reason(),
            failed=self.failed,
            block_size=self._settings.block_size,
            num_blocks=max(0, epoch.num_blocks - 1) if epoch is not None else 0,
            placement_mode=self._settings.placement_mode,
            tokens_per_second=self._core.tokens_per_second,
            stalled_s=self.stalled_s,
        )

    def _reason(self) -> str:
        if self.state is GroupState.NEW or (self.state is GroupState.ABORTED and not self.failed):
            waiting = ", ".join(map(str, self._roster.missing()))
            parts = [self._ended_reason, f"waiting for {waiting}" if waiting else "", self._refusal]
            return "; ".join(part for part in parts if part)
        return self._ended_reason if self.state is GroupState.ABORTED else ""
