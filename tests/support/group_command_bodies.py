"""A rank's body that serves, has the group do something in between, and serves again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.runners.base import LoadRequest, StepOutput
from hetero_worker.runners.plan_runner import PlanRunner
from tests.support.rank_processes import RankContext

PROMPT = (7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127)
BLOCK_SIZE, NUM_BLOCKS = 16, 9
_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to say."""

    completions: list[list[int]]
    """One before the commands, one behind each that was done."""
    reports: list[tuple[bool, str]]
    counts: list[dict[int, list[int]]] = field(default_factory=list)
    """How often experts were chosen, by layer: one a command to count them."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command, and whether requests are served behind it."""

    command: bytes
    """Of a GroupCommand."""
    serves: bool = True


def serve_between_commands(
    ranks: RankContext,
    directory: Path,
    plan: ShardPlan,
    orders: Sequence[Order],
    kind: ranks_pb2.ExchangeKind.ValueType,
    memory_bytes: Sequence[int],
) -> Told:
    """`memory_bytes` is each rank's; a rank with less cannot make as large a cache."""
    group = ranks.form(kind)
    config = ModelConfig.from_directory(directory)
    runner = PlanRunner(cpu_backend(), measure=lambda decoder, request, pool: 0)
    runner.attach(group.exchange)
    runner.load(
        LoadRequest(
            directory=directory, config=config, dtype="float32", shard_plan=plan, rank=ranks.rank,
            max_model_len=config.max_position, max_num_batched_tokens=64, max_num_seqs=2,
            memory_bytes=memory_bytes[ranks.rank],
        )
    )  # fmt: skip
    runner.allocate(NUM_BLOCKS, BLOCK_SIZE)
    plays = _Plays(runner)
    told = Told([plays.complete()], [])
    for order in orders:
        report = plays.run(ranks_pb2.StepPlan(command=ranks_pb2.GroupCommand.FromString(order.command))).report
        assert report is not None
        told.reports.append((report.done, report.problem))
        while report.is_reading and plays.is_reading:
            time.sleep(0.001)
        if report.expert_counts:
            told.counts.append({counts.layer: list(counts.tokens) for counts in report.expert_counts})
        if order.serves:
            told.completions.append(plays.complete())
    runner.detach()
    group.close()
    return told


class _Plays:
    """Plans, numbered."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._step_id = 0

    def run(self, plan: ranks_pb2.StepPlan) -> StepOutput:
        self._step_id += 1
        plan.step_id = self._step_id
        return self._runner.execute(plan)

    @property
    def is_reading(self) -> bool:
        """Whether this rank still reads an expert."""
        ahead = self._runner._commands._ahead
        return ahead is not None and ahead.is_reading

    def complete(self) -> list[int]:
        """Tokens behind the prompt, greedy."""
        new = ranks_pb2.NewSequence(slot=0, token_ids=PROMPT, num_prompt_tokens=len(PROMPT), block_ids=[1])
        span = ranks_pb2.ScheduledSpan(slot=0, num_tokens=len(PROMPT), sample=True)
        outputs = [self.run(ranks_pb2.StepPlan(new_sequences=[new], spans=[span]))]
        outputs += [self.run(ranks_pb2.StepPlan(decode_slots=[0])) for _ in range(_TOKENS - 1)]
        self.run(ranks_pb2.StepPlan(released_slots=[0]))
        return [output.sampled[0].token for output in outputs]
