"""Scripts of sequences that come, are decoded and go, and ways to work their plans off: one by one, or in runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.base import SampledToken, StepOutput
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.recorded.multi_step import may_follow, may_lead
from hetero_worker.runners.recorded.sampling import MAX_STEPS
from tests.support.rank_group import GREEDY, PlanBuilder, RankGroup
from tests.support.thread_exchange import run_ranks


class Start(NamedTuple):
    slot: int
    tokens: Sequence[int]
    sampling: ranks_pb2.Sampling = GREEDY
    prefix_of: int | None = None
    """A slot whose first block it shares."""


class Release(NamedTuple):
    slot: int


class Steps(NamedTuple):
    """So many that decode these slots; the first computes what is left of their prompts."""

    number: int
    slots: Sequence[int]


Script = Sequence[Start | Release | Steps]


@dataclass(slots=True)
class Served:
    """What became of a script: tokens of each step, and the slots of each rank at the end."""

    tokens: list[list[SampledToken]] = field(default_factory=list)
    slots: list[dict[str, bytes]] = field(default_factory=list)


Work = Callable[[PlanRunner, list[ranks_pb2.StepPlan]], list[StepOutput]]


def one_by_one(runner: PlanRunner, plans: list[ranks_pb2.StepPlan]) -> list[StepOutput]:
    """A `Work`."""
    return [runner.execute(plan) for plan in plans]


def counted_run(runner: PlanRunner, plans: list[ranks_pb2.StepPlan]) -> list[StepOutput]:
    """A run, each step of which is counted."""
    counted: list[None] = []
    outputs = list(runner.execute_many(plans, lambda: counted.append(None)))
    assert len(counted) == len(plans) == len(outputs)
    return outputs


def together(runner: PlanRunner, plans: list[ranks_pb2.StepPlan]) -> list[StepOutput]:
    """A `Work`: in runs, as StepLoop makes them of plans that have all come."""
    outputs: list[StepOutput] = []
    rest = list(plans)
    while rest:
        first, taken = rest[0], 1
        if not may_lead(first):
            outputs.append(runner.execute(first))
        else:
            while taken < min(len(rest), MAX_STEPS) and may_follow(rest[taken], first):
                taken += 1
            outputs += counted_run(runner, rest[:taken])
        del rest[:taken]
    return outputs


def plans_of(builder: PlanBuilder, steps: Steps) -> list[ranks_pb2.StepPlan]:
    """Plans that go out ahead: of tokens that are not known yet something is put in, as a gateway does."""
    plans = []
    for _ in range(steps.number):
        for slot in steps.slots:
            builder.schedule(slot)
            builder.sequences[slot].tokens.append(0)
        plans.append(builder.take_plan())
    return plans


def slots_of(runner: PlanRunner) -> dict[str, bytes]:
    """All that a runner knows of its slots."""
    cache = runner._model_state.cache
    assert cache is not None
    table = cache.slots
    arrays: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32]] = {
        "tokens": table.token_ids, "last": table.last_tokens, "blocks": table.block_tables,
        "known": table.counts.num_tokens, "computed": table.counts.num_computed, "num_blocks": table.counts.num_blocks,
    }  # fmt: skip
    told = {name: array.tobytes() for name, array in arrays.items()}
    bound = np.flatnonzero(table.counts.num_tokens).tolist()
    return told | {"positions": repr([(slot, table.sampling(slot).draw().position) for slot in bound]).encode()}


def serve(group: RankGroup, script: Script, works: Sequence[Work]) -> Served:
    """Have each rank work the script's plans off in its way; all have to draw the same."""
    builder, served = PlanBuilder(group), Served()
    for item in script:
        if isinstance(item, Start):
            shared = [] if item.prefix_of is None else builder.sequences[item.prefix_of].blocks[:1]
            builder.start(item.slot, item.tokens, shared_blocks=shared, sampling=item.sampling)
        elif isinstance(item, Release):
            builder.release(item.slot)
        else:
            plans = plans_of(builder, item)
            outputs = run_ranks(group.exchanges, lambda rank, plans=plans: works[rank](group.runners[rank], plans))  # type: ignore[misc]
            assert all(
                list(a.sampled) == list(b.sampled) for of in outputs for a, b in zip(of, outputs[0], strict=True)
            )
            served.tokens += [list(output.sampled) for output in outputs[0]]
    served.slots = [slots_of(runner) for runner in group.runners]
    return served
