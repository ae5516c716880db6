"""A rank's state machine against a scripted gateway, with a fake runner; one rank, so no process groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import pytest
import torch

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT
from hetero_api.errors import ModelError, ModelReadError
from hetero_api.host.heartbeat import Heartbeat, HeartbeatMemory, RankState
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.distributed.coordinator import GroupCoordinator, form_group
from hetero_worker.distributed.exchange import Exchange, LocalExchange
from hetero_worker.distributed.rendezvous import GroupRequest, StoreListener
from hetero_worker.errors import ExchangeAborted, ExchangeError, MemoryBudgetError, PinningError
from hetero_worker.host.binding import Binding
from hetero_worker.probe.speeds import RankProbe
from hetero_worker.process.gateway_link import GatewayLink
from hetero_worker.process.messages import RankIdentity, load_request
from hetero_worker.process.state_machine import FormGroupFunction, WorkerStateMachine
from tests.support.fake_runner import GRAPH_BYTES, GRAPH_RESERVE_BYTES, FakeRunner
from tests.support.lone_group import LoneGroup
from tests.support.played_binding import PlayedBinding, pinned_report
from tests.support.scripted_gateway import TOKEN, ScriptedGateway

pytestmark = pytest.mark.unit

PLAN = ShardPlan((RankShard((LayerShard(UnitRange(0, 2), UnitRange(0, 32)),), UnitRange(0, 64), UnitRange(0, 64)),))
NOTHING = RankShard((LayerShard(UnitRange(2, 2), UnitRange(32, 32)),), UnitRange(64, 64), UnitRange(64, 64))
TWO_RANKS = ShardPlan((*PLAN.ranks, NOTHING))
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "vocab_size": 64,
    }
)


class BlockingExchange(LocalExchange):
    """Waits for a peer that never comes."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self.aborted = threading.Event()
        self.closed = False

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.waiting.set()
        assert self.aborted.wait(20)
        raise ExchangeAborted("aborted while waiting")

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed = True


class PlayedProbe:
    """Measures nothing, and says what it was asked for."""

    def costs(self, dtype: str, config: ModelConfig, peers: GroupCoordinator) -> ranks_pb2.DeviceSpeeds:
        assert peers.all_can(True)
        return ranks_pb2.DeviceSpeeds(costs_dtype=dtype)

    def fixed_needs(self, dtype: str, config: ModelConfig) -> ranks_pb2.Formed:
        weights = config.weights.layers
        bits = [weights.bits] if dtype and weights is not None else []
        return ranks_pb2.Formed(runtime_bytes=300, gather_bytes=20, weight_bits=bits)

    def compute(self) -> None:
        """It has no threads."""


class Rank:
    """A state machine that runs on a thread."""

    def __init__(
        self,
        folder: Path,
        target: str,
        *,
        token: str,
        form: FormGroupFunction,
        runner: FakeRunner | None = None,
        reconnects: bool = False,
        binding: Binding | None = None,
    ) -> None:
        self.runner = runner or FakeRunner()
        self.heartbeat = HeartbeatMemory()
        self.gave_up = threading.Event()
        self._exit_codes: list[int] = []
        self._link = GatewayLink(target=target, token=token, connect_timeout_s=20)
        self.machine = WorkerStateMachine(
            RankIdentity(
                hello=ranks_pb2.Hello(pool="cpu", instance_id="me"),
                model_dir=folder,
                model_config=CONFIG,
                memory_bytes=1 << 20,
                store_host="127.0.0.1",
                backend=TorchReference(memory_bytes=1 << 20),
            ),
            link=self._link,
            runner=self.runner,
            form=form,
            abort_timeout_s=0.2,
            give_up=self.gave_up.set,
            probe=cast(RankProbe, PlayedProbe()),
            heartbeat=Heartbeat.open(Path(self.heartbeat.path)),
            binding=binding,
            reconnects=reconnects,
        )
        self.heartbeat.release()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._exit_codes.append(self.machine.run())
        self._link.finish(5)

    def leave_at_once(self) -> None:
        """Be asked twice, so that it does not ask its gateway."""
        for _ in range(2):
            self.machine.request_leave("SIGTERM")

    def exit_code(self) -> int:
        self._thread.join(20)
        assert self._exit_codes, "the rank did not end"
        return self._exit_codes[0]


@contextmanager
def joined(
    folder: Path, *, token: str = TOKEN, form: FormGroupFunction = form_group, **more: Any
) -> Iterator[tuple[ScriptedGateway, Rank]]:
    with ScriptedGateway(folder) as gateway:
        yield gateway, Rank(folder, gateway.target, token=token, form=form, **more)


