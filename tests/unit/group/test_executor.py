"""StepPlans and commands over links: ids, order, time-outs, loss."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineFault, GroupLost
from hetero_gateway.engine.step import ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepInFlight
from hetero_gateway.group.errors import RankMisbehaved
from hetero_gateway.group.executor import GroupExecutor
from hetero_gateway.group.roster import RankLink
from hetero_worker.process.gateway_link import one_by_one

pytestmark = pytest.mark.unit

COUNT = ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts())
SLEEP = ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1))


class Bench:
    """An executor over links that nobody reads but the test. Being late ends the epoch, as in a group."""

    def __init__(self, *, timeout_s: float = 60.0, num_ranks: int = 2) -> None:
        self.links = [RankLink(str(rank)) for rank in range(num_ranks)]
        self.seconds: list[float] = []
        self.late: list[str] = []
        self._sent: deque[list[ranks_pb2.GatewayMessage]] = deque()
        self.executor = GroupExecutor(
            self.links, epoch=7, step_timeout_s=timeout_s, command_timeout_s=timeout_s,
            observe_step=self.seconds.append, on_late=self.end,
        )  # fmt: skip

    def end(self, reason: str) -> None:
        self.late.append(reason)
        self.executor.lose(reason)

    def submit(self, *, masked: tuple[int, ...] = ()) -> StepInFlight:
        step = ScheduledStep(ranks_pb2.StepPlan(decode_slots=[3], masked_slots=masked))
        self.executor.in_flight.submit(step)
        return list(self.executor.in_flight)[-1]

    def take(self) -> ranks_pb2.StepResult:
        """The result of the oldest step, which was answered."""
        taken = self.executor.in_flight.take()
        assert taken is not None
        assert taken.result is not None
        return taken.result

    async def lost(self) -> None:
        """Raises what the executor says when its next news is no answer."""
        news = asyncio.Event()
        self.executor.in_flight.on_progress = news.set
        await news.wait()
        assert self.executor.in_flight.take() is None

    async def command(self) -> asyncio.Task[list[ranks_pb2.CommandReport]]:
        task = asyncio.create_task(self.executor.command(SLEEP))
        await asyncio.sleep(0)
        return task

    def answer(self, step_id: int, *, rank: int = 0, token: int = 5) -> None:
        self.executor.take_results(rank, [ranks_pb2.StepResult(step_id=step_id, token_ids=[token])])

    def report(self, rank: int, step_id: int, *, freed: int = 0) -> None:
        report = ranks_pb2.CommandReport(done=True, freed_bytes=freed)
        self.executor.take_results(rank, [ranks_pb2.StepResult(step_id=step_id, command_report=report)])

    async def sent(self) -> list[ranks_pb2.GatewayMessage]:
        """The next message on every link; of plans that travel together, the next plan's."""
        if not self._sent:
            self._sent.extend(map(list, zip(*(one_by_one(each) for each in await self.sent_together()), strict=True)))
        return self._sent.popleft()

    async def sent_together(self) -> list[ranks_pb2.GatewayMessage]:
        """The next message on every link, as it is."""
        return [ranks_pb2.GatewayMessage.FromString(await anext(link.outgoing())) for link in self.links]


async def test_all_ranks_get_the_same_plan_and_a_step_has_one_id_everywhere() -> None:
    bench = Bench()
    for step_id in (1, 2, 3):
        step = bench.submit()
        first, second = await bench.sent()
        assert first == second
        assert (first.epoch, first.step_plan.step_id, list(first.step_plan.decode_slots)) == (7, step_id, [3])
        bench.answer(step_id)
        result = bench.take()
        assert (step.step_id, step.step.plan.step_id, result.step_id) == (step_id, step_id, step_id)
        assert list(result.token_ids) == [5]
    assert len(bench.executor.in_flight) == 0
    assert (len(bench.seconds), bench.executor.num_steps) == (3, 3)


