"""Measures what a step costs in the gateway before and after the ranks: schedule, apply, and the plan's way out.

    python -m bench.scheduler_steps [--steps 2000] [--running 256] [--ranks 4]

No rank takes part: results are made up, outside the measured time. Completions decode without an end, with a step in
flight, and each takes a new block every 16 tokens, at another step than its neighbour. Times are of the thread's CPU
clock, which other programs on the machine do not stretch much. Exit status 1 if a median is beyond its limit, or if
it is not the same with a full queue.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.step import ScheduledStep
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_gateway.group.roster import RankLink, broadcast

QUEUES: Final = (0, 4096)
WARM_UP_STEPS: Final = 100
BLOCK_SIZE: Final = 16
VOCAB_SIZE: Final = 150_000
PLAN_LIMIT_US: Final = 200.0
SEND_LIMIT_US: Final = 300.0
GROWTH_LIMIT: Final = 1.25
"""How much more a step may cost with a full queue: what measurements differ by without any cause."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of each step. `plan` is schedule and apply together."""

    num_waiting: int
    schedule: list[float]
    apply: list[float]
    plan: list[float]
    send: list[float]


def make_scheduler(*, num_running: int, num_waiting: int, num_steps: int) -> Scheduler:
    """Requests that outlive the measurement, so many of them running once the first step is scheduled."""
    max_tokens = num_steps + WARM_UP_STEPS + 8
    max_model_len = 64 + max_tokens
    config = EngineConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, 64 * num_running),
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_queued_requests=num_waiting,
        enable_prefix_caching=True,
        eos_token_ids=frozenset({1, 2}),
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(config, num_blocks=1 + num_running * (max_model_len // BLOCK_SIZE + 1))
    for index in range(num_running + num_waiting):
        prompt = tuple(range(10 + index, 10 + index + 20 + index % 37))
        sampling = ranks_pb2.Sampling(temperature=1.0, seed=index)
        request = GenerationRequest(
            request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling, max_tokens=max_tokens
        )
        scheduler.add(request, now=float(index))
    return scheduler


def made_up_result(step: ScheduledStep) -> ranks_pb2.StepResult:
    """A token for each that samples; none ends anything."""
    slots = [*step.decodes.slots, *(span.slot for span in step.spans if span.sample)]
    token_ids = [10 + (977 * slot + 31 * step.plan.step_id) % 1000 for slot in slots]
    return ranks_pb2.StepResult(step_id=step.plan.step_id, slots=slots, token_ids=token_ids)


def scheduled(scheduler: Scheduler, in_flight: StepsInFlight) -> ScheduledStep:
    """Schedule a step and record it as sent."""
    step = scheduler.schedule(0.0, in_flight=in_flight)
    assert step is not None, "there are requests and a step may go out"
    in_flight.submit(step)
    return step


async def measure(*, num_running: int, num_waiting: int, num_steps: int, num_ranks: int) -> Costs:
    """Costs of `num_steps` steps after a warm-up."""
    scheduler = make_scheduler(num_running=num_running, num_waiting=num_waiting, num_steps=num_steps)
    links = [RankLink(f"rank {rank}") for rank in range(num_ranks)]
    outgoing = [link.outgoing() for link in links]
    costs = Costs(num_waiting, [], [], [], [])
    in_flight = StepsInFlight()
    before = scheduled(scheduler, in_flight)
    for _ in range(num_steps + WARM_UP_STEPS):
        began = time.thread_time()
        step = scheduled(scheduler, in_flight)
        schedule_s = time.thread_time() - began
        began = time.thread_time()
        broadcast(links, ranks_pb2.GatewayMessage(epoch=1, step_plan=step.plan))
        send_s = time.thread_time() - began
        await _take_one_each(outgoing)
        result = made_up_result(before)
        began = time.thread_time()
        in_flight.answer(result)
        in_flight.take()
        scheduler.apply(before, result)
        apply_s = time.thread_time() - began
        before = step
        for column, seconds in (
            (costs.schedule, schedule_s),
            (costs.apply, apply_s),
            (costs.plan, schedule_s + apply_s),
            (costs.send, send_s),
        ):
            column.append(1e6 * seconds)
    for column in (costs.schedule, costs.apply, costs.plan, costs.send):
        del column[:WARM_UP_STEPS]
    return costs


async def _take_one_each(outgoing: Sequence[AsyncIterator[bytes]]) -> None:
    for payloads in outgoing:
        await anext(payloads)


def problems(all_costs: Sequence[Costs]) -> list[str]:
    """Which limits were exceeded."""
    found = []
    for costs in all_costs:
        where = f"with {costs.num_waiting} waiting"
        for name, column, limit in (
            ("schedule and apply", costs.plan, PLAN_LIMIT_US),
            ("serialising and handing over", costs.send, SEND_LIMIT_US),
        ):
            median = statistics.median(column)
            if median > limit:
                found.append(f"{name} take {median:.0f} µs {where}; the limit is {limit:.0f} µs")
    first, last = (statistics.median(costs.plan) for costs in (all_costs[0], all_costs[-1]))
    if last > GROWTH_LIMIT * first:
        found.append(f"a step costs {last:.0f} µs with a full queue and {first:.0f} µs without")
    return found


def table_of(all_costs: Sequence[Costs], *, num_running: int, num_ranks: int) -> Table:
    table = Table(title=f"A step of {num_running} decodes, µs")
    for name in ("waiting", "part", "median", "p99", "limit"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for costs in all_costs:
        for name, column, limit in (
            ("schedule", costs.schedule, ""),
            ("apply", costs.apply, ""),
            ("schedule + apply", costs.plan, f"{PLAN_LIMIT_US:.0f}"),
            (f"serialise, hand to {num_ranks} ranks", costs.send, f"{SEND_LIMIT_US:.0f}"),
        ):
            p99 = statistics.quantiles(column, n=100)[-1]
            table.add_row(str(costs.num_waiting), name, f"{statistics.median(column):.0f}", f"{p99:.0f}", limit)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args()
    all_costs = [
        asyncio.run(
            measure(num_running=asked.running, num_waiting=waiting, num_steps=asked.steps, num_ranks=asked.ranks)
        )
        for waiting in QUEUES
    ]
    console = Console()
    console.print(table_of(all_costs, num_running=asked.running, num_ranks=asked.ranks))
    exceeded = problems(all_costs)
    for problem in exceeded:
        console.print(f"[red]too slow:[/red] {problem}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