class PlayedGroup(LoneGroup):
    """Groups that stand already, over one exchange."""

    def __init__(self, exchange: LocalExchange, num_ranks: int = 1) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self.connected: list[bool] = []
        """Whether connections were to be batch-invariant."""
        self._exchange = exchange
        self.abort = exchange.abort  # type: ignore[method-assign]
        self.close = exchange.close  # type: ignore[method-assign]

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    def formed(self, *, measure: bool) -> ranks_pb2.Formed:
        formed = ranks_pb2.Formed(exchange=ranks_pb2.EXCHANGE_KIND_GLOO, exchange_reason="no compiler")
        if measure:
            for size, seconds in ((4096, 1e-5), (65536, 4e-5)):
                formed.host_times.add(bytes=size, seconds=seconds)
            formed.device_times.add(bytes=4096, seconds=2e-5)
        return formed

    def connect(
        self,
        plan: ShardPlan,
        *,
        draft_plan: ShardPlan | None = None,
        inputs_everywhere: bool = False,
        batch_invariant: bool = False,
    ) -> Exchange:
        self.connected.append(batch_invariant)
        return self._exchange


def forming(*exchanges: LocalExchange, num_ranks: int = 1) -> FormGroupFunction:
    """A form_group that hands out these exchanges, one an epoch."""
    left = list(exchanges)

    def form(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> Any:
        listener.close()
        return PlayedGroup(left.pop(0), num_ranks)

    return form


def form_message(**changes: Any) -> ranks_pb2.FormGroup:
    fields: dict[str, Any] = {
        "rank": 0,
        "places": [ranks_pb2.RankPlace(rank=0)],
        "exchange": ranks_pb2.EXCHANGE_KIND_SHM,
        "timeout_s": 20,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
    }
    return ranks_pb2.FormGroup(**(fields | changes))


def form_epoch(gateway: ScriptedGateway, epoch: int, **changes: Any) -> None:
    gateway.expect("hello")
    gateway.tell(epoch, form_group=form_message(**changes))
    assert gateway.expect("formed").epoch == epoch


def load_message(plan: ShardPlan = PLAN, plan_key: str = "key") -> ranks_pb2.LoadModel:
    return ranks_pb2.LoadModel(dtype="float32", max_model_len=128, shard_plan=plan.to_proto(), plan_key=plan_key)


def load(gateway: ScriptedGateway, epoch: int, plan: ShardPlan = PLAN, plan_key: str = "key") -> ranks_pb2.Loaded:
    gateway.tell(epoch, load_model=load_message(plan, plan_key))
    return gateway.expect("loaded").loaded


def allocate(gateway: ScriptedGateway, epoch: int) -> ranks_pb2.Allocated:
    gateway.tell(epoch, allocate_cache=ranks_pb2.AllocateCache(num_blocks=8, block_size=16))
    return gateway.expect("allocated").allocated


def serve_epoch(gateway: ScriptedGateway, epoch: int, plan: ShardPlan = PLAN, **changes: Any) -> ranks_pb2.Loaded:
    form_epoch(gateway, epoch, **changes)
    loaded = load(gateway, epoch, plan)
    allocate(gateway, epoch)
    return loaded


def step(step_id: int, *slots: int) -> ranks_pb2.StepPlan:
    return ranks_pb2.StepPlan(step_id=step_id, decode_slots=slots)


def shut_down(gateway: ScriptedGateway, epoch: int, rank: Rank) -> None:
    gateway.tell(epoch, shutdown=ranks_pb2.Shutdown(reason="test"))
    assert rank.exit_code() == EXIT_OK


def test_from_hello_to_shutdown(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        hello = gateway.expect("hello")
        gateway.tell(1, form_group=form_message())
        formed = gateway.expect("formed").formed
        loaded = load(gateway, 1)
        allocated = allocate(gateway, 1)
        gateway.tell(1, step_plan=step(1, 3, 0))
        gateway.tell(1, step_plan=step(2, 1))
        results = [gateway.expect("step_result").step_result for _ in range(2)]
        shut_down(gateway, 1, rank)
        gateway.expect_end()

    assert (hello.epoch, hello.hello.instance_id) == (0, "me")
    assert hello.hello.store_address.startswith("127.0.0.1:")
    assert formed.exchange == ranks_pb2.EXCHANGE_KIND_SHM
    assert (formed.runtime_bytes, formed.gather_bytes) == (300, 20)
    assert (loaded.weight_bytes, loaded.load_s, list(loaded.kernels)) == (1000, 1.5, ["linear=fake"])
    assert allocated.kv_bytes == 8 * 16 * 16
    assert [(r.step_id, list(r.slots), list(r.token_ids)) for r in results] == [
        (1, [3, 0], [103, 100]),
        (2, [1], [101]),
    ]
    assert all(0 < result.step_s < 20 for result in results)


def test_load_request_holds_what_the_gateway_said(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        shut_down(gateway, 1, rank)

    (request,) = rank.runner.requests
    assert (request.directory, request.config, request.shard_plan) == (tmp_path, CONFIG, PLAN)
    assert (request.dtype, request.rank, request.max_model_len) == ("float32", 0, 128)
    assert (request.max_num_batched_tokens, request.max_num_seqs, request.memory_bytes) == (64, 4, 1 << 20)
    assert (request.num_gpu_ranks, request.num_host_ranks) == (0, 1)


@pytest.mark.parametrize("has_kernels", [(True, True), (True, False), (False, True)])
def test_a_rank_knows_whether_kernels_run_on_all_gpus_of_its_group(
    tmp_path: Path, has_kernels: tuple[bool, bool]
) -> None:
    """Host cores do not matter."""
    gpus = [ranks_pb2.DeviceReport(kind=ranks_pb2.DEVICE_KIND_CUDA, has_kernels=each) for each in has_kernels]
    devices = [*gpus, ranks_pb2.DeviceReport(kind=ranks_pb2.DEVICE_KIND_CPU)]
    form = form_message(places=[ranks_pb2.RankPlace(rank=rank, device=each) for rank, each in enumerate(devices)])
    identity = RankIdentity(ranks_pb2.Hello(), tmp_path, CONFIG, 1 << 20, "127.0.0.1", TorchReference())
    order = load_message(ShardPlan((*TWO_RANKS.ranks, NOTHING)))

    request = load_request(identity, form, order, rank=0, files={})

    assert (request.num_gpu_ranks, request.gpus_have_kernels) == (2, all(has_kernels))


def test_weights_are_quantised_as_the_gateway_says(tmp_path: Path) -> None:
    wanted = ranks_pb2.Quantization(method="int4", group_size=64)
    with joined(tmp_path) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message(dtype="float32", quantization=wanted))
        for _ in range(9):
            gateway.tell(1, echo=gateway.expect("echo").echo)
        formed = gateway.expect("formed").formed
        order = load_message(PLAN, "key")
        order.quantization.CopyFrom(wanted)
        gateway.tell(1, load_model=order)
        gateway.expect("loaded")
        shut_down(gateway, 1, rank)

    assert list(formed.weight_bits) == [4]
    assert [request.config for request in rank.runner.requests] == [CONFIG.quantized("int4", 64)]


def test_graphs_are_turned_off_by_the_gateway_and_told_to_it(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        form_epoch(gateway, 1)
        order = load_message(PLAN, "key")
        order.enforce_eager = True
        order.expert_deferral = 2
        gateway.tell(1, load_model=order)
        loaded = gateway.expect("loaded").loaded
        shut_down(gateway, 1, rank)

    assert list(loaded.graph_sizes) == [1, 2]
    assert loaded.graph_reserve_bytes == GRAPH_RESERVE_BYTES
    assert [(request.enforce_eager, request.expert_deferral) for request in rank.runner.requests] == [(True, 2)]


@pytest.mark.parametrize("wanted", [False, True])
def test_batch_invariance_is_asked_of_the_runner_and_of_the_groups(tmp_path: Path, wanted: bool) -> None:
    group = PlayedGroup(LocalExchange())

    def form(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> Any:
        listener.close()
        return group

    with joined(tmp_path, form=form) as (gateway, rank):
        form_epoch(gateway, 1)
        order = load_message(PLAN, "key")
        order.batch_invariant = wanted
        gateway.tell(1, load_model=order)
        gateway.expect("loaded")
        shut_down(gateway, 1, rank)

    assert [request.batch_invariant for request in rank.runner.requests] == [wanted]
    assert group.connected == [wanted]


def test_other_ranks_do_not_answer_steps(tmp_path: Path) -> None:
    places = [ranks_pb2.RankPlace(rank=0), ranks_pb2.RankPlace(rank=1)]
    with joined(tmp_path, form=forming(LocalExchange())) as (gateway, rank):
        serve_epoch(gateway, 1, TWO_RANKS, rank=1, places=places)
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, step_plan=step(2, 0))
        shut_down(gateway, 1, rank)
        gateway.expect_end()

    assert len(rank.runner.plans) == 2


def test_every_rank_answers_a_command(tmp_path: Path) -> None:
    places = [ranks_pb2.RankPlace(rank=0), ranks_pb2.RankPlace(rank=1)]
    with joined(tmp_path, form=forming(LocalExchange())) as (gateway, rank):
        serve_epoch(gateway, 1, TWO_RANKS, rank=1, places=places)
        rank.runner.report = ranks_pb2.CommandReport(done=False, problem="no memory")
        command = ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1))
        gateway.tell(1, step_plan=ranks_pb2.StepPlan(step_id=1, command=command))
        result = gateway.expect("step_result")
        shut_down(gateway, 1, rank)

    assert (result.epoch, result.step_result.step_id) == (1, 1)
    assert result.step_result.command_report == rank.runner.report


def test_a_plan_that_computes_nothing_is_answered_by_rank_0(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=step(1))
        result = gateway.expect("step_result").step_result
        shut_down(gateway, 1, rank)

    assert (result.step_id, list(result.slots)) == (1, [])


def test_plans_that_come_early_are_worked_off_in_order_and_timed_apart(tmp_path: Path) -> None:
    computing, go_on = threading.Event(), threading.Event()

    def slow_step() -> None:
        computing.set()
        _wait_for(go_on)

    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = slow_step
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, step_plan=step(2, 0))
        assert computing.wait(20)
        _wait_for(Elapsed(0.3))
        go_on.set()
        results = [gateway.expect("step_result").step_result for _ in range(2)]
        shut_down(gateway, 1, rank)

    assert [result.step_id for result in results] == [1, 2]
    assert results[0].step_s >= 0.25
    assert results[1].step_s < 0.25, "the second step is timed from the end of the first"