@pytest.mark.parametrize(("decode", "prompt", "streams"), [(0, 8, True), (3, 5, True), (0, 7, False), (8, 0, False)])
async def test_steps_with_prompts_and_enough_rows_stream_experts(decode: int, prompt: int, *, streams: bool) -> None:
    bench = Bench()
    for streams_from, expected in ((None, False), (8, streams)):
        bench.executor.streams_from = streams_from
        plan = ranks_pb2.StepPlan(decode_slots=range(decode))
        if prompt:
            plan.spans.add(slot=9, num_tokens=prompt)
        step = bench.executor.in_flight.submit(ScheduledStep(plan))
        first, second = await bench.sent()
        assert first == second
        assert first.step_plan.streams_experts is expected
        bench.answer(step.step_id)
        bench.take()


async def test_the_next_plan_goes_out_before_the_last_result_came_and_results_come_in_order() -> None:
    bench = Bench()
    for _ in range(2):
        bench.submit()
    assert [(await bench.sent())[0].step_plan.step_id for _ in range(2)] == [1, 2]
    with pytest.raises(RankMisbehaved, match="rank 0 answered step 2"):
        bench.answer(2)
    bench.answer(1, token=8)
    bench.submit()
    assert bench.take().token_ids == [8]
    assert bench.executor.in_flight.take() is None
    bench.answer(2)
    bench.answer(3)
    assert [bench.take().step_id for _ in range(2)] == [2, 3]


async def test_a_step_has_its_time_from_when_it_became_the_oldest() -> None:
    bench = Bench(timeout_s=0.2)
    for _ in range(2):
        bench.submit()
    await asyncio.sleep(0.15)
    bench.answer(1)
    await asyncio.sleep(0.15)
    assert bench.late == []
    assert 0.1 < bench.executor.stalled_s < 0.2
    began_s = time.monotonic()
    bench.take()
    with pytest.raises(GroupLost, match=r"step 2 had no result within 0\.2 s .*stepTimeoutSeconds"):
        await bench.lost()
    assert time.monotonic() - began_s < 0.2
    assert len(bench.late) == 1


async def test_no_answer_in_time_is_a_lost_group() -> None:
    bench = Bench(timeout_s=0.01)
    bench.submit()
    with pytest.raises(GroupLost, match=r"step 1 had no result within 0\.01 s .*stepTimeoutSeconds"):
        await bench.lost()
    assert bench.seconds == []
    assert bench.executor.stalled_s == 0


async def test_loss_ends_every_step_in_flight_and_every_later_one() -> None:
    bench = Bench()
    bench.submit()
    masked = bench.submit(masked=(3,))
    bench.executor.lose("rank 1 is gone")
    bench.executor.lose("a second reason")
    for action in (bench.take, bench.submit, bench.take):
        with pytest.raises(GroupLost, match="rank 1 is gone"):
            action()
    with pytest.raises(GroupLost, match="rank 1 is gone"):
        await bench.executor.compute(ranks_pb2.StepPlan())
    bench.executor.in_flight.send_masks(masked, [])
    bench.answer(1)
    assert bench.executor.stalled_s == 0


@pytest.mark.parametrize(("rank", "step_id"), [(0, 0), (0, 2), (1, 1)])
async def test_an_answer_that_is_not_awaited_is_misbehaviour(rank: int, step_id: int) -> None:
    bench = Bench()
    bench.submit()
    with pytest.raises(RankMisbehaved, match=f"rank {rank} answered step {step_id}"):
        bench.answer(step_id, rank=rank)
    bench.answer(1)
    with pytest.raises(RankMisbehaved, match="answered step 1"):
        bench.answer(1)
    assert bench.take().step_id == 1


