"""Rendezvous: a group forms out of the ranks that join it, epoch after epoch.

    NEW ──all joined──► FORMING ──► LOADING ──► READY ⇄ ASLEEP        any ──close──► DRAINING ──► CLOSED
                           ▲           │          │        │
                           ╰──all said Hello again── ABORTED ◄── a rank is lost, silent, fails, hangs or misbehaves

What always holds:

- At most one epoch is live. Its number fences it: messages of an ended epoch are dropped, a message of one that has
  not begun is an error of its rank.
- The end of an epoch pauses the engine's streams first, then tells every rank that is still connected to abort. The
  next epoch, with the same processes or new ones in their places, lets the streams go on.
- An epoch begins when every place has a rank that said Hello since the last one, and not before the pause that
  `EpochRestarts` asks for. After a permanent failure, or more ends than the restart budget allows, every stream ends;
  it takes a process that was not there at the failure to begin again.
- A new epoch is awake and has the resource's own cache, even if admin RPCs changed the one before it.
- A rank that leaves a gateway which drains ends no stream: it stays until the last has ended.

The server of the ranks' streams calls `receive` and `leave`; nothing here waits for a rank. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from hetero_api.group_state import GroupState
from hetero_api.manifest import names_of_weights
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.group.adapters.registry import AdapterRegistry
from hetero_gateway.group.epoch import Epoch
from hetero_gateway.group.errors import EpochEnded, RankMisbehaved, RankRefused
from hetero_gateway.group.placement import GroupPlacement, report_placement
from hetero_gateway.group.recovery import EpochRestarts
from hetero_gateway.group.roster import LinkEnd, Member, MemberState, RankLink, Roster, broadcast
from hetero_gateway.group.settings import GroupSettings
from hetero_gateway.group.status import describe_epoch, describe_ranks

logger = logging.getLogger(__name__)

_LAST_STATES: Final = (GroupState.DRAINING, GroupState.CLOSED)
LEAVING_S: Final = 20.0
"""Longest time from an epoch's end to a rank's next Hello, unless the rank was loading."""
DRAIN_NOTICE_S: Final = 2.0
"""Longest that a rank which leaves stays for requests in flight, if the gateway does not drain by then: pods that are
evicted together are asked one after another."""


class Group:
    """A group: its ranks, its epochs and its state. `on_state` gets every state after it was taken."""

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
        self.idle = admin_pb2.IdleStatus()
        """Rest of the group (spec.idle), with the figures of its last sleep and its last waking."""
        self.dropped_messages = 0
        """Messages of ended epochs that were dropped so far."""
        self._settings = settings
        self.adapters = AdapterRegistry(
            settings.spec.engine.adapters, taken=(settings.name, *names_of_weights(settings.spec.model.uri))
        )
        """Adapters that are loaded, and loaded again in every epoch."""
        self.placement = GroupPlacement(settings)
        """Who owns what."""
        self._core = core
        self._on_state = on_state
        self._observe_step = observe_step
        self._roster = Roster(settings.places, version=settings.version, model_fingerprint=settings.model_fingerprint)
        self._restarts = EpochRestarts(settings, clock=clock)
        self._current: Epoch | None = None
        self._refusal = ""
        self._changed = asyncio.Event()
        self._eviction: asyncio.TimerHandle | None = None
        self._ready_at_s = 0.0
        self._partings: set[asyncio.Task[None]] = set()
        """Waits of ranks that leave."""

    # --- what ranks' streams bring ----------------------------------------------------------------------

    def receive(self, link: RankLink, message: ranks_pb2.RankMessage) -> None:
        """Take a message. A rank that may not send it loses its stream, and an epoch that it is in ends."""
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
        """Note that a rank's stream is over."""
        self._remove(link, f"its stream ended: {reason}")

    def _dispatch(self, link: RankLink, message: ranks_pb2.RankMessage) -> None:
        if link.closing is not None:
            return
        member = self._roster.member_of(link)
        if message.HasField("hello"):
            self._join(link, message)
        elif member is None:
            raise RankMisbehaved(f"the first message must be hello, not {message.WhichOneof('body')}")
        elif message.HasField("leaving"):
            member.was_told_to_end = True
            parting = asyncio.create_task(self._let_go(member, message.leaving.reason), name=f"{member} leaves")
            self._partings.add(parting)
            parting.add_done_callback(self._partings.discard)
        elif message.epoch > self.epoch:
            raise RankMisbehaved(f"{member} spoke in epoch {message.epoch}, the current one is {self.epoch}")
        elif self._current is None or self._current.is_over or message.epoch < self.epoch:
            if not message.HasField("heartbeat"):
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
        self._refusal = ""
        self._restarts.reconsider(self._roster.instance_ids)
        self._changed.set()

    async def _let_go(self, member: Member, reason: str) -> None:
        """Shut a rank down that was asked to end, once it is not needed or DRAIN_NOTICE_S are over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_NOTICE_S):
                await self._core.wait_idle()
        if self.state is GroupState.DRAINING:
            await self._core.wait_drained()
        self._shut_down(member, f"it was asked to leave: {reason}")
        self._remove(member.link, f"it was asked to leave: {reason}")

    def _shut_down(self, member: Member, reason: str) -> None:
        """End a rank's stream in good order."""
        shutdown = ranks_pb2.GatewayMessage(epoch=self.epoch, shutdown=ranks_pb2.Shutdown(reason=reason))
        member.link.send(shutdown)
        member.link.close(LinkEnd.DONE, reason)

    def _drop(self, member: Member, message: ranks_pb2.RankMessage) -> None:
        self.dropped_messages += 1
        kind = message.WhichOneof("body")
        logger.info("%s dropped=%s epoch=%d, which ended", member, kind, message.epoch)
        if message.HasField("failure") and message.failure.permanent:
            # It came second, but it is what a person has to know.
            reason = f"{member} failed: {message.failure.message}"
            self._restarts.note_failure(reason, present=self._roster.instance_ids)
            self._core.fail(reason)

    def _remove(self, link: RankLink, reason: str) -> None:
        member = self._roster.remove(link)
        if member is None:
            return
        logger.info("%s left: %s", member, reason)
        if member.state is MemberState.ENGAGED and self._current is not None:
            self._current.end(f"{member}: {reason}")

    def _replace(self, member: Member, reason: str) -> None:
        """Take place and stream from a member that does not answer, so that its supervisor starts another process."""
        logger.error("%s %s", member, reason)
        member.link.close(LinkEnd.REPLACED, reason)
        self._remove(member.link, reason)

    # --- epochs -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Form epochs until cancelled."""
        while True:
            # Read once: a pause that ends between two looks would become a wait without end.
            while (left_s := self._restarts.pause_left_s) or not self._may_begin():
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s or None):
                        await self._changed.wait()
            await self._live_epoch()

    def _may_begin(self) -> bool:
        self._restarts.reconsider(self._roster.instance_ids)
        is_over = self.failed or self.state in _LAST_STATES
        return not is_over and not self._roster.missing()

    async def _live_epoch(self) -> None:
        self._cancel_eviction()
        self.epoch += 1
        epoch = self._current = Epoch(
            self.epoch,
            self._roster.engage(),
            settings=self._settings,
            placement=self.placement,
            adapters=self.adapters,
            core=self._core,
            on_phase=self.enter,
            on_silent=self._replace,
            observe_step=self._observe_step,
        )
        logger.info("epoch=%d forming: %s", self.epoch, ", ".join(map(str, epoch.members)))
        self.enter(GroupState.FORMING)
        try:
            await epoch.run()
        except EpochEnded as error:
            if self.state is not GroupState.CLOSED:
                self._end_epoch(epoch, str(error), permanent=error.permanent)
        except Exception as error:
            logger.exception("epoch=%d: a bug ended the epoch", self.epoch)
            self._end_epoch(epoch, f"internal error: {type(error).__name__}: {error}", permanent=False)

    def _end_epoch(self, epoch: Epoch, reason: str, *, permanent: bool) -> None:
        logger.error("epoch=%d ended%s: %s", epoch.number, " for good" if permanent else "", reason)
        epoch.end(reason)
        self._current = None
        self._restarts.note_end(
            reason,
            permanent=permanent,
            ran_well=epoch.ran_well,
            is_orderly=any(member.was_told_to_end for member in epoch.members),
            present=self._roster.instance_ids,
        )
        self._tell_engine(reason)
        abort = ranks_pb2.GatewayMessage(epoch=epoch.number, abort=ranks_pb2.Abort(reason=reason))
        broadcast((member.link for member in self._roster.release()), abort)
        self.enter(GroupState.ABORTED)
        patience_s: float = self._settings.spec.recovery.rendezvous_timeout_seconds
        if epoch.phase is not GroupState.LOADING:
            patience_s = min(patience_s, LEAVING_S)
        self._eviction = asyncio.get_running_loop().call_later(patience_s, self._evict, patience_s)

    def _tell_engine(self, reason: str) -> None:
        """Let streams pause if there may be another epoch, and end if not."""
        self._core.open_intake()  # an admin RPC may have closed it; the next epoch is awake
        self.idle.rests = False
        failure = self._restarts.failure
        if failure is not None or self.state in _LAST_STATES:
            self._core.fail(failure or reason)
        else:
            self._core.lose(reason)

    def _evict(self, patience_s: float) -> None:
        """Take the streams of ranks that did not come back from the last epoch."""
        for member in self._roster.leaving():
            self._replace(member, f"did not say Hello within {patience_s:g} s of the end of epoch {self.epoch}")

    def _cancel_eviction(self) -> None:
        if self._eviction is not None:
            self._eviction.cancel()
            self._eviction = None

    def enter(self, state: GroupState) -> None:
        """Go to a state. A draining group only goes on to CLOSED; one whose epoch is over cannot say that it serves."""
        if self.state is GroupState.DRAINING and state is not GroupState.CLOSED:
            return  # the epoch may go on, and end
        if state.is_serving and self.current is None:
            return
        if state is GroupState.READY and self.state is not GroupState.READY:
            self._ready_at_s = time.monotonic()
        self.state = state
        self.adapters.note_change()
        self._on_state(state)

    # --- the end, and the status ------------------------------------------------------------------------

    def drain(self, *, notice_s: float = 0.0) -> None:
        """Refuse epochs and ranks from now on, for good; requests in flight go on if there is an epoch.

        A group that is ready accepts requests for `notice_s` more.
        """
        if self.state not in _LAST_STATES:
            self._core.drain(notice_s=notice_s if self.is_ready else 0.0)
            self.enter(GroupState.DRAINING)
            if self.current is None and self._core.paused_requests:
                self._core.fail(f"the gateway is draining and its group was lost: {self._restarts.ended_reason}")

    def close(self, reason: str) -> None:
        """End everything: requests end with EngineUnavailable, ranks get a Shutdown. `run` must be cancelled."""
        if self.state is GroupState.CLOSED:
            return
        self._core.fail(reason)
        self.drain()
        self._cancel_eviction()
        if self._current is not None:
            self._current.end(reason)
            self._current = None
        for member in self._roster.members:
            self._shut_down(member, reason)
        self.enter(GroupState.CLOSED)

    @property
    def is_ready(self) -> bool:
        """Whether requests are served, if need be after the group has woken from its rest."""
        return self.state.is_serving and self._core.is_serving

    @property
    def ready_for_s(self) -> float:
        """Seconds since the group became READY; 0 while it is not."""
        return time.monotonic() - self._ready_at_s if self.state is GroupState.READY else 0.0

    @property
    def failed(self) -> bool:
        """Whether no epoch begins until a new process has joined."""
        return self._restarts.failure is not None

    @property
    def current(self) -> Epoch | None:
        """The epoch that is live."""
        return self._current if self._current is not None and not self._current.is_over else None

    @property
    def stalled_s(self) -> float:
        """Seconds that the step which the ranks compute has been out; 0 when there is none."""
        return self._current.stalled_s if self._current is not None else 0.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._settings.places)

    def topology(self) -> admin_pb2.GetTopologyResponse:
        """Return Admin.GetTopology's answer."""
        placement = self.placement.current
        is_over = self.current is None and self.state.is_serving  # `run` comes to say so when the loop gets there
        answer = admin_pb2.GetTopologyResponse(
            name=self._settings.name,
            state=(GroupState.ABORTED if is_over else self.state).to_proto(),
            epoch=self.epoch,
            ranks=describe_ranks(self._settings, self._roster, self._current, placement),
            reason=self._reason(),
            failed=self.failed,
            block_size=self._settings.block_size,
            placement_mode=placement.mode if placement is not None else "",
            placement=report_placement(placement, self._core.decode_pace) if placement is not None else None,
            tokens_per_second=self._core.tokens_per_second,
            stalled_s=self.stalled_s,
            paused_requests=self._core.paused_requests,
            speculation=self._core.speculation,
            speculation_gain=self._core.speculation_gain,
            idle=self.idle,
            model_source=self._settings.model_source,
        )
        if self._current is not None:
            describe_epoch(self._settings, self._current, answer)
        return answer

    def _reason(self) -> str:
        """Describe what the group waits for, and why; while it forms again, why it has to."""
        ended_reason = self._restarts.ended_reason
        match self.state:
            case GroupState.NEW | GroupState.ABORTED:
                missing = "" if self.failed else ", ".join(map(str, self._roster.missing()))
                waiting = f"waiting for {missing}" if missing else ""
                return "; ".join(filter(None, (ended_reason, waiting, self._restarts.outlook, self._refusal)))
            case GroupState.FORMING | GroupState.LOADING:
                return ended_reason
            case _:
                return ""
