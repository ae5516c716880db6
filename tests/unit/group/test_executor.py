"""StepPlans over links: ids, timeouts, loss."""

from __future__ import annotations

import asyncio

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineFault, GroupLost
from hetero_gateway.group.errors import RankMisbehaved
from hetero_gateway.group.executor import GroupExecutor
from hetero_gateway.group.rank_link import RankLink

pytestmark = pytest.mark.unit


class Bench:
    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.links = [RankLink("a"), RankLink("b")]
        self.seconds: list[float] = []
        self.executor = GroupExecutor(self.links, epoch=7, step_timeout_s=timeout_s, observe_step=self.seconds.append)

    def start(self, step_id: int = 1) -> asyncio.Task[ranks_pb2.StepResult]:
        plan = ranks_pb2.StepPlan(step_id=step_id, scheduled=[ranks_pb2.ScheduledSequence(slot=3, num_tokens=1)])
        return asyncio.create_task(self.executor.execute(plan))

    async def sent(self) -> list[ranks_pb2.GatewayMessage]:
        return [await anext(link.outgoing()) for link in self.links]


async def test_all_ranks_get_the_same_plan_and_the_answer_has_the_plans_own_id() -> None:
    bench = Bench()
    for epoch_id, own_id in ((1, 1), (2, 2), (3, 1)):
        task = bench.start(own_id)
        first, second = await bench.sent()
        assert first == second
        assert (first.epoch, first.step_plan.step_id, first.step_plan.scheduled[0].slot) == (7, epoch_id, 3)
        bench.executor.take_result(ranks_pb2.StepResult(step_id=epoch_id, token_ids=[5]))
        result = await task
        assert (result.step_id, list(result.token_ids)) == (own_id, [5])
    assert len(bench.seconds) == 3


async def test_no_answer_in_time_is_a_lost_group() -> None:
    bench = Bench(timeout_s=0.01)
    with pytest.raises(GroupLost, match=r"step 1 had no result within 0\.01 s .*stepTimeoutSeconds"):
        await bench.start()
    assert bench.seconds == []


async def test_loss_ends_the_step_in_flight_and_every_later_one() -> None:
    bench = Bench()
    task = bench.start()
    await bench.sent()
    bench.executor.lose("rank 1 is gone")
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        await task
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        await bench.start(2)


@pytest.mark.parametrize("step_id", [0, 2])
async def test_an_answer_to_another_step_is_misbehaviour(step_id: int) -> None:
    bench = Bench()
    task = bench.start()
    await bench.sent()
    with pytest.raises(RankMisbehaved, match=f"answered step {step_id}"):
        bench.executor.take_result(ranks_pb2.StepResult(step_id=step_id))
    bench.executor.take_result(ranks_pb2.StepResult(step_id=1))
    with pytest.raises(RankMisbehaved, match="answered step 1"):
        bench.executor.take_result(ranks_pb2.StepResult(step_id=1))
    await task


async def test_two_steps_at_once_are_a_bug() -> None:
    bench = Bench()
    task = bench.start()
    await bench.sent()
    with pytest.raises(EngineFault, match="still in flight"):
        await bench.start(2)
    bench.executor.take_result(ranks_pb2.StepResult(step_id=1))
    await task