class Elapsed:
    """An event that happens after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._due_s = time.monotonic() + seconds

    def is_set(self) -> bool:
        return time.monotonic() >= self._due_s


def masked_step(step_id: int) -> ranks_pb2.StepPlan:
    return ranks_pb2.StepPlan(step_id=step_id, decode_slots=[2, 5], masked_slots=[5])


def test_masks_are_waited_for_and_belong_to_their_step(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        for step_id, mask in enumerate([b"\x01", b"\x02"], start=1):
            gateway.tell(1, step_plan=masked_step(step_id))
            gateway.tell(1, token_masks=ranks_pb2.TokenMasks(step_id=step_id, masks=[mask]))
        gateway.tell(1, step_plan=step(3, 0))
        for _ in range(3):
            gateway.expect("step_result")
        shut_down(gateway, 1, rank)

    assert [list(masks) for masks in rank.runner.masks] == [[b"\x01"], [b"\x02"]]


@pytest.mark.parametrize(
    ("epoch", "body", "complaint"),
    [
        (1, {"step_plan": step(2, 0)}, "sent step_plan while step 1 waited for its token_masks"),
        (1, {"token_masks": ranks_pb2.TokenMasks(step_id=2)}, "while step 1 waited"),
        (2, {"token_masks": ranks_pb2.TokenMasks(step_id=1)}, "while step 1 waited"),
    ],
)
def test_something_else_than_the_masks_is_refused(
    epoch: int, body: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=masked_step(1))
        gateway.tell(epoch, **body)
        failure = gateway.expect("failure").failure
        shut_down(gateway, 1, rank)

    assert complaint in failure.message


def test_masks_that_no_step_waits_for_are_refused(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, token_masks=ranks_pb2.TokenMasks(step_id=1))
        failure = gateway.expect("failure").failure
        shut_down(gateway, 1, rank)

    assert "token_masks" in failure.message


def test_abort_ends_the_wait_for_masks(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=masked_step(1))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)

    assert not rank.gave_up.is_set()
    assert rank.runner.plans == []


@pytest.mark.parametrize("by", ["shutdown", "leave", "hang up"])
def test_the_end_of_life_ends_the_wait_for_masks(by: str, tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=masked_step(1))
        if by == "shutdown":
            gateway.tell(1, shutdown=ranks_pb2.Shutdown(reason="test"))
        elif by == "leave":
            rank.leave_at_once()
        else:
            gateway.hang_up(grpc.StatusCode.UNAVAILABLE)
        assert rank.exit_code() == (EXIT_FAILURE if by == "hang up" else EXIT_OK)


def expect_beats(gateway: ScriptedGateway, count: int) -> list[tuple[int, int]]:
    """Epoch and step of the next messages, all heartbeats."""
    beats = [gateway.expect("heartbeat") for _ in range(count)]
    return [(message.epoch, message.heartbeat.step_id) for message in beats]


def test_heartbeats_go_on_while_the_main_thread_computes_and_end_with_the_epoch(tmp_path: Path) -> None:
    computing, go_on = threading.Event(), threading.Event()

    def slow_step() -> None:
        computing.set()
        _wait_for(go_on)

    with joined(tmp_path, form=forming(LocalExchange(), LocalExchange())) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(4, form_group=form_message(heartbeat_interval_s=0.05))
        others = [gateway.hear_beside_heartbeats("formed")]
        gateway.tell(4, load_model=load_message())
        others.append(gateway.hear_beside_heartbeats("loaded"))
        gateway.tell(4, allocate_cache=ranks_pb2.AllocateCache(num_blocks=8, block_size=16))
        others.append(gateway.hear_beside_heartbeats("allocated"))
        gateway.tell(4, step_plan=step(1, 0))
        gateway.hear_beside_heartbeats("step_result")
        rank.runner.on_execute = slow_step
        gateway.tell(4, step_plan=step(2, 0))
        assert computing.wait(20)
        began_s = time.monotonic()
        assert gateway.expect("heartbeat").heartbeat.graph_bytes == GRAPH_BYTES
        beats = expect_beats(gateway, 6)
        took_s = time.monotonic() - began_s
        go_on.set()
        gateway.hear_beside_heartbeats("step_result")
        gateway.tell(4, abort=ranks_pb2.Abort(reason="test"))
        gateway.hear_beside_heartbeats("hello")
        gateway.tell(5, form_group=form_message())
        gateway.expect("formed")
        shut_down(gateway, 5, rank)
        gateway.expect_end()

    assert beats == [(4, 1)] * 6
    assert took_s >= 4 * 0.05


def test_abort_between_steps_leads_to_a_new_hello_that_keeps_the_weights(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        first = serve_epoch(gateway, 1)
        gateway.tell(1, step_plan=step(1, 0))
        assert gateway.expect("step_result").epoch == 1
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        second = serve_epoch(gateway, 2)
        gateway.tell(2, step_plan=step(1, 0))
        assert gateway.expect("step_result").epoch == 2
        shut_down(gateway, 2, rank)

    assert (first.load_s, second.load_s) == (1.5, 0.0)
    assert rank.runner.attached == 2
    assert not rank.gave_up.is_set()


def test_abort_frees_a_rank_that_waits_for_a_peer(tmp_path: Path) -> None:
    exchange = BlockingExchange()
    with joined(tmp_path, form=forming(exchange, LocalExchange())) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = lambda: rank.runner.exchange.broadcast(torch.ones(1), 1)
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, step_plan=step(2, 0))
        assert exchange.waiting.wait(20)
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)

    assert exchange.closed
    assert not rank.gave_up.is_set()


def test_rank_that_cannot_leave_an_aborted_epoch_gives_up(tmp_path: Path) -> None:
    stuck = threading.Event()
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = lambda: _wait_for(stuck)
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        assert rank.gave_up.wait(20)
        stuck.set()
        gateway.expect("step_result")
        gateway.expect("hello")
        shut_down(gateway, 1, rank)


def test_rank_whose_groups_cannot_be_left_gives_up(tmp_path: Path) -> None:
    class Unleavable(LocalExchange):
        def close(self) -> None:
            raise ExchangeError("a collective hangs")

    with joined(tmp_path, form=forming(Unleavable())) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))

        assert rank.gave_up.wait(20)
        gateway.expect("hello")
        shut_down(gateway, 1, rank)


def test_load_is_finished_and_kept_when_the_epoch_is_aborted_meanwhile(tmp_path: Path) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def slow_load() -> None:
        loading.set()
        _wait_for(go_on)

    with joined(tmp_path) as (gateway, rank):
        form_epoch(gateway, 1)
        rank.runner.on_load = slow_load
        gateway.tell(1, load_model=load_message())
        assert loading.wait(20)
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        assert not rank.gave_up.wait(0.4)
        go_on.set()
        loaded = serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)

    assert loaded.load_s == 0.0


@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("out of luck"), "RuntimeError: out of luck"), (ExchangeError("rank 1 left"), "rank 1 left")],
)
def test_failed_step_is_reported_and_the_next_epoch_forms(error: Exception, text: str, tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = _raising(error)
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, step_plan=step(2, 0))
        failure = gateway.expect("failure")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="rank 0 failed"))
        serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)

    assert (failure.epoch, failure.failure.message, failure.failure.permanent) == (1, text, False)


def test_failing_rank_frees_its_peers_at_once(tmp_path: Path) -> None:
    exchange = BlockingExchange()
    with joined(tmp_path, form=forming(exchange)) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = _raising(RuntimeError("no"))
        gateway.tell(1, step_plan=step(1, 0))
        gateway.expect("failure")
        assert exchange.aborted.wait(20)
        shut_down(gateway, 1, rank)


@pytest.mark.parametrize("error", [ModelError("model.safetensors: damaged"), MemoryBudgetError("4 MiB short")])
def test_permanent_failure_is_reported_and_ends_the_process(error: Exception, tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        form_epoch(gateway, 1)
        rank.runner.on_load = _raising(error)
        gateway.tell(1, load_model=load_message())
        failure = gateway.expect("failure").failure
        gateway.expect_end()

        assert rank.exit_code() == EXIT_PERMANENT
    assert (failure.message, failure.permanent) == (str(error), True)


def test_a_rank_whose_storage_fails_is_there_for_the_next_epoch(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        form_epoch(gateway, 1)
        rank.runner.on_load = _raising(ModelReadError("config.json: cannot be read: Input/output error"))
        gateway.tell(1, load_model=load_message())
        failure = gateway.expect("failure").failure
        rank.runner.on_load = lambda: None
        gateway.tell(1, abort=ranks_pb2.Abort(reason="rank 0 failed"))
        serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)
    assert not failure.permanent


def test_group_that_cannot_form_is_reported(tmp_path: Path) -> None:
    def form(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> Any:
        raise ExchangeError("rank(s) 1 did not come")

    with joined(tmp_path, form=form) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message())
        assert gateway.expect("failure").failure.message == "rank(s) 1 did not come"
        shut_down(gateway, 1, rank)


def test_abort_ends_the_forming_of_a_group(tmp_path: Path) -> None:
    forming_now = threading.Event()

    def form(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> Any:
        forming_now.set()
        _wait_for(SimpleNamespace(is_set=aborted))
        raise ExchangeAborted("aborted while meeting")

    with joined(tmp_path, form=form) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message())
        assert forming_now.wait(20)
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        gateway.expect("hello")
        shut_down(gateway, 1, rank)


@pytest.mark.parametrize(
    ("epoch", "body", "complaint"),
    [
        (1, {"step_plan": step(2, 0)}, "step 2, expected step 1"),
        (2, {"step_plan": step(1, 0)}, "step_plan of epoch 2 in epoch 1"),
        (1, {"form_group": form_message()}, "form_group to a rank that is SERVING"),
        (1, {"load_model": load_message()}, "load_model to a rank that is SERVING"),
        (1, {}, "does not know"),
    ],
)
def test_message_that_does_not_fit_is_refused(epoch: int, body: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(epoch, **body)
        failure = gateway.expect("failure").failure
        shut_down(gateway, 1, rank)

    assert complaint in failure.message
    assert not failure.permanent
    assert rank.runner.plans == []


def test_messages_of_ended_epochs_are_dropped(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        gateway.tell(1, abort=ranks_pb2.Abort(reason="over"))
        gateway.tell(1, step_plan=step(1, 0))
        gateway.tell(1, abort=ranks_pb2.Abort(reason="over, again"))
        serve_epoch(gateway, 2)
        shut_down(gateway, 2, rank)

    assert rank.runner.plans == []


def test_rank_says_hello_anew_when_an_epoch_is_aborted_before_it_formed(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        first = gateway.expect("hello").hello
        gateway.tell(1, abort=ranks_pb2.Abort(reason="a peer is gone"))
        second = gateway.expect("hello").hello
        gateway.tell(2, form_group=form_message())
        gateway.expect("formed")
        shut_down(gateway, 2, rank)

    assert first.instance_id == second.instance_id


def test_broken_stream_ends_the_process_with_failure(tmp_path: Path) -> None:
    exchange = BlockingExchange()
    with joined(tmp_path, form=forming(exchange)) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = lambda: rank.runner.exchange.broadcast(torch.ones(1), 1)
        gateway.tell(1, step_plan=step(1, 0))
        assert exchange.waiting.wait(20)
        gateway.hang_up(grpc.StatusCode.UNAVAILABLE)

        assert rank.exit_code() == EXIT_FAILURE
    assert exchange.closed


def test_wrong_token_ends_the_process_for_good(tmp_path: Path) -> None:
    with joined(tmp_path, token="guess") as (_, rank):
        assert rank.exit_code() == EXIT_PERMANENT


def test_shutdown_is_obeyed_in_the_middle_of_a_wait(tmp_path: Path) -> None:
    exchange = BlockingExchange()
    with joined(tmp_path, form=forming(exchange)) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = lambda: rank.runner.exchange.broadcast(torch.ones(1), 1)
        gateway.tell(1, step_plan=step(1, 0))
        assert exchange.waiting.wait(20)
        shut_down(gateway, 1, rank)

    assert exchange.closed


def test_a_rank_that_serves_and_is_to_leave_computes_until_its_gateway_lets_it_go(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.machine.request_leave("SIGTERM")
        assert gateway.expect("leaving").leaving.reason == "SIGTERM"
        gateway.tell(1, step_plan=step(1, 0))
        assert gateway.expect("step_result").step_result.step_id == 1
        shut_down(gateway, 1, rank)


def test_a_second_leave_request_ends_the_process_in_good_order(tmp_path: Path) -> None:
    exchange = BlockingExchange()
    with joined(tmp_path, form=forming(exchange)) as (gateway, rank):
        serve_epoch(gateway, 1)
        rank.runner.on_execute = lambda: rank.runner.exchange.broadcast(torch.ones(1), 1)
        gateway.tell(1, step_plan=step(1, 0))
        assert exchange.waiting.wait(20)
        rank.leave_at_once()

        assert rank.exit_code() == EXIT_OK
        gateway.expect("leaving")
        gateway.expect_end()
    assert exchange.closed


def _raising(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


def _wait_for(event: Any) -> None:
    deadline = time.monotonic() + 20
    while not event.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("percent", [99, 0, None])
def test_where_memory_lies_is_told_with_the_load(percent: int | None, tmp_path: Path) -> None:
    with joined(tmp_path, binding=PlayedBinding(percent=lambda: percent)) as (gateway, rank):
        loaded = serve_epoch(gateway, 1)
        shut_down(gateway, 1, rank)

    assert (loaded.local_memory_percent if loaded.HasField("local_memory_percent") else None) == percent


def test_memory_on_the_wrong_node_fails_the_load_for_good(tmp_path: Path) -> None:
    with joined(tmp_path, binding=PlayedBinding(percent=_raising(PinningError("only 61 %")))) as (gateway, rank):
        form_epoch(gateway, 1)
        gateway.tell(1, load_model=load_message())
        failure = gateway.expect("failure").failure
        assert rank.exit_code() == EXIT_PERMANENT

    assert (failure.message, failure.permanent) == ("only 61 %", True)


def test_every_hello_tells_what_the_rank_is_bound_to_by_then(tmp_path: Path) -> None:
    shrunk = pinned_report(4, reason="the cpuset changed")
    with joined(tmp_path, binding=PlayedBinding(pinned_report(4, 5), shrunk)) as (gateway, rank):
        first = gateway.expect("hello").hello.device
        gateway.tell(1, form_group=form_message())
        gateway.expect("formed")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="test"))
        second = gateway.expect("hello").hello.device
        shut_down(gateway, 2, rank)

    assert (list(first.cpus), first.pinned, first.pin_message) == ([4, 5], True, "memory: bound")
    assert (list(second.cpus), second.pinned, second.pin_message) == ([4], False, "the cpuset changed")


def test_an_epoch_does_not_begin_without_a_binding_that_is_required(tmp_path: Path) -> None:
    binding = PlayedBinding(require=_raising(PinningError("the cpuset changed")))
    with joined(tmp_path, binding=binding) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message())
        failure = gateway.expect("failure").failure
        assert rank.exit_code() == EXIT_PERMANENT

    assert (failure.message, failure.permanent) == ("the cpuset changed", True)


def test_threads_of_the_group_are_started_off_the_cores_that_compute(tmp_path: Path) -> None:
    binding, seen = PlayedBinding(), []

    class Watched(PlayedGroup):
        def formed(self, *, measure: bool) -> ranks_pb2.Formed:
            seen.append(("measure", binding.elsewhere))
            return super().formed(measure=measure)

        def connect(self, *args: Any, **named: Any) -> Exchange:
            seen.append(("connect", binding.elsewhere))
            return super().connect(*args, **named)

    def form(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> Any:
        listener.close()
        seen.append(("form", binding.elsewhere))
        return Watched(LocalExchange())

    with joined(tmp_path, binding=binding, form=form) as (gateway, rank):
        serve_epoch(gateway, 1, measure_exchange=True)
        shut_down(gateway, 1, rank)

    assert seen == [("form", True), ("measure", False), ("connect", True)]


def test_heartbeat_tells_how_far_the_rank_is_and_when_it_hangs(tmp_path: Path) -> None:
    stepping, go_on = threading.Event(), threading.Event()

    def slow_step() -> None:
        stepping.set()
        _wait_for(go_on)

    with joined(tmp_path) as (gateway, rank):
        gateway.expect("hello")
        joining = rank.heartbeat.read()
        gateway.tell(7, form_group=form_message())
        gateway.expect("formed")
        load(gateway, 7)
        allocate(gateway, 7)
        rank.runner.on_execute = slow_step
        gateway.tell(7, step_plan=step(1, 0))
        assert stepping.wait(20)
        working = rank.heartbeat.read()
        go_on.set()
        gateway.expect("step_result")
        shut_down(gateway, 7, rank)

    assert (joining.state, joining.due_s) == (RankState.JOINING, 0)
    assert (working.state, working.epoch, working.loads, working.steps) == (RankState.SERVING, 7, 1, 0)
    assert 0 < working.due_s - time.monotonic() <= 2 * 20
    assert (rank.heartbeat.read().steps, rank.heartbeat.read().due_s) == (1, 0)


def next_folder(folder: Path) -> Path:
    (folder / "next").mkdir()
    return folder / "next"


@pytest.mark.parametrize("by", ["shutdown", "hang up"])
def test_a_life_whose_gateway_ends_says_so_and_the_next_keeps_the_weights(by: str, tmp_path: Path) -> None:
    with joined(tmp_path, reconnects=True) as (gateway, first):
        serve_epoch(gateway, 5)
        if by == "shutdown":
            gateway.tell(5, shutdown=ranks_pb2.Shutdown(reason="rolled out anew"))
        else:
            gateway.hang_up(grpc.StatusCode.UNAVAILABLE)
        first.exit_code()
    assert (first.machine.gateway_lost, first.machine.was_in_group) == (True, True)
    with ScriptedGateway(next_folder(tmp_path)) as gateway:
        second = Rank(tmp_path, gateway.target, token=TOKEN, form=form_group, runner=first.runner)
        loaded = serve_epoch(gateway, 1)  # another gateway counts epochs from 1
        shut_down(gateway, 1, second)
    assert loaded.load_s == 0.0


def test_a_load_under_way_is_finished_when_the_gateway_goes_and_another_life_follows(tmp_path: Path) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def slow_load() -> None:
        loading.set()
        _wait_for(go_on)

    with joined(tmp_path, reconnects=True) as (gateway, rank):
        form_epoch(gateway, 1)
        rank.runner.on_load = slow_load
        gateway.tell(1, load_model=load_message())
        assert loading.wait(20)
        gateway.hang_up(grpc.StatusCode.UNAVAILABLE)
        assert not rank.gave_up.wait(0.5)
        go_on.set()
        rank.exit_code()
    assert rank.machine.gateway_lost
    assert not rank.gave_up.is_set()


def test_a_rank_that_was_told_to_leave_or_refused_has_not_lost_its_gateway(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        gateway.expect("hello")
        rank.machine.request_leave("SIGTERM")
        assert rank.exit_code() == EXIT_OK
    assert (rank.machine.gateway_lost, rank.machine.was_in_group) == (False, False)
    with joined(tmp_path, token="wrong") as (_, refused):
        assert refused.exit_code() == EXIT_PERMANENT
    assert not refused.machine.gateway_lost


def test_hello_tells_what_is_held_and_by_which_plan_key(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        first = gateway.expect("hello").hello
        gateway.tell(1, form_group=form_message())
        gateway.expect("formed")
        load(gateway, 1, plan_key="of this model")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="test"))
        second = gateway.expect("hello").hello
        shut_down(gateway, 1, rank)

    assert not first.HasField("held")
    assert ShardPlan.from_proto(second.held.shard_plan) == PLAN
    assert (second.held.plan_key, second.held.rank) == ("of this model", 0)


def test_hello_names_the_files_that_the_weights_were_read_from(tmp_path: Path) -> None:
    """Not those that lie there by then."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"the first")
    with joined(tmp_path, form=forming(LocalExchange(), LocalExchange())) as (gateway, rank):
        first = gateway.expect("hello").hello
        weights.write_bytes(b"the second")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="not yet"))
        second = gateway.expect("hello").hello
        gateway.tell(2, form_group=form_message())
        gateway.expect("formed")
        load(gateway, 2)
        weights.write_bytes(b"the third")
        gateway.tell(2, abort=ranks_pb2.Abort(reason="a peer is gone"))
        third = gateway.expect("hello").hello
        shut_down(gateway, 2, rank)

    assert [file.name for file in first.files] == ["model.safetensors"]
    assert first.files != second.files
    assert third.files == second.files
    assert rank.runner.requests[0].files == {file.name: file.digest for file in second.files}