async def test_a_plan_of_no_request_is_computed_alone() -> None:
    bench = Bench()
    computing = asyncio.create_task(bench.executor.compute(ranks_pb2.StepPlan(decode_slots=[4])))
    assert [(await bench.sent())[0].step_plan.decode_slots] == [[4]]
    bench.answer(1, token=7)
    assert (await computing).token_ids == [7]
    assert len(bench.executor.in_flight) == 0
    assert bench.executor.num_steps == 1


async def test_masks_follow_their_plan_under_its_id() -> None:
    bench = Bench()
    bench.submit()
    bench.answer(1)
    masked = bench.submit(masked=(3,))
    with pytest.raises(EngineFault, match="before the masks of step 2"):
        bench.submit()
    with pytest.raises(RankMisbehaved, match="before its masks"):
        bench.answer(2)
    bench.executor.in_flight.send_masks(masked, [b"\x01"])
    bench.submit()
    kinds = []
    for _ in range(4):
        for message in await bench.sent():
            kinds.append((message.WhichOneof("body"), message.step_plan.step_id or message.token_masks.step_id))
    expected = [("step_plan", 1), ("step_plan", 2), ("token_masks", 2), ("step_plan", 3)]
    assert kinds == [kind for kind in expected for _ in bench.links]
    with pytest.raises(EngineFault, match="masks of step 2 are not due"):
        bench.executor.in_flight.send_masks(masked, [])


async def test_a_command_is_a_plan_that_every_rank_answers() -> None:
    bench = Bench(num_ranks=3)
    bench.submit()
    bench.answer(1)
    bench.take()
    await bench.sent()
    task = await bench.command()
    assert all((m.step_plan.step_id, m.step_plan.command) == (2, SLEEP) for m in await bench.sent())
    for rank in (2, 0, 1):
        assert not task.done()
        bench.report(rank, 2, freed=10 + rank)
    assert [report.freed_bytes for report in await task] == [10, 11, 12]
    assert bench.executor.num_steps == 1
    bench.submit()
    assert (await bench.sent())[0].step_plan.step_id == 3


async def test_a_command_needs_that_nothing_is_out_and_lets_nothing_out() -> None:
    bench = Bench()
    bench.submit()
    with pytest.raises(EngineFault, match="while something else is"):
        await bench.executor.command(SLEEP)
    bench.answer(1)
    bench.take()
    task = await bench.command()
    with pytest.raises(EngineFault, match="while a command does"):
        bench.submit()
    bench.report(0, 2)
    with pytest.raises(RankMisbehaved, match="rank 0 answered step 2"):
        bench.report(0, 2)
    with pytest.raises(RankMisbehaved, match="without a report"):
        bench.answer(2, rank=1)
    bench.report(1, 2)
    await task


async def test_a_command_in_turn_goes_between_steps_that_need_not_wait_for_it() -> None:
    bench = Bench()
    bench.submit()
    task = asyncio.create_task(bench.executor.command_in_turn(COUNT))
    await asyncio.sleep(0)
    bench.submit()
    plans = [(await bench.sent())[0].step_plan for _ in range(3)]
    assert [(plan.step_id, plan.HasField("command")) for plan in plans] == [(1, False), (2, True), (3, False)]
    bench.report(1, 2)  # before rank 0 has answered the step that comes first
    await asyncio.sleep(0.05)
    bench.answer(1)
    await asyncio.sleep(0.02)
    assert not task.done()
    bench.report(0, 2)
    answer = await task
    assert 0.02 <= answer.seconds < 0.05, "from the end of the step before it"
    assert len(answer.reports) == 2
    bench.answer(3)
    assert bench.take().step_id == 1
    taken = bench.executor.in_flight.take()
    assert taken is not None
    assert taken.step_id == 3
    assert taken.seconds < 0.01, "from the end of the command"


