"""An epoch from Hello to READY, with ranks scripted message by message."""

from __future__ import annotations

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, inference_pb2, ranks_pb2
from hetero_api.weight_format import INT8, StoredWeights, int4
from hetero_gateway.engine.errors import EngineUnavailable
from hetero_gateway.group.warm_up import sampling_slots
from tests.unit.engine.engine_setup import VOCAB_SIZE, generation
from tests.unit.engine.fake_ranks import tokens_alone
from tests.unit.group.group_setup import WARM_UP_PLANS, GroupBench, ScriptedRank, collect, group_settings

pytestmark = pytest.mark.unit


async def test_a_pause_that_ends_between_two_looks_is_no_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with GroupBench() as bench:
        looks: list[float] = []

        def pause_left_s(_: object) -> float:
            if bench.group._roster.missing():
                return 0.0
            looks.append(0.01 if not looks else 0.0)
            return looks[-1]

        monkeypatch.setattr(type(bench.group._restarts), "pause_left_s", property(pause_left_s))
        for rank in range(2):
            ScriptedRank(bench.group, rank).join()
        await bench.until(GroupState.FORMING)
        assert looks[0]


async def test_orders_go_out_phase_by_phase_to_everyone() -> None:
    async with GroupBench() as bench:
        one, zero = ScriptedRank(bench.group, 1), ScriptedRank(bench.group, 0)
        one.join()
        assert bench.states == []
        zero.join()
        forms = [await zero.obey("form_group"), await one.expect("form_group")]
        assert [form.rank for form in forms] == [0, 1]
        assert bench.states == [GroupState.FORMING]
        for form in forms:
            assert [place.pod_name for place in form.places] == ["pod-0", "pod-1"]
            assert form.store_address == "127.0.0.1:4000"
            assert form.exchange == ranks_pb2.EXCHANGE_KIND_SHM
            assert form.segment_name.startswith("hetero-g-")
            assert form.segment_name.endswith("-1")
            assert (form.timeout_s, form.max_num_batched_tokens, form.max_num_seqs) == (60, 64, 4)
            assert form.heartbeat_interval_s == 0.5
            assert (form.measure_exchange, form.dtype, form.measure_parts) == (True, "float32", True)
        assert forms[0].segment_name == forms[1].segment_name
        one.answer("form_group", forms[1])
        load = await zero.obey("load_model")
        await one.obey("load_model", kv_budget_bytes=4000)
        assert (load.dtype, load.max_model_len) == ("float32", 64)
        assert load.plan_key == group_settings().plan_key
        assert [shard.layers[0].kv_heads.end for shard in load.shard_plan.ranks] == [2, 3]
        allocate = await zero.obey("allocate_cache")
        assert (allocate.num_blocks, allocate.block_size) == (65, 4)
        assert bench.states[1:] == [GroupState.LOADING]
        await one.obey("allocate_cache")
        four = [0, 1, 2, 3]
        for step_id, slots in enumerate(([0], [0], four, four, [], four, four, [], [0], [0], []), 1):
            plan = await zero.expect("step_plan")
            assert plan == await one.expect("step_plan")
            assert (plan.step_id, sampling_slots(plan)) == (step_id, slots)
            if plan.masked_slots:
                masks = await zero.expect("token_masks")
                assert masks == await one.expect("token_masks")
                assert (masks.step_id, len(masks.masks)) == (step_id, len(plan.masked_slots))
            zero.say(1, step_result=ranks_pb2.StepResult(step_id=step_id, slots=slots, token_ids=[7] * len(slots)))
        await bench.until(GroupState.READY)
        assert bench.group.is_ready
        assert bench.states == [GroupState.FORMING, GroupState.LOADING, GroupState.READY]
        assert len(bench.steps) == WARM_UP_PLANS


async def test_ranks_are_told_what_weights_are_quantised_to() -> None:
    model = {"uri": "hf://org/model", "maxModelLen": 64, "quantization": "int4", "quantizationGroupSize": 64}
    settings = group_settings(model=model)
    assert settings.config.weights == StoredWeights(int4(64), INT8)
    assert group_settings().quantization is None
    async with GroupBench(settings) as bench:
        zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        zero.join()
        one.join()
        expected = ranks_pb2.Quantization(method="int4", group_size=64)
        assert (await zero.obey("form_group")).quantization == expected
        await one.obey("form_group")
        assert (await zero.obey("load_model")).quantization == expected


async def test_what_a_rank_says_to_measure_the_way_is_said_back_at_once() -> None:
    async with GroupBench() as bench:
        ranks = [ScriptedRank(bench.group, i) for i in range(2)]
        for rank in ranks:
            rank.join()
        form = await ranks[0].expect("form_group")
        await ranks[1].expect("form_group")
        for number in (0, 7):
            ranks[1].say(1, echo=ranks_pb2.Echo(number=number))
            assert (await ranks[1].expect("echo")).number == number
        ranks[0].answer("form_group", form)
        ranks[1].answer("form_group", form)
        await ranks[0].expect("load_model")


async def test_a_ready_group_serves_requests_after_its_warm_up() -> None:
    async with GroupBench() as bench:
        zero, one = await bench.ready()
        events = await collect(bench.core.submit(generation("r", range(9), max_tokens=6)))
        tokens = [token for event in events[:-1] for token in event.token_ids]
        assert tokens == tokens_alone(range(9), seed=0, count=6, vocab_size=VOCAB_SIZE)
        assert isinstance(events[-1], inference_pb2.Finished)
        assert zero.plans == one.plans
        assert [plan.step_id for plan in zero.plans] == list(range(1, len(zero.plans) + 1))