def test_files_that_cannot_be_read_are_reported_when_they_are_to_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "lost.safetensors"}}')
    with joined(tmp_path) as (gateway, rank):
        assert not gateway.expect("hello").hello.files
        gateway.tell(1, form_group=form_message())
        gateway.expect("formed")
        gateway.tell(1, load_model=load_message())
        failure = gateway.expect("failure").failure
        assert rank.exit_code() == EXIT_PERMANENT

    assert failure.permanent
    assert "names lost.safetensors, which is not in the directory" in failure.message


def test_formed_tells_the_exchange_why_and_what_it_takes_if_asked(tmp_path: Path) -> None:
    with joined(tmp_path, form=forming(LocalExchange(), LocalExchange())) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message(measure_exchange=True))
        measured = gateway.expect("formed").formed
        gateway.tell(1, abort=ranks_pb2.Abort(reason="test"))
        gateway.expect("hello")
        gateway.tell(2, form_group=form_message())
        unmeasured = gateway.expect("formed").formed
        shut_down(gateway, 2, rank)

    assert (measured.exchange, measured.exchange_reason) == (ranks_pb2.EXCHANGE_KIND_GLOO, "no compiler")
    assert [(time.bytes, time.seconds) for time in measured.host_times] == [(4096, 1e-5), (65536, 4e-5)]
    assert [(time.bytes, time.seconds) for time in measured.device_times] == [(4096, 2e-5)]
    assert (list(unmeasured.host_times), list(unmeasured.device_times)) == ([], [])


