"""One epoch of a group: rendezvous, load, allocate, warm up, serve, until something ends it.

`run` goes through the phases in order and never returns: it raises EpochEnded with the first reason, be it a rank's
Failure, its stream's end, its silence, an answer that did not come in time or does not fit, or the engine's own
finding. Its caller clears up: nothing here outlives the epoch.

While it serves, `command` has the ranks do something else together; `cache`, `asleep` and the bytes of the ranks
describe the state after it. `receive` and `end` may be called at any time from the same asyncio loop; they do not wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

from hetero_api.errors import PlanError
from hetero_api.group_state import GroupState
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.adapters.registry import AdapterRegistry
from hetero_gateway.group.cache_size import first_cache
from hetero_gateway.group.errors import CacheSizeError, CommandFailed, EpochEnded, RankMisbehaved
from hetero_gateway.group.executor import CommandAnswer, GroupExecutor
from hetero_gateway.group.orders import built_exchange, form_orders, load_order
from hetero_gateway.group.placement import GroupPlacement, PlacedRanks, Placement
from hetero_gateway.group.recovery import BUSY_SILENCE_S, SERVING_SILENCE_S, HeartbeatWatch
from hetero_gateway.group.roster import Member, broadcast
from hetero_gateway.group.settings import GroupSettings
from hetero_gateway.group.warm_up import MAX_WARM_SEQS, StepBounds, masks_of, sampling_slots, warm_up_plans

logger = logging.getLogger(__name__)

RAN_WELL_STEPS: Final = 10
"""Steps of requests that show that an epoch works ..."""
RAN_WELL_S: Final = 10.0
"""... and seconds of serving that show it as well."""


class Epoch:
    """One epoch of a group. `on_phase` gets every phase after it began, `on_silent` the members that fell silent."""

    def __init__(
        self,
        number: int,
        members: Sequence[Member],
        *,
        settings: GroupSettings,
        placement: GroupPlacement,
        adapters: AdapterRegistry,
        core: EngineCore,
        on_phase: Callable[[GroupState], None],
        on_silent: Callable[[Member, str], None],
        observe_step: Callable[[float], None],
    ) -> None:
        self.number = number
        self.members = tuple(members)
        self.phase = GroupState.FORMING
        self.exchange = ranks_pb2.EXCHANGE_KIND_UNSPECIFIED
        self.exchange_reason = ""
        """Why the exchange is not the one that was asked for."""
        self.cache = ranks_pb2.AllocateCache()
        """Without blocks until chosen. While the cache is asleep, the one that was and will be."""
        self.asleep: frozenset[str] = frozenset()
        """Tags of the memory that was given up."""
        self.loaded: list[ranks_pb2.Loaded] = []
        """Report of each rank on its load, in rank order; empty until all have loaded."""
        self.weight_bytes: dict[int, int] = {}
        self.kv_bytes: dict[int, int] = {}
        self.heartbeats: dict[int, ranks_pb2.Heartbeat] = {}
        """Last heartbeat of each rank."""
        self._settings = settings
        self._placement = placement
        self._adapters = adapters
        self._core = core
        self._on_phase = on_phase
        self._rendezvous_timeout_s = settings.spec.recovery.rendezvous_timeout_seconds
        self._executor = GroupExecutor(
            [member.link for member in members],
            epoch=number,
            step_timeout_s=settings.spec.recovery.step_timeout_seconds,
            command_timeout_s=self._rendezvous_timeout_s,
            observe_step=observe_step,
            on_late=self.end,
        )
        self._heartbeats = HeartbeatWatch(
            range(len(members)), on_silent=lambda rank, reason: on_silent(self.members[rank], reason)
        )
        self._served_since_s: float | None = None
        self._warm_up_steps = 0
        self._expected = ""
        self._answers: dict[int, ranks_pb2.RankMessage] = {}
        self._answered = asyncio.Event()
        self.over: asyncio.Future[EpochEnded] = asyncio.get_running_loop().create_future()
        """Done when it has ended. Not to be cancelled."""

    @property
    def is_over(self) -> bool:
        """Whether something has ended it; `run` may not have come to raise that yet."""
        return self.over.done()

    @property
    def stalled_s(self) -> float:
        """Seconds that the oldest step out, of warm-up or of requests, has had; 0 when there is none."""
        return self._executor.stalled_s

    @property
    def ran_well(self) -> bool:
        """True once it has served long enough to show that the ranks and their model work."""
        if self._served_since_s is None:
            return False
        served_s = asyncio.get_running_loop().time() - self._served_since_s
        return served_s >= RAN_WELL_S or self._executor.num_steps - self._warm_up_steps >= RAN_WELL_STEPS

    async def run(self) -> NoReturn:
        """Go through all phases and serve. Raises EpochEnded."""
        watching = asyncio.create_task(self._heartbeats.run(), name="heartbeats")
        try:
            deadline_s = asyncio.get_running_loop().time() + self._rendezvous_timeout_s
            ranks = await self._form(deadline_s)
            began_s = asyncio.get_running_loop().time()
            placement = await self._plan(ranks)
            deadline_s += asyncio.get_running_loop().time() - began_s  # no rank is late by what the gateway took
            await self._load(placement, deadline_s)
            await self._allocate(placement, deadline_s)
            await self._warm_up()
            self._open()
            raise await self.over
        finally:
            watching.cancel()

    def end(self, reason: str, *, permanent: bool = False) -> None:
        """End the epoch. Only the first reason counts."""
        if not self.over.done():
            self.over.set_result(EpochEnded(reason, permanent=permanent))
            self._executor.lose(reason)

    def receive(self, member: Member, message: ranks_pb2.RankMessage) -> None:
        """Take a member's message of this epoch. Raises RankMisbehaved if it must not say that now."""
        self._heartbeats.hear(member.rank)
        kind = message.WhichOneof("body") or "nothing"
        if kind == "step_result":
            self._executor.take_results(member.rank, [message.step_result, *message.further_results])
        elif kind == "heartbeat":
            self._take_heartbeat(member.rank, message.heartbeat)
        elif kind == "step_trace":
            self._core.take_step_trace(member.rank, message.step_trace)
        elif kind == "echo":
            member.link.send(ranks_pb2.GatewayMessage(epoch=self.number, echo=message.echo))
        elif kind == "failure":
            self.end(f"{member} failed: {message.failure.message}", permanent=message.failure.permanent)
        elif kind == self._expected and member.rank not in self._answers:
            self._answers[member.rank] = message
            if len(self._answers) == len(self.members):
                self._answered.set()
        else:
            expected = self._expected or "nothing"
            raise RankMisbehaved(f"{member} said {kind} in epoch {self.number}, expected of it is {expected}")

    def _take_heartbeat(self, rank: int, heartbeat: ranks_pb2.Heartbeat) -> None:
        last = self.heartbeats.get(rank)
        self.heartbeats[rank] = heartbeat
        if heartbeat.HasField("progress") and (last is None or heartbeat.progress != last.progress):
            self._executor.note_progress()

    async def command(self, command: ranks_pb2.GroupCommand) -> list[ranks_pb2.CommandReport]:
        """Have every rank carry out a command between two steps; return their reports, in rank order.

        The engine must be held. Raises CommandFailed when no rank did it, GroupLost when the epoch ended.
        """
        with self._tolerating_silence():
            return self._agreed(await self._executor.command(command))

    async def command_in_turn(self, command: ranks_pb2.GroupCommand) -> CommandAnswer:
        """As `command`, while steps go on: it takes its turn behind those that are out."""
        answer = await self._executor.command_in_turn(command)
        self._agreed(answer.reports)
        return answer

    def _agreed(self, reports: list[ranks_pb2.CommandReport]) -> list[ranks_pb2.CommandReport]:
        """Return the reports if all ranks did it; raise as `command` does if not."""
        if all(report.done for report in reports):
            return reports
        problems = "; ".join(
            f"{member}: {report.problem}"
            for member, report in zip(self.members, reports, strict=True)
            if report.problem
        )
        if any(report.done for report in reports):
            done = ", ".join(str(rank) for rank, report in enumerate(reports) if report.done)
            self.end(f"only rank {done} did what all had to do: {problems or 'the others do not say why'}")
            raise GroupLost(f"the ranks do not agree on what they did: {problems}")
        raise CommandFailed(problems or "the ranks do not say why")

    def note_bytes(self, reports: Sequence[ranks_pb2.CommandReport]) -> None:
        """Note the bytes that ranks hold after a command that changed them."""
        self.weight_bytes = {rank: report.weight_bytes for rank, report in enumerate(reports)}
        self.kv_bytes = {rank: report.kv_bytes for rank, report in enumerate(reports)}

    @contextmanager
    def _tolerating_silence(self) -> Iterator[None]:
        self._heartbeats.tolerate(BUSY_SILENCE_S)
        try:
            yield
        finally:
            self._heartbeats.tolerate(SERVING_SILENCE_S)

    # --- phases -----------------------------------------------------------------------------------------

    async def _form(self, deadline_s: float) -> PlacedRanks:
        orders = form_orders(
            self._settings, self.members, epoch=self.number, measures_times=self._placement.needs_times
        )
        for member, order in zip(self.members, orders, strict=True):
            member.link.send(ranks_pb2.GatewayMessage(epoch=self.number, form_group=order))
        answers = await self._await_answers("formed", deadline_s)
        hellos = [member.hello for member in self.members]
        ranks = PlacedRanks(hellos, [message.formed for message in answers])
        self.exchange, self.exchange_reason = built_exchange(self._settings.spec.exchange.kind, ranks.formed)
        return ranks

    async def _plan(self, ranks: PlacedRanks) -> Placement:
        """Settle the placement. Ends the epoch for good when the model cannot be spread as the resource asks."""
        settling = asyncio.ensure_future(self._placement.settle(ranks))
        try:
            await asyncio.wait((settling, self.over), return_when=asyncio.FIRST_COMPLETED)
            if self.is_over:
                raise self.over.result()
            return settling.result()
        except PlanError as error:
            raise EpochEnded(str(error), permanent=True) from error
        finally:
            settling.cancel()

    async def _load(self, placement: Placement, deadline_s: float) -> None:
        self._heartbeats.tolerate(BUSY_SILENCE_S)
        self._enter(GroupState.LOADING)
        order = load_order(self._settings, placement.plan, placement.streaming, placement.draft_plan)
        self._send_all(ranks_pb2.GatewayMessage(epoch=self.number, load_model=order))
        answers = await self._await_answers("loaded", deadline_s)
        self.loaded = [message.loaded for message in answers]
        self.weight_bytes = {rank: loaded.weight_bytes for rank, loaded in enumerate(self.loaded)}

    async def _allocate(self, placement: Placement, deadline_s: float) -> None:
        try:
            self.cache = first_cache(self._settings, self.loaded)
        except CacheSizeError as error:
            raise EpochEnded(str(error), permanent=True) from error
        self._send_all(ranks_pb2.GatewayMessage(epoch=self.number, allocate_cache=self.cache))
        answers = await self._await_answers("allocated", deadline_s)
        self.kv_bytes = {rank: message.allocated.kv_bytes for rank, message in enumerate(answers)}
        if placement.streaming is not None:
            problems = (
                f"{member}: {message.allocated.streaming_problem}"
                for member, message in zip(self.members, answers, strict=True)
                if message.allocated.streaming_problem
            )
            problem = "; ".join(problems)
            if problem and self._settings.spec.engine.expert_streaming:
                raise EpochEnded(f"spec.engine.expertStreaming: {problem}", permanent=True)
            if problem:
                self._placement.note_resident(problem)
                logger.warning("epoch=%d no experts are streamed: %s", self.number, problem)
            else:
                self._executor.streams_from = placement.streaming.min_rows

    async def _warm_up(self) -> None:
        self._expected = ""
        try:
            await self._run_warm_up()
            await self.load_adapters()
        except GroupLost as error:
            self.end(f"warm-up: {error}")
            raise await self.over from error

    async def _run_warm_up(self) -> None:
        """Compute the first plans. Raises GroupLost."""
        # Ranks that all kept their weights are warm, and only their gateway is new.
        are_warm = all(report.load_s == 0 for report in self.loaded)
        brief = are_warm or self._core.paused_requests > 0
        graph_sizes = () if brief else self._graph_sizes()
        plans = warm_up_plans(
            self._step_bounds(),
            on_host=not any(map(_is_gpu, self.members)),
            brief=brief,
            graph_sizes=graph_sizes,
            drafts=self._settings.draft is not None,
        )
        for plan in plans:
            masks = masks_of(plan, vocab_size=self._settings.config.vocab_size)
            result = await self._executor.compute(plan, masks)
            expected = sampling_slots(plan)
            if list(result.slots) != expected:
                raise EpochEnded(f"warm-up: slots {expected} had to sample, slots {list(result.slots)} did")
        self._warm_up_steps = self._executor.num_steps
        if self._settings.config.experts is not None:
            # Which experts the tokens of the warm-up chose means nothing: the count starts over.
            await self._executor.command(ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts()))

    async def load_adapters(self) -> None:
        """Load what was on the ranks before; the engine must be held or closed. Raises GroupLost.

        An adapter that cannot be loaded again is on the ranks no more, and its requests end with the reason.
        """
        for adapter in self._adapters.loaded:
            try:
                await self.command(adapter.command())
            except CommandFailed as error:
                problem = f"adapter {adapter.name!r} cannot be loaded again: {error}"
                logger.error("epoch=%d %s", self.number, problem)
                self._core.fail_adapter(adapter.number, problem)
                self._adapters.place(adapter, 0)

    def _graph_sizes(self) -> set[int]:
        """Return the graph sizes to warm up: all that ranks make, but no large ones where host ranks take part."""
        sizes = {size for loaded in self.loaded for size in loaded.graph_sizes}
        if all(map(_is_gpu, self.members)):
            return sizes
        return {size for size in sizes if size <= MAX_WARM_SEQS}

    def _step_bounds(self) -> StepBounds:
        engine, cache = self._settings.spec.engine, self.cache
        return StepBounds(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=self._settings.max_model_len,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
        )

    def _open(self) -> None:
        if self.is_over:
            return
        cache = self.cache
        self._heartbeats.tolerate(SERVING_SILENCE_S)
        self._served_since_s = asyncio.get_running_loop().time()
        in_flight = self._executor.in_flight
        self._core.open(
            in_flight,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            num_snapshots=cache.num_snapshots,
            on_broken=self.end,
        )
        self._enter(GroupState.READY)

    # --- shared -----------------------------------------------------------------------------------------

    def _enter(self, phase: GroupState) -> None:
        self.phase = phase
        logger.info("epoch=%d %s", self.number, phase.value)
        self._on_phase(phase)

    def _send_all(self, message: ranks_pb2.GatewayMessage) -> None:
        broadcast((member.link for member in self.members), message)

    async def _await_answers(self, kind: str, deadline_s: float) -> list[ranks_pb2.RankMessage]:
        """Wait for every rank's answer of one kind; return them in rank order. Raises EpochEnded.

        The deadline moves on while ranks say that they get on: how long a load takes depends on the model's size.
        """
        self._expected, self._answers, self._answered = kind, {}, asyncio.Event()
        now = asyncio.get_running_loop().time
        answered = asyncio.ensure_future(self._answered.wait())
        try:
            left_s = deadline_s - now()
            while True:
                await asyncio.wait((answered, self.over), timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
                left_s = self._executor.progressed_s + self._rendezvous_timeout_s - now()
                if self.over.done() or self._answered.is_set() or left_s <= 0:
                    break
        finally:
            answered.cancel()
        if self.over.done():
            raise self.over.result()
        if not self._answered.is_set():
            silent = ", ".join(str(member) for member in self.members if member.rank not in self._answers)
            raise EpochEnded(
                f"{silent} did not answer {kind!r} within {self._rendezvous_timeout_s:g} s of the epoch's "
                "begin or the last progress (spec.recovery.rendezvousTimeoutSeconds)"
            )
        return [self._answers[member.rank] for member in self.members]


def _is_gpu(member: Member) -> bool:
    return member.hello.device.kind == ranks_pb2.DEVICE_KIND_CUDA
