"""A group without gRPC: settings, ranks that the test scripts message by message, and ranks that just obey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from hetero_api.contract import VERSION
from hetero_api.group_state import GroupState
from hetero_api.manifest import parse_resource
from hetero_api.model_config import ModelConfig
from hetero_api.spec import HeteroInference, HeteroInferenceSpec
from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.text.detokenizer import ByteLevelText, IncrementalDetokenizer
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.recovery import HEARTBEAT_INTERVAL_S
from hetero_gateway.group.rendezvous import Group
from hetero_gateway.group.roster import Closing, RankLink
from hetero_gateway.group.settings import GroupSettings
from hetero_worker.process.gateway_link import one_by_one
from tests.unit.engine.engine_setup import VOCAB_SIZE, engine_config
from tests.unit.engine.fake_ranks import FakeRanks

FINGERPRINT = "f" * 64
KV_BYTES_PER_TOKEN = 8
EXPERT_BYTES = 1000
PATIENCE_S = 5.0
DEVICE = ranks_pb2.DeviceReport(
    kind=ranks_pb2.DEVICE_KIND_CPU,
    memory_bytes=1 << 34,
    speeds=ranks_pb2.DeviceSpeeds(memory_bandwidth=1e10, matmul=[ranks_pb2.MatmulRate(dtype="float32", flops=1e11)]),
)
HOST_TIMES = [ranks_pb2.ExchangeTime(bytes=4096, seconds=1e-5), ranks_pb2.ExchangeTime(bytes=1 << 20, seconds=1e-4)]

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(SMOLLM2 | changes)


def resource(
    *pools: dict[str, Any], shares: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **spec: Any
) -> HeteroInference:
    """A resource; a pool without a type is a CPU pool."""
    body = {
        "model": {"uri": "hf://org/model"},
        "pools": [{"type": "CPU", **pool} for pool in pools or ({"name": "cpu", "ranks": 2},)],
        "placement": {"shares": shares or {}},
        "engine": engine or {},
        **spec,
    }
    head = {"apiVersion": "heteroinference.io/v1alpha1", "kind": "HeteroInference", "metadata": {"name": "g"}}
    return parse_resource(head | {"spec": body})


def spec_of(*pools: dict[str, Any], **rest: Any) -> HeteroInferenceSpec:
    return resource(*pools, **rest).spec


def group_settings(*pools: dict[str, Any], **rest: Any) -> GroupSettings:
    """SmolLM2's shape, sequences of at most 64 tokens, blocks of 4."""
    defaults: dict[str, Any] = {
        "engine": {"blockSize": 4, "maxNumSeqs": 4, "maxNumBatchedTokens": 64},
        "model": {"uri": "hf://org/model", "maxModelLen": 64},
    }
    return GroupSettings.from_resource(
        resource(*pools, **(defaults | rest)), model_config(), model_fingerprint=FINGERPRINT
    )


def with_recovery(settings: GroupSettings, **changes: float) -> GroupSettings:
    """The settings with other limits of spec.recovery, also such as no resource could have."""
    recovery = settings.spec.recovery.model_copy(update=changes)
    return replace(settings, spec=settings.spec.model_copy(update={"recovery": recovery}))


def new_core(config: EngineConfig | None = None) -> EngineCore:
    def detokenizer(stop: Sequence[str], *_: object) -> IncrementalDetokenizer:
        text = ByteLevelText(lambda token_id: bytes([ord("A") + token_id % 26]))
        return IncrementalDetokenizer(text, stop=stop)

    return EngineCore(config or engine_config(), new_detokenizer=detokenizer)


WARM_UP_PLANS = 5 + 2 * 3
"""Of GroupBench's ranks, which have four slots: five for the sizes of steps, three for the first four ways to draw, and
as many for the fifth."""