def place(rank: int, kind: ranks_pb2.DeviceKind.ValueType) -> ranks_pb2.RankPlace:
    return ranks_pb2.RankPlace(rank=rank, device=ranks_pb2.DeviceReport(kind=kind))


GPU, CPU = ranks_pb2.DEVICE_KIND_CUDA, ranks_pb2.DEVICE_KIND_CPU


@pytest.mark.parametrize(
    ("kinds", "rank_number", "complaint"),
    [((GPU, CPU), 0, "pool cpu: "), ((CPU, GPU), 0, "ranks with a GPU must come before all others")],
)
def test_a_place_that_does_not_fit_the_process_is_refused(
    kinds: tuple[ranks_pb2.DeviceKind.ValueType, ...], rank_number: int, complaint: str, tmp_path: Path
) -> None:
    with joined(tmp_path, form=forming(LocalExchange())) as (gateway, rank):
        gateway.expect("hello")
        places = [place(i, kind) for i, kind in enumerate(kinds)]
        gateway.tell(1, form_group=form_message(rank=rank_number, places=places))
        assert complaint in gateway.expect("failure").failure.message
        shut_down(gateway, 1, rank)


def test_the_group_is_told_how_many_ranks_compute_on_gpus(tmp_path: Path) -> None:
    asked: list[GroupRequest] = []

    def form(request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]) -> Any:
        listener.close()
        asked.append(request)
        return PlayedGroup(LocalExchange())

    with joined(tmp_path, form=form) as (gateway, rank):
        form_epoch(gateway, 1, rank=2, places=[place(0, GPU), place(1, GPU), place(2, CPU)])
        shut_down(gateway, 1, rank)

    (request,) = asked
    assert (request.rank, request.world_size, request.num_gpu_ranks) == (2, 3, 2)
    assert (request.device, request.device_backend) == (torch.device("cpu"), None)


