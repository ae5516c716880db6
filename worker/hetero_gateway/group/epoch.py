"""One epoch of a group: rendezvous, load, allocate, warm up, serve, until something ends it.

`run` goes through the phases in order and never returns: it raises EpochEnded with the first reason, be it a rank's
Failure, its stream's end, an answer that did not come in time or does not fit, or the engine's own finding. Whoever
runs it clears up: nothing here outlives the epoch but what `run` was given.

`receive` and `end` may be called at any time from the same asyncio loop; they do not wait.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import GroupLost
from hetero_gateway.group.cache_size import choose_num_blocks
from hetero_gateway.group.errors import CacheSizeError, EpochEnded, RankMisbehaved
from hetero_gateway.group.executor import GroupExecutor
from hetero_gateway.group.roster import Member
from hetero_gateway.group.settings import GroupSettings
from hetero_gateway.group.warm_up import StepBounds, warm_up_plans

logger = logging.getLogger(__name__)

_SEGMENT_RANDOM_BYTES: Final = 4


class Phase(enum.Enum):
    """How far an epoch is."""

    FORMING = "forming"
    LOADING = "loading"
    READY = "ready"


class Epoch:
    """See the module. `on_phase` is told of every phase after it began."""

    def __init__(
        self,
        number: int,
        members: Sequence[Member],
        *,
        settings: GroupSettings,
        core: EngineCore,
        on_phase: Callable[[Phase], None],
        observe_step: Callable[[float], None],
    ) -> None:
        self.number = number
        self.members = tuple(members)
        self.phase = Phase.FORMING
        self.exchange = ranks_pb2.EXCHANGE_KIND_UNSPECIFIED
        self.num_blocks = 0
        """Null block included; 0 until chosen."""
        self.loaded: dict[int, ranks_pb2.Loaded] = {}
        self.allocated: dict[int, ranks_pb2.Allocated] = {}
        self._settings = settings
        self._core = core
        self._on_phase = on_phase
        self._executor = GroupExecutor(
            [member.link for member in members],
            epoch=number,
            step_timeout_s=settings.step_timeout_s,
            observe_step=observe_step,
        )
        self._expected = ""
        self._answers: dict[int, ranks_pb2.RankMessage] = {}
        self._answered = asyncio.Event()
        self._over: asyncio.Future[EpochEnded] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Whether something has ended it; `run` may not have come to raise that yet."""
        return self._over.done()

    @property
    def stalled_s(self) -> float:
        """Seconds that the step in flight, of warm-up or of requests, has been out; 0 when there is none."""
        return self._executor.stalled_s

    async def run(self) -> NoReturn:
        """Live. Raises EpochEnded."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.rendezvous_timeout_s
        await self._form(deadline_s)
        await self._load(deadline_s)
        await self._allocate(deadline_s)
        await self._warm_up()
        self._open()
        raise await self._over

    def end(self, reason: str, *, permanent: bool = False) -> None:
        """The epoch is over. Only the first reason counts."""
        if not self._over.done():
            self._over.set_result(EpochEnded(reason, permanent=permanent))
            self._executor.lose(reason)

    def receive(self, member: Member, message: ranks_pb2.RankMessage) -> None:
        """What a member said in this epoch. Raises RankMisbehaved if it must not say that now."""
        kind = message.WhichOneof("body") or "nothing"
        if kind == "failure":
            self.end(f"{member} failed: {message.failure.message}", permanent=message.failure.permanent)
        elif kind == "step_result" and member.rank == 0:
            self._executor.take_result(message.step_result)
        elif kind == self._expected and member.rank not in self._answers:
            self._answers[member.rank] = message
            if len(self._answers) == len(self.members):
                self._answered.set()
        else:
            expected = self._expected or "nothing"
            raise RankMisbehaved(f"{member} said {kind} in epoch {self.number}, expected of it is {expected}")

    # --- phases -----------------------------------------------------------------------------------------

    async def _form(self, deadline_s: float) -> None:
        places = [_place_of(member) for member in self.members]
        segment = f"hetero-{self._settings.name}-{secrets.token_hex(_SEGMENT_RANDOM_BYTES)}-{self.number}"
        form = ranks_pb2.FormGroup(
            places=places,
            shard_plan=self._settings.shard_plan.to_proto(),
            store_address=self.members[0].hello.store_address,
            exchange=_exchange_between(self.members),
            segment_name=segment,
            timeout_s=self._settings.step_timeout_s,
            max_num_batched_tokens=self._settings.max_num_batched_tokens,
            max_num_seqs=self._settings.max_num_seqs,
        )
        for member in self.members:
            message = ranks_pb2.GatewayMessage(epoch=self.number, form_group=form)
            message.form_group.rank = member.rank
            member.link.send(message)
        answers = await self._await_answers("formed", deadline_s)
        kinds = {message.formed.exchange for message in answers}
        if len(kinds) != 1:
            names = ", ".join(map(ranks_pb2.ExchangeKind.Name, sorted(kinds)))
            raise EpochEnded(f"the ranks built different exchanges: {names}")
        self.exchange = kinds.pop()

    async def _load(self, deadline_s: float) -> None:
        self._enter(Phase.LOADING)
        order = ranks_pb2.LoadModel(dtype=self._settings.dtype, max_model_len=self._settings.max_model_len)
        self._send_all(ranks_pb2.GatewayMessage(epoch=self.number, load_model=order))
        answers = await self._await_answers("loaded", deadline_s)
        self.loaded = {rank: message.loaded for rank, message in enumerate(answers)}

    async def _allocate(self, deadline_s: float) -> None:
        try:
            self.num_blocks = choose_num_blocks(self._settings, [self.loaded[member.rank] for member in self.members])
        except CacheSizeError as error:
            raise EpochEnded(str(error), permanent=True) from error
        order = ranks_pb2.AllocateCache(num_blocks=self.num_blocks, block_size=self._settings.block_size)
        self._send_all(ranks_pb2.GatewayMessage(epoch=self.number, allocate_cache=order))
        answers = await self._await_answers("allocated", deadline_s)
        self.allocated = {rank: message.allocated for rank, message in enumerate(answers)}

    async def _warm_up(self) -> None:
        self._expected = ""
        bounds = StepBounds(
            max_num_seqs=self._settings.max_num_seqs,
            max_num_batched_tokens=self._settings.max_num_batched_tokens,
            max_model_len=self._settings.max_model_len,
            block_size=self._settings.block_size,
            num_blocks=self.num_blocks,
        )
        for plan in warm_up_plans(bounds):
            try:
                result = await self._executor.execute(plan)
            except GroupLost as error:
                self.end(f"warm-up: {error}")
                raise await self._over from error
            expected = [part.slot for part in plan.scheduled if part.sample]
            if list(result.slots) != expected:
                raise EpochEnded(f"warm-up: slots {expected} had to sample, slots {list(result.slots)} did")

    def _open(self) -> None:
        if self.is_over:
            return
        self._core.open(self._executor, num_blocks=self.num_blocks, on_broken=self.end)
        self._enter(Phase.READY)

    # --- shared -----------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        logger.info("epoch=%d %s", self.number, phase.value)
        self._on_phase(phase)

    def _send_all(self, message: ranks_pb2.GatewayMessage) -> None:
        for member in self.members:
            member.link.send(message)

    async def _await_answers(self, kind: str, deadline_s: float) -> list[ranks_pb2.RankMessage]:
        """Everyone's answer of this kind, in rank order. Raises EpochEnded."""
        self._expected, self._answers, self._answered = kind, {}, asyncio.Event()
        left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        answered = asyncio.ensure_future(self._answered.wait())
        try:
            await asyncio.wait((answered, self._over), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered.cancel()
        if self._over.done():
            raise self._over.result()
        if not self._answered.is_set():
            silent = ", ".join(str(member) for member in self.members if member.rank not in self._answers)
            raise EpochEnded(
                f"{silent} did not answer {kind!r} within {self._settings.rendezvous_timeout_s:g} s of the epoch's "
                "begin (spec.recovery.rendezvousTimeoutSeconds)"
            )
        return [self._answers[member.rank] for member in self.members]


def _exchange_between(members: Sequence[Member]) -> ranks_pb2.ExchangeKind.ValueType:
    """Shared memory where all ranks are on one host, the network otherwise."""
    hosts = {member.hello.host_id for member in members}
    return ranks_pb2.EXCHANGE_KIND_SHM if len(hosts) == 1 and "" not in hosts else ranks_pb2.EXCHANGE_KIND_GLOO


def _place_of(member: Member) -> ranks_pb2.RankPlace:
    hello = member.hello
    return ranks_pb2.RankPlace(
        rank=member.rank, pool=hello.pool, pod_name=hello.pod_name, host_id=hello.host_id, device=hello.device
    )