async def test_a_command_in_turn_waits_for_masks_that_ranks_wait_for() -> None:
    bench = Bench()
    step = bench.submit(masked=(3,))
    task = asyncio.create_task(bench.executor.command_in_turn(COUNT))
    assert (await bench.sent())[0].step_plan.step_id == 1
    bench.executor.in_flight.send_masks(step, [bytes([255])])
    assert [(await bench.sent())[0].WhichOneof("body") for _ in range(2)] == ["token_masks", "step_plan"]
    bench.answer(1)
    for rank in (0, 1):
        bench.report(rank, 2)
    await task


async def test_a_command_in_turn_that_waits_for_masks_ends_with_the_group() -> None:
    bench = Bench()
    bench.submit(masked=(3,))
    task = asyncio.create_task(bench.executor.command_in_turn(COUNT))
    await bench.sent()
    bench.executor.lose("a rank is gone")
    with pytest.raises(GroupLost, match="a rank is gone"):
        await task


async def test_a_command_that_a_rank_does_not_answer_is_a_lost_group() -> None:
    bench = Bench(timeout_s=0.02)
    task = await bench.command()
    bench.report(0, 1)
    with pytest.raises(GroupLost, match=r"rank 1 did not answer a command within 0\.02 s"):
        await task
    assert len(bench.late) == 1


async def test_a_command_that_gets_on_has_time() -> None:
    bench = Bench(timeout_s=0.2)
    task = await bench.command()
    for _ in range(6):
        await asyncio.sleep(0.05)
        bench.executor.note_progress()
    assert not task.done()
    with pytest.raises(GroupLost, match=r"rank 0, 1 did not answer a command within 0\.2 s"):
        await task


async def test_a_command_goes_on_when_its_caller_gives_up() -> None:
    bench = Bench()
    task = await bench.command()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for rank in (0, 1):
        bench.report(rank, 1)
    bench.submit()


async def test_a_plan_of_256_decodes_goes_to_4_ranks_within_300_microseconds() -> None:
    bench = Bench(num_ranks=4)
    plan = ranks_pb2.StepPlan(decode_slots=range(256), block_slots=range(16), block_ids=range(9_000, 9_016))
    fastest_s = 1.0
    for step_id in range(1, 201):
        began_s = time.perf_counter()
        bench.executor.in_flight.submit(ScheduledStep(plan))
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
        bench.answer(step_id)
        bench.take()
    assert fastest_s < 300e-6


async def test_plans_of_one_turn_travel_together_and_so_may_results() -> None:
    bench = Bench()
    for _ in range(3):
        bench.submit()
    for message in await bench.sent_together():
        plans = [message.step_plan, *message.further_plans]
        assert [plan.step_id for plan in plans] == [1, 2, 3]
    late = bench.submit()
    assert [message.step_plan.step_id for message in await bench.sent_together()] == [4, 4]
    await asyncio.sleep(0.03)
    bench.executor.take_results(
        0, [ranks_pb2.StepResult(step_id=step_id, token_ids=[step_id]) for step_id in (1, 2, 3)]
    )
    assert [bench.take().token_ids for _ in range(3)] == [[1], [2], [3]]
    assert late.result is None
    assert sum(bench.seconds) >= 0.03
    assert max(bench.seconds) - min(bench.seconds) < 1e-6
    bench.answer(4)
    assert bench.take().step_id == 4


async def test_masks_go_out_behind_the_plan_that_owes_them() -> None:
    bench = Bench()
    bench.submit()
    masked = bench.submit(masked=(3,))
    bench.executor.in_flight.send_masks(masked, [b"\xff"])
    first, second = await bench.sent(), await bench.sent()
    assert [first[0].step_plan.step_id, second[0].step_plan.step_id] == [1, 2]
    assert (await bench.sent())[0].token_masks.step_id == 2


async def test_plans_of_an_epoch_that_is_over_do_not_go_out() -> None:
    bench = Bench()
    bench.submit()
    bench.executor.lose("over")
    with pytest.raises(GroupLost, match="over"):
        bench.take()
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(bench.links[0].outgoing()), 0.01)