async def test_sizes_that_ranks_make_graphs_of_are_warmed_up() -> None:
    async with GroupBench() as bench:
        zero, one = bench.obedient(0), bench.obedient(1)
        zero.graph_sizes, one.graph_sizes = (1, 2), (1, 4, 128)
        await bench.until(GroupState.READY)
        decoding = [len(plan.decode_slots) for plan in zero.plans if plan.decode_slots]
        assert decoding == [1, 1, 4, *(4, 1), 4, 4, 2, 2, 1, 1]
        assert zero.plans == one.plans


@pytest.mark.parametrize(("field", "told"), [("enforceEager", "enforce_eager"), ("batchInvariant", "batch_invariant")])
@pytest.mark.parametrize("wanted", [False, True])
async def test_ranks_are_told_how_steps_are_to_be_computed(field: str, told: str, wanted: bool) -> None:
    async with GroupBench(group_settings(engine={field: wanted})) as bench:
        zero, one = ScriptedRank(bench.group, 0), ScriptedRank(bench.group, 1)
        for rank in (zero, one):
            rank.join()
        for rank in (zero, one):
            await rank.obey("form_group")
        loads = [await rank.obey("load_model") for rank in (zero, one)]
        assert [getattr(load, told) for load in loads] == [wanted, wanted]


async def test_topology_tells_places_before_and_everything_after() -> None:
    async with GroupBench() as bench:
        before = bench.topology
        assert before.state == admin_pb2.GROUP_STATE_NEW
        assert [(rank.place.rank, rank.place.pool, rank.place.pod_name) for rank in before.ranks] == [
            (0, "cpu", "cpu-0"), (1, "cpu", "cpu-1"),
        ]  # fmt: skip
        assert before.reason == "waiting for rank 0 (cpu-0), rank 1 (cpu-1)"
        assert not any(rank.joined or rank.HasField("shard") for rank in before.ranks)
        await bench.ready()
        after = bench.topology
        assert (after.name, after.state, after.epoch, after.reason) == ("g", admin_pb2.GROUP_STATE_READY, 1, "")
        assert (after.exchange, after.block_size, after.num_blocks) == (ranks_pb2.EXCHANGE_KIND_SHM, 4, 64)
        assert [rank.joined for rank in after.ranks] == [True, True]
        assert [rank.weight_bytes for rank in after.ranks] == [1000, 1001]
        assert [rank.kv_bytes for rank in after.ranks] == [65 * 4 * 8] * 2
        assert [rank.shard.layers[0].kv_heads.end for rank in after.ranks] == [2, 3]
        assert list(after.ranks[0].kernels) == ["k"]
        assert after.ranks[1].place.pod_name == "pod-1"


async def test_topology_tells_what_graphs_took_and_what_is_kept_for_them() -> None:
    async with GroupBench() as bench:
        zero, one = bench.obedient(0), bench.obedient(1)
        zero.graph_sizes = (1, 2)
        await bench.until(GroupState.READY)
        zero.say(1, heartbeat=ranks_pb2.Heartbeat(step_id=9, graph_bytes=700))
        one.say(1, heartbeat=ranks_pb2.Heartbeat(step_id=9))
        assert [(rank.graph_bytes, rank.graph_reserve_bytes) for rank in bench.topology.ranks] == [(700, 900), (0, 0)]


async def test_topology_tells_how_far_the_long_work_of_a_rank_has_come() -> None:
    progress = ranks_pb2.Progress(work="reading weights", done=3, total=8, unit="B")
    async with GroupBench() as bench:
        zero, _ = bench.obedient(0), bench.obedient(1)
        await bench.until(GroupState.READY)
        zero.say(1, heartbeat=ranks_pb2.Heartbeat(progress=progress))
        assert [rank.progress for rank in bench.topology.ranks] == [progress, ranks_pb2.Progress()]
        zero.say(1, heartbeat=ranks_pb2.Heartbeat())
        assert not bench.topology.ranks[0].HasField("progress")


async def test_ranks_on_different_hosts_exchange_over_the_network() -> None:
    async with GroupBench() as bench:
        ranks = [ScriptedRank(bench.group, ordinal) for ordinal in (0, 1)]
        for rank in ranks:
            rank.join(host_id=f"host-{rank.ordinal}")
        assert [(await rank.expect("form_group")).exchange for rank in ranks] == [ranks_pb2.EXCHANGE_KIND_TCP] * 2


async def test_one_rank_alone_is_a_group() -> None:
    async with GroupBench(group_settings({"name": "cpu", "ranks": 1})) as bench:
        rank = bench.obedient(0)
        await bench.until(GroupState.READY)
        assert rank.epoch == 1


async def test_close_ends_requests_tells_ranks_and_admits_nobody() -> None:
    async with GroupBench() as bench:
        zero = ScriptedRank(bench.group, 0)
        zero.join()
        bench.group.close("stop")
        assert bench.group.state is GroupState.CLOSED
        assert (await zero.expect("shutdown")).reason == "stop"
        assert (await zero.expect_end()).end.value == "done"
        late = ScriptedRank(bench.group, 1)
        late.join()
        assert "shutting down" in (await late.expect_end()).reason
        with pytest.raises(EngineUnavailable, match=r"draining|stop"):
            bench.core.submit(generation("r", range(3)))


async def test_close_while_serving_ends_streams_with_its_reason() -> None:
    async with GroupBench() as bench:
        zero, _ = await bench.ready()
        zero.holds_steps = True
        stream = bench.core.submit(generation("r", range(3)))
        bench.group.close("the gateway is shutting down")
        with pytest.raises(EngineUnavailable, match="the gateway is shutting down"):
            await collect(stream)
        assert bench.states[-2:] == [GroupState.DRAINING, GroupState.CLOSED]