class WarmRanks(FakeRanks):
    """FakeRanks that also do commands. Asleep, they compute nothing."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int, max_num_seqs: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size, max_num_seqs=max_num_seqs)
        self.cache: tuple[int, int] | None = (num_blocks, block_size)
        """Blocks, null block included, and positions a block; None while it is asleep."""
        self.has_weights = True
        self.is_recording = False
        self.adapters: dict[int, str] = {}
        """Directories of adapters, by their numbers."""
        self.used_adapters: list[int] = []
        """Adapters of the sequences that were bound."""
        self.problem_of_adapters = ""

    def execute(self, plan: ranks_pb2.StepPlan, *, masks: Sequence[bytes] = ()) -> ranks_pb2.StepResult:
        assert self.cache is not None
        assert self.has_weights
        self.used_adapters += [sequence.adapter for sequence in plan.new_sequences]
        assert all(number in self.adapters for number in self.used_adapters[-len(plan.new_sequences) :] if number)
        return super().execute(plan, masks=masks)

    def obey(self, step_id: int, command: ranks_pb2.GroupCommand) -> ranks_pb2.CommandReport:
        """Do it, as a plan of this id."""
        self._step_id += 1
        action = command.WhichOneof("action") or ""
        assert step_id == self._step_id
        assert not self.bound_slots or action.endswith(("profile", "experts", "adapter"))
        report = ranks_pb2.CommandReport(done=True)
        match action:
            case "reset_cache":
                self._allocate(command.reset_cache)
            case "sleep":
                self.cache, self.has_weights = None, False
                report.freed_bytes = command.sleep.level * 1000
            case "wake":
                self.has_weights = self.has_weights or command.wake.weights
                if command.wake.HasField("cache"):
                    self._allocate(command.wake.cache)
            case "load_adapter":
                report.problem = self.problem_of_adapters
                report.done = not report.problem
                if report.done:
                    self.adapters[command.load_adapter.number] = command.load_adapter.directory
            case "unload_adapter":
                del self.adapters[command.unload_adapter.number]
            case "start_profile":
                self.is_recording = True
            case "stop_profile":
                assert self.is_recording
                self.is_recording = False
                report.profile_table = "a table"
                report.profile_trace = b"a trace" if command.stop_profile.with_trace else b""
        report.weight_bytes = 1000 if self.has_weights else 0
        report.kv_bytes = KV_BYTES_PER_TOKEN * self.cache[0] * self.cache[1] if self.cache is not None else 0
        return report

    def _allocate(self, order: ranks_pb2.AllocateCache) -> None:
        step_id, has_weights = self._step_id, self.has_weights
        self.__init__(  # type: ignore[misc]
            num_blocks=order.num_blocks, block_size=order.block_size, vocab_size=self._vocab_size,
            max_num_seqs=self._max_num_seqs,
        )  # fmt: skip
        self._step_id, self.has_weights = step_id, has_weights

    @property
    def bound_slots(self) -> set[int]:
        return set(self._slots)


def hello(place: int, *, instance: str = "", **changes: Any) -> ranks_pb2.Hello:
    fields: dict[str, Any] = {
        "pool": "cpu",
        "ordinal": place,
        "local_rank": 0,
        "pod_name": f"pod-{place}",
        "host_id": "host",
        "instance_id": instance or f"instance-{place}",
        "store_address": f"127.0.0.1:{4000 + place}",
        "version": VERSION,
        "model_fingerprint": FINGERPRINT,
        "device": DEVICE,
    }
    return ranks_pb2.Hello(**(fields | changes))


class ScriptedRank:
    """One rank's stream, both ends of it in the test's hands."""

    def __init__(self, group: Group, ordinal: int, *, instance: str = "") -> None:
        self.group = group
        self.ordinal = ordinal
        self.instance = instance or f"instance-{ordinal}"
        self.link = RankLink(f"peer-{ordinal}")
        self.graph_sizes: tuple[int, ...] = ()
        self.streaming_problem = ""
        """Why it cannot share experts."""
        self.epoch = 0
        self._messages = self._parsed()

    async def _parsed(self) -> AsyncIterator[ranks_pb2.GatewayMessage]:
        async for payload in self.link.outgoing():
            for message in one_by_one(ranks_pb2.GatewayMessage.FromString(payload)):
                yield message

    def join(self, **changes: Any) -> None:
        self.say(0, hello=hello(self.ordinal, instance=self.instance, **changes))

    def say(self, epoch: int, **body: Any) -> None:
        """Send a message; the keyword is its body."""
        self.group.receive(self.link, ranks_pb2.RankMessage(epoch=epoch, **body))

    async def expect(self, kind: str) -> Any:
        """The next message's body, which must be of this kind."""
        message = await asyncio.wait_for(anext(self._messages), PATIENCE_S)
        assert message.WhichOneof("body") == kind, message
        self.epoch = message.epoch
        return getattr(message, kind)

    async def expect_end(self) -> Closing:
        """The stream ends with nothing more on it; how the gateway closed it."""
        async with asyncio.timeout(PATIENCE_S):
            assert [message async for message in self._messages] == []
        assert self.link.closing is not None
        return self.link.closing

    async def obey(self, kind: str, *, kv_budget_bytes: int = 1 << 20) -> Any:
        """Expect an order and answer it as a healthy rank does; the order."""
        order = await self.expect(kind)
        self.answer(kind, order, kv_budget_bytes=kv_budget_bytes)
        return order

    def answer(self, kind: str, order: Any, *, kv_budget_bytes: int = 1 << 20) -> None:
        match kind:
            case "form_group":
                times = HOST_TIMES if order.measure_exchange else []
                self.say(self.epoch, formed=ranks_pb2.Formed(exchange=order.exchange, host_times=times))
            case "load_model":
                loaded = ranks_pb2.Loaded(
                    weight_bytes=1000 + self.ordinal, kv_budget_bytes=kv_budget_bytes,
                    kv_bytes_per_token=KV_BYTES_PER_TOKEN, load_s=0.5, kernels=["k"],
                    graph_sizes=self.graph_sizes, graph_reserve_bytes=900 if self.graph_sizes else 0,
                )  # fmt: skip
                self.say(self.epoch, loaded=loaded)
            case "allocate_cache":
                kv_bytes = order.num_blocks * order.block_size * KV_BYTES_PER_TOKEN
                allocated = ranks_pb2.Allocated(kv_bytes=kv_bytes, streaming_problem=self.streaming_problem)
                self.say(self.epoch, allocated=allocated)

    def lose(self) -> None:
        """The process is gone."""
        self.group.leave(self.link, "connection reset")


