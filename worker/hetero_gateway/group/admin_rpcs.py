"""AdminRpcs: calls by which an administrator steers a group, beside serving.

Each call becomes commands to all ranks, sent between two steps, which either the whole group carries out or nobody.
What always holds:

- One call at a time; a second one is refused, not queued. Only Drain may come at any time.
- A call that is refused, or that the ranks cannot carry out, leaves the group as it was.
- A call that has begun runs to its end, even if its caller gives up waiting; a Profile then ends early.
- A rank that is lost during a call, or while the group sleeps, ends the epoch like any other loss. The next epoch is
  awake and has the resource's own cache.
- A group that an administrator put to sleep refuses requests. One that rests (spec.idle) accepts them, and they wait.

Raises InvalidCommand, WrongState, CommandFailed, and GroupLost when the epoch ended meanwhile. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import EngineUnavailable, GroupLost, InvalidRequest, QueueFull
from hetero_gateway.group.adapters.registry import Adapter
from hetero_gateway.group.cache_size import asked_cache
from hetero_gateway.group.epoch import Epoch
from hetero_gateway.group.errors import CommandFailed, InvalidCommand, WrongState
from hetero_gateway.group.executor import CommandAnswer
from hetero_gateway.group.experts import ExpertMover, ExpertSwap
from hetero_gateway.group.rendezvous import Group
from hetero_gateway.group.settings import GroupSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

WEIGHTS: Final = "weights"
KV: Final = "kv"
TAGS: Final = frozenset({WEIGHTS, KV})
LONGEST_PROFILE_S: Final = 60.0
LONGEST_WAIT_S: Final = 60.0
"""Longest wait of a request for its adapter."""

_HINTS: Final = {
    GroupState.NEW: "wait until it is READY",
    GroupState.FORMING: "wait until it is READY",
    GroupState.LOADING: "wait until it is READY",
    GroupState.ABORTED: "wait until it is READY again",
    GroupState.READY: "there is nothing to wake",
    GroupState.ASLEEP: "call WakeUp first",
    GroupState.DRAINING: "it comes back from draining no more; start another gateway",
    GroupState.CLOSED: "start another gateway",
}


class AdminRpcs:
    """Calls of hetero.v1.Admin that change a group or have it do something: one method each."""

    def __init__(
        self,
        group: Group,
        *,
        core: EngineCore,
        settings: GroupSettings,
        observe_swap: Callable[[ExpertSwap], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._experts = ExpertMover(group.placement, observe=observe_swap)
        self._core = core
        self._settings = settings
        self._clock = clock
        self._under_way = ""
        self._free = asyncio.Event()
        self._free.set()
        self._given_up = asyncio.Event()

    async def reset_cache(self, request: admin_pb2.ResetCacheRequest) -> admin_pb2.ResetCacheResponse:
        """Change layout, block size or number of blocks. Needs READY and idle."""
        epoch = self._require("ResetCache", GroupState.READY, idle=True)
        cache = asked_cache(request, self._settings, epoch.loaded)
        return await self._run("ResetCache", self._reset_cache(epoch, cache))

    async def sleep(self, request: admin_pb2.SleepRequest) -> admin_pb2.SleepResponse:
        """Go from READY to ASLEEP. Needs an idle group."""
        if request.level not in (1, 2):
            raise InvalidCommand("level", f"must be 1 or 2, not {request.level}")
        epoch = self._require("Sleep", GroupState.READY, idle=True)
        return await self._run("Sleep", self._sleep(epoch, request.level))

    @property
    def ready_for_s(self) -> float:
        """See `Group.ready_for_s`."""
        return self._group.ready_for_s

    async def rest(self, level: int) -> None:
        """Go from READY to ASLEEP, with requests accepted, which wait until `rouse`. Needs an idle group."""
        epoch = self._require("Rest", GroupState.READY, idle=True)
        await self._run("Rest", self._rest(epoch, level))

    async def rouse(self) -> None:
        """Wake a group that rests, also one that drains; do nothing for another.

        A group that cannot wake begins another epoch, which is awake. Raises GroupLost when its epoch ended meanwhile.
        """
        while self._under_way:  # others that waited, too, may have begun
            await self._free.wait()
        epoch = self._group.current
        if epoch is not None and self._core.is_resting:
            await self._run("Rouse", self._rouse(epoch))

    async def wake_up(self, request: admin_pb2.WakeUpRequest) -> admin_pb2.WakeUpResponse:
        """Go from ASLEEP to READY, once nothing is asleep any more."""
        for index, tag in enumerate(request.tags):
            if tag not in TAGS:
                raise InvalidCommand(f"tags[{index}]", f'must be "{WEIGHTS}" or "{KV}", not "{tag}"')
        epoch = self._require("WakeUp", GroupState.ASLEEP)
        tags = frozenset(request.tags) or epoch.asleep
        if awake := sorted(tags - epoch.asleep):
            asleep = ", ".join(sorted(epoch.asleep))
            raise WrongState(f"WakeUp: {', '.join(awake)} is awake already; leave it out (asleep: {asleep})")
        return await self._run("WakeUp", self._wake_up(epoch, tags))

    async def drain(self) -> admin_pb2.DrainResponse:
        """Go to DRAINING, for good; return once no request is in flight."""
        if self._group.state is not GroupState.DRAINING:
            if not self._group.state.is_serving:
                self._refuse("Drain", GroupState.READY)
            self._group.drain()
        await self._core.wait_drained()
        return admin_pb2.DrainResponse()

    async def profile(self, request: admin_pb2.ProfileRequest) -> admin_pb2.ProfileResponse:
        """Record what the ranks do. Needs READY; requests are served meanwhile."""
        if not 0 < request.duration_s <= LONGEST_PROFILE_S:
            raise InvalidCommand(
                "duration_s", f"must be more than 0 and at most {LONGEST_PROFILE_S:g}, not {request.duration_s:g}"
            )
        epoch = self._require("Profile", GroupState.READY)
        return await self._run("Profile", self._profile(epoch, request))

    async def place_experts(self, most_swaps: int | None = None) -> admin_pb2.PlaceExpertsResponse:
        """Move experts to the ranks that are fastest with them, so many pairs at most, while requests run or not.

        Needs READY, a model of experts, and neither engine.batchInvariant nor engine.adapters.experts.
        """
        epoch = self._require("PlaceExperts", GroupState.READY)
        if self._settings.config.experts is None:
            raise WrongState("PlaceExperts needs a model of experts; this one has none: there is nothing to place")
        if self._settings.spec.engine.batch_invariant:
            raise WrongState(
                "PlaceExperts would add the sums of experts up in another order, which engine.batchInvariant rules "
                "out; set it to false first"
            )
        if self._settings.spec.engine.adapters.experts:
            raise WrongState(
                "PlaceExperts would part experts from what adapters add to them; set engine.adapters.experts to false "
                "first"
            )
        work = self._experts.place(lambda command: self._command_in_turn(epoch, command), most_swaps=most_swaps)
        return await self._run("PlaceExperts", work)

    async def update_weights(self) -> admin_pb2.UpdateWeightsResponse:
        """Read the model's files again in place of the weights that serve. Needs READY and idle."""
        epoch = self._require("UpdateWeights", GroupState.READY, idle=True)
        return await self._run("UpdateWeights", self._update_weights(epoch))

    async def load_adapter(self, request: admin_pb2.LoadAdapterRequest) -> admin_pb2.LoadAdapterResponse:
        """Load an adapter on all ranks while requests run, if need be in place of another. Needs READY."""
        epoch = self._require("LoadAdapter", GroupState.READY)
        adapter = self._group.adapters.new(request.name, request.directory)
        self._group.adapters.room_or_refuse()
        await self._run("LoadAdapter", self._load_adapter(epoch, adapter))
        return admin_pb2.LoadAdapterResponse()

    async def loaded_adapter(self, name: str) -> Adapter:
        """Return a known adapter that is on all ranks, loaded now if it was not.

        Waits for ranks and for room. Raises InvalidRequest where it cannot be loaded or was unloaded meanwhile, and
        QueueFull where it has waited LONGEST_WAIT_S.
        """
        until_s = self._clock() + LONGEST_WAIT_S
        while (adapter := self._group.adapters.find(name)) is not None:
            if adapter.number:
                self._group.adapters.ask(adapter)
                return adapter
            if (left_s := until_s - self._clock()) <= 0:
                raise QueueFull(f"adapter {name!r} waited {LONGEST_WAIT_S:g} s for its load: all others are in use")
            if not await self._try_to_load(adapter):
                await self._group.adapters.wait_for_room(left_s)
        raise InvalidRequest("model", f"adapter {name!r} was unloaded while the request was read")

    async def _try_to_load(self, adapter: Adapter) -> bool:
        """Load an adapter for a request; return False if it has to wait.

        Raises InvalidRequest if it cannot be loaded, EngineUnavailable where no request is accepted.
        """
        if self._core.is_resting:
            with suppress(GroupLost):  # then it waits for the next epoch
                await self.rouse()
        state, epoch = self._group.state, self._group.current
        if state in (GroupState.ASLEEP, GroupState.DRAINING, GroupState.CLOSED):
            raise EngineUnavailable(f"adapter {adapter.name!r}: the group is {state.name}: {_HINTS[state]}")
        if state is not GroupState.READY or epoch is None or self._under_way or self._group.adapters.room() is None:
            return False
        try:
            await self._run("LoadAdapter", self._load_adapter(epoch, adapter))
        except CommandFailed as error:
            raise InvalidRequest("model", f"adapter {adapter.name!r} cannot be loaded: {error}") from error
        except (GroupLost, WrongState):
            return False
        return True

    async def unload_adapter(self, request: admin_pb2.UnloadAdapterRequest) -> admin_pb2.UnloadAdapterResponse:
        """Forget an adapter that no request uses. A group without a live epoch only loads it no more."""
        if self._group.current is None:
            self._group.adapters.remove(request.name)
            return admin_pb2.UnloadAdapterResponse()
        epoch = self._require("UnloadAdapter", GroupState.READY)
        adapter = self._group.adapters.remove(request.name)
        if adapter.number:
            await self._run("UnloadAdapter", self._unload_adapter(epoch, adapter))
        return admin_pb2.UnloadAdapterResponse()

    def list_adapters(self) -> admin_pb2.ListAdaptersResponse:
        """Return the adapters that the group knows."""
        return self._group.adapters.list()

    # --- commands ---------------------------------------------------------------------------------------

    async def _reset_cache(self, epoch: Epoch, cache: ranks_pb2.AllocateCache) -> admin_pb2.ResetCacheResponse:
        async with self._core.hold():
            self._require_idle("ResetCache")
            try:
                reports = await self._command(epoch, ranks_pb2.GroupCommand(reset_cache=cache))
            except CommandFailed:
                # The ranks may have dropped the cache before one of them failed: the one that stands is empty then.
                self._use_cache(epoch.cache)
                raise
            self._use_cache(cache)
            epoch.cache = cache
            epoch.note_bytes(reports)
        return admin_pb2.ResetCacheResponse(
            block_size=cache.block_size,
            num_blocks=cache.num_blocks - 1,
            kv_bytes=[report.kv_bytes for report in reports],
        )

    def _use_cache(self, cache: ranks_pb2.AllocateCache) -> None:
        """Have the engine go on with an empty cache."""
        self._core.reset_cache(
            num_blocks=cache.num_blocks, block_size=cache.block_size, num_snapshots=cache.num_snapshots
        )

    async def _load_adapter(self, epoch: Epoch, adapter: Adapter) -> None:
        adapters = self._group.adapters
        async with self._core.hold():
            number, former = adapters.room_or_refuse()
            if former is not None:
                adapters.place(former, 0)
                await self._unload(epoch, former)
            await self._command(epoch, replace(adapter, number=number).command())
            adapters.place(adapter, number)

    async def _unload_adapter(self, epoch: Epoch, adapter: Adapter) -> None:
        async with self._core.hold():
            await self._unload(epoch, adapter)

    async def _unload(self, epoch: Epoch, adapter: Adapter) -> None:
        """Have ranks forget an adapter, inside a hold. It stays where it was if they cannot."""
        unload = ranks_pb2.UnloadAdapter(number=adapter.number)
        try:
            await self._command(epoch, ranks_pb2.GroupCommand(unload_adapter=unload))
        except CommandFailed:
            self._group.adapters.place(adapter, adapter.number)
            raise

    async def _update_weights(self, epoch: Epoch) -> admin_pb2.UpdateWeightsResponse:
        async with self._core.hold():
            self._require_idle("UpdateWeights")
            command = ranks_pb2.GroupCommand(update_weights=ranks_pb2.UpdateWeights())
            reports = await self._command(epoch, command)
            # KV of the old weights must not be found by a prefix any more.
            self._use_cache(epoch.cache)
            await epoch.load_adapters()
            epoch.note_bytes(reports)
        return admin_pb2.UpdateWeightsResponse(weight_bytes=[report.weight_bytes for report in reports])

    async def _sleep(self, epoch: Epoch, level: int) -> admin_pb2.SleepResponse:
        self._core.close_intake("the group is asleep; an administrator has to wake it (Admin.WakeUp, hetero wake)")
        try:
            async with self._core.hold():
                freed_bytes = await self._fall_asleep(epoch, "Sleep", level)
                self._group.enter(GroupState.ASLEEP)
        except BaseException:
            self._core.open_intake()
            raise
        return admin_pb2.SleepResponse(freed_bytes=freed_bytes)

    async def _fall_asleep(self, epoch: Epoch, call: str, level: int) -> list[int]:
        """Have all ranks give their memory up, inside a hold; return the bytes of each."""
        self._require_idle(call)
        reports = await self._command(epoch, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
        epoch.asleep = TAGS
        epoch.note_bytes(reports)
        return [report.freed_bytes for report in reports]

    async def _rest(self, epoch: Epoch, level: int) -> None:
        async with self._core.hold():
            began_s = self._clock()
            freed_bytes = await self._fall_asleep(epoch, "Rest", level)
            self._core.rest()
            idle = self._group.idle
            idle.rests, idle.sleeps, idle.sleep_s = True, idle.sleeps + 1, self._clock() - began_s
            idle.freed_bytes[:] = freed_bytes
            self._group.enter(GroupState.ASLEEP)

    async def _rouse(self, epoch: Epoch) -> None:
        try:
            await self._wake_up(epoch, epoch.asleep)
        except CommandFailed as error:
            epoch.end(f"the group rested and could not wake: {error}")

    async def _wake_up(self, epoch: Epoch, tags: frozenset[str]) -> admin_pb2.WakeUpResponse:
        wake = ranks_pb2.WakeCommand(weights=WEIGHTS in tags, cache=epoch.cache if KV in tags else None)
        async with self._core.hold():
            began_s = self._clock()
            reports = await self._command(epoch, ranks_pb2.GroupCommand(wake=wake))
            if KV in tags:
                self._use_cache(epoch.cache)
            epoch.asleep -= tags
            epoch.note_bytes(reports)
            if not epoch.asleep:
                await epoch.load_adapters()
                if self._core.is_resting:
                    self._group.idle.rests, self._group.idle.wake_s = False, self._clock() - began_s
                    self._core.rouse()
                self._core.open_intake()
                self._group.enter(GroupState.READY)
        return admin_pb2.WakeUpResponse(asleep=sorted(epoch.asleep))

    async def _profile(self, epoch: Epoch, request: admin_pb2.ProfileRequest) -> admin_pb2.ProfileResponse:
        async with self._core.hold():
            await self._command(epoch, ranks_pb2.GroupCommand(start_profile=ranks_pb2.StartProfile()))
        given_up = asyncio.ensure_future(self._given_up.wait())
        await asyncio.wait((given_up, epoch.over), timeout=request.duration_s, return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        stop = ranks_pb2.StopProfile(with_trace=request.with_trace)
        async with self._core.hold():
            reports = await self._command(epoch, ranks_pb2.GroupCommand(stop_profile=stop))
        ranks = [admin_pb2.RankProfile(table=report.profile_table, trace=report.profile_trace) for report in reports]
        return admin_pb2.ProfileResponse(ranks=ranks)

    async def _command(self, epoch: Epoch, command: ranks_pb2.GroupCommand) -> list[ranks_pb2.CommandReport]:
        """Have every rank carry out a command, inside a hold. When this returns, all have and the epoch is live."""
        with _carried_out_in(epoch):
            return await epoch.command(command)

    async def _command_in_turn(self, epoch: Epoch, command: ranks_pb2.GroupCommand) -> CommandAnswer:
        """As `_command`, while steps go on."""
        with _carried_out_in(epoch):
            return await epoch.command_in_turn(command)

    # --- one at a time, in the right state --------------------------------------------------------------

    async def _run(self, call: str, work: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end, even if the caller gives up waiting."""
        self._under_way = call
        self._free.clear()
        self._given_up.clear()
        logger.info("%s begins", call)
        task = asyncio.create_task(work, name=call)
        task.add_done_callback(self._note_end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._given_up.set()
            raise

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._under_way = ""
        self._free.set()
        self._group.adapters.note_change()
        error = None if task.cancelled() else task.exception()
        logger.info("%s ended%s", task.get_name(), f": {error}" if error else "")

    def _require(self, call: str, state: GroupState, *, idle: bool = False) -> Epoch:
        """Return the live epoch of a group in this state while no other call is under way. Raises WrongState.

        With `idle` it must have no request either.
        """
        epoch = self._group.current
        if self._group.state is not state or epoch is None:
            self._refuse(call, state)
        if self._under_way:
            raise WrongState(f"{call}: {self._under_way} is under way; try again when it has ended")
        if idle:
            self._require_idle(call)
        return epoch

    def _refuse(self, call: str, state: GroupState) -> NoReturn:
        now = self._group.state
        # An epoch that has just ended has not changed the state yet.
        hint = _HINTS[GroupState.ABORTED if now is state else now]
        raise WrongState(f"{call} needs a group that is {state.name}; it is {now.name}: {hint}")

    def _require_idle(self, call: str) -> None:
        if not self._core.is_idle:
            stats = self._core.stats()
            raise WrongState(
                f"{call} needs a group without requests; {stats.running_requests} run and {stats.waiting_requests} "
                "wait: try again when they have ended, or abort them"
            )


@contextmanager
def _carried_out_in(epoch: Epoch) -> Iterator[None]:
    """Surround a command. Raises GroupLost unless the epoch is live before and after, and CommandFailed."""
    _check_live(epoch)
    try:
        yield
    except CommandFailed as error:
        raise CommandFailed(f"the group is as it was; a rank could not do it: {error}") from error
    _check_live(epoch)


def _check_live(epoch: Epoch) -> None:
    if epoch.is_over:
        raise GroupLost(f"epoch {epoch.number} has ended; the next one is awake and has the resource's own cache")