def test_a_plan_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with joined(tmp_path) as (gateway, rank):
        form_epoch(gateway, 1)
        gateway.tell(1, load_model=load_message(TWO_RANKS))
        assert "is for 2 ranks, and the group has 1" in gateway.expect("failure").failure.message
        shut_down(gateway, 1, rank)


@pytest.mark.parametrize("measure_parts", [False, True])
def test_the_way_to_the_gateway_is_measured_and_parts_where_the_gateway_asks_for_them(
    tmp_path: Path, measure_parts: bool
) -> None:
    with joined(tmp_path, form=forming(LocalExchange(), num_ranks=2)) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message(dtype="float32", measure_parts=measure_parts))
        for number in range(9):
            echo = gateway.expect("echo").echo
            assert echo.number == number
            gateway.tell(1, echo=echo)
        formed = gateway.expect("formed").formed
        shut_down(gateway, 1, rank)

    assert formed.costs.costs_dtype == ("float32" if measure_parts else "")
    assert formed.costs.turnaround_s > 0


def test_an_abort_ends_the_measuring(tmp_path: Path) -> None:
    with joined(tmp_path, form=forming(LocalExchange())) as (gateway, rank):
        gateway.expect("hello")
        gateway.tell(1, form_group=form_message(dtype="float32"))
        gateway.expect("echo")
        gateway.tell(1, abort=ranks_pb2.Abort(reason="test"))
        gateway.expect("hello")
        shut_down(gateway, 1, rank)