class ObedientRank(ScriptedRank):
    """Does what it is told until its task is cancelled; rank 0 computes with WarmRanks. `abort` makes it say Hello."""

    def __init__(self, group: Group, ordinal: int, *, instance: str = "") -> None:
        super().__init__(group, ordinal, instance=instance)
        self.plans: list[ranks_pb2.StepPlan] = []
        self.holds_steps = False
        """Keep quiet when a plan comes."""
        self.beats = True
        self.problem = ""
        """Why it cannot do commands."""
        self.peers_fail = False
        """It can do commands, and another rank cannot."""
        self.expert_counts: dict[int, list[int]] = {}
        """By layer, whenever it is asked how often experts were chosen."""
        self.polls_of_reading = 0
        """How often it says that it is still reading, for each exchange of experts."""
        self.holds: ranks_pb2.HeldShard | None = None
        """Its weights, since it has gone over to another plan."""
        self._plan_key = ""
        self._polls = 0
        self.aborts: list[str] = []
        self._ended_epoch = 0
        self._ranks: WarmRanks | None = None

    async def beat(self) -> None:
        """Say that it lives, while it is in an epoch and `beats`."""
        while self.link.closing is None:
            if self.beats and self.epoch > self._ended_epoch:
                self.say(self.epoch, heartbeat=ranks_pb2.Heartbeat())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def live(self) -> None:
        try:
            async for message in self._messages:
                self._take(message)
        except Exception as error:
            # So that nobody waits for what this rank does no more.
            self.group.close(f"the test's rank {self.ordinal} broke: {error!r}")
            raise

    def _take(self, message: ranks_pb2.GatewayMessage) -> None:
        self.epoch = message.epoch
        kind = message.WhichOneof("body") or ""
        if kind == "abort":
            self.aborts.append(message.abort.reason)
            self._ended_epoch = message.epoch
            self.join(**({} if self.holds is None else {"held": self.holds}))
        elif kind == "step_plan":
            self._step(message.step_plan)
        elif kind != "shutdown":
            self._note(kind, getattr(message, kind))

    def _note(self, kind: str, order: Any) -> None:
        if kind == "allocate_cache":
            self.plans = []
            self._ranks = WarmRanks(
                num_blocks=order.num_blocks, block_size=order.block_size, vocab_size=VOCAB_SIZE, max_num_seqs=4
            )
        if kind == "load_model":
            self._plan_key = order.plan_key
        self.answer(kind, order)

    def _step(self, plan: ranks_pb2.StepPlan) -> None:
        self.plans.append(plan)
        assert self._ranks is not None
        if self.holds_steps:
            return
        if plan.HasField("command"):
            report = self._obey(plan)
            self.say(self.epoch, step_result=ranks_pb2.StepResult(step_id=plan.step_id, command_report=report))
        else:
            result = self._ranks.execute(plan)
            if self.ordinal == 0:
                self.say(self.epoch, step_result=result)

    def go_on(self) -> None:
        """Do the steps that it kept quiet about, all behind the warm-up's, and hold no more."""
        self.holds_steps = False
        held = self.plans[WARM_UP_PLANS:]
        del self.plans[WARM_UP_PLANS:]
        for plan in held:
            self._step(plan)

    def _obey(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.CommandReport:
        assert self._ranks is not None
        if not self.problem and not self.peers_fail:
            report = self._ranks.obey(plan.step_id, plan.command)
            if plan.command.HasField("count_experts"):
                report.expert_counts.extend(
                    ranks_pb2.ExpertCounts(layer=layer, tokens=tokens) for layer, tokens in self.expert_counts.items()
                )
            if plan.command.place_experts.ahead:
                report.is_reading = self._polls < self.polls_of_reading
                self._polls = self._polls + 1 if report.is_reading else 0
            elif plan.command.HasField("place_experts"):
                wanted = plan.command.place_experts.shard_plan
                self.holds = ranks_pb2.HeldShard(shard_plan=wanted, plan_key=self._plan_key, rank=self.ordinal)
                report.read_bytes = EXPERT_BYTES
            return report
        self._ranks._step_id += 1
        return ranks_pb2.CommandReport(done=False, problem=self.problem)

    @property
    def commands(self) -> list[str]:
        """Kinds of the commands that came in this epoch."""
        return [plan.command.WhichOneof("action") or "" for plan in self.plans if plan.HasField("command")]


class GroupBench:
    """A group and its core, running, with every state that the group took."""

    def __init__(
        self,
        settings: GroupSettings | None = None,
        *,
        engine: EngineConfig | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.core = new_core(engine)
        self.states: list[GroupState] = []
        self.steps: list[float] = []
        arguments: dict[str, Any] = {} if clock is None else {"clock": clock}
        self.group = Group(
            settings or group_settings(),
            core=self.core,
            on_state=self.states.append,
            observe_step=self.steps.append,
            **arguments,
        )
        self.rpcs = AdminRpcs(self.group, core=self.core, settings=settings or group_settings())
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> GroupBench:
        self._tasks += [asyncio.create_task(self.core.run()), asyncio.create_task(self.group.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def topology(self) -> admin_pb2.GetTopologyResponse:
        return self.group.topology()

    def obedient(self, ordinal: int, *, instance: str = "") -> ObedientRank:
        """A rank that has joined and obeys."""
        rank = ObedientRank(self.group, ordinal, instance=instance)
        rank.join()
        self._tasks += [asyncio.create_task(rank.live()), asyncio.create_task(rank.beat())]
        return rank

    async def ready(self) -> tuple[ObedientRank, ObedientRank]:
        """Two obedient ranks, serving."""
        ranks = self.obedient(0), self.obedient(1)
        await self.until(GroupState.READY)
        return ranks

    async def until(self, state: GroupState) -> None:
        await wait_until(lambda: self.group.state is state)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds, for a bounded time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]
