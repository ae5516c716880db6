"""Where a draft model goes: where it drafts fastest, and there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_api.errors import PlanError
from hetero_api.spec import DraftRanks, PlacementSpec, WorkloadSpec
from hetero_placement.draft import draft_places, draft_token_s
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import whole_on
from hetero_placement.solver import solve
from tests.unit.placement.placement_setup import GB, LLAMA_8B, SMOLLM2, bounds_of, config_of, cpu, gpu, group

pytestmark = pytest.mark.unit

LARGE, SMALL = config_of(**LLAMA_8B), config_of(**{**LLAMA_8B, "num_hidden_layers": 4})
WORK = WorkloadSpec()


def named(hardware: Hardware, asked: DraftRanks = DraftRanks.AUTO) -> list[str]:
    bounds = bounds_of(LARGE, draft=SMALL, draft_ranks=asked)
    return [place.name for place in draft_places(SMALL, hardware, dtype="bfloat16", bounds=bounds, workload=WORK)]


def test_the_fastest_place_comes_first() -> None:
    fast, slow = gpu(1e12), cpu(1e11)
    assert named(group(slow)) == ["CPU"]
    assert named(group(fast, slow)) == ["GPU", "All", "CPU"]
    # Two sockets read it in half the time, unless they meet for longer than that saves.
    assert named(group(slow, slow, host_s=1e-5)) == ["All", "CPU"]
    assert named(group(slow, slow, host_s=1e-2)) == ["CPU", "All"]


@pytest.mark.parametrize("asked", [DraftRanks.GPU, DraftRanks.CPU, DraftRanks.ALL])
def test_the_resource_says_where(asked: DraftRanks) -> None:
    assert named(group(gpu(1e12), cpu(1e11), cpu(1e11)), asked) == [asked]


def test_all_of_one_rank_is_that_rank() -> None:
    assert named(group(cpu(1e11)), DraftRanks.ALL) == ["All"]


def test_all_ranks_need_a_head_each() -> None:
    bounds = bounds_of(LARGE, draft=config_of(**SMOLLM2), draft_ranks=DraftRanks.ALL)
    hardware = group(*[cpu(1e11)] * 4)
    with pytest.raises(PlanError, match=r"draft\.ranks: All, but the draft model has 3 KV heads for 4 ranks"):
        draft_places(config_of(**SMOLLM2), hardware, dtype="bfloat16", bounds=bounds, workload=WORK)


def test_every_rank_holds_heads_however_slow_it_is() -> None:
    """So no layer needs a link, beside which the served model's would have to be told apart."""
    bounds = bounds_of(LARGE, draft=SMALL, draft_ranks=DraftRanks.ALL)
    (place,) = draft_places(
        SMALL, group(gpu(3e12), cpu(5e10), cpu(5e10)), dtype="bfloat16", bounds=bounds, workload=WORK
    )
    place.plan.validate_for(SMALL)
    (stage,) = place.plan.stages()
    assert stage.holders == (0, 1, 2)
    assert place.plan.ranks[0].layers[0].kv_heads.size == 6


def test_seconds_of_a_token_are_those_of_its_bytes() -> None:
    hardware, bounds = group(cpu(1e11), cpu(1e11)), bounds_of(LARGE, draft=SMALL)
    seconds = draft_token_s(SMALL, hardware, whole_on(SMALL, 0, 2), dtype="bfloat16", bounds=bounds, batch=1, context=0)
    read = 2 * (SMALL.num_parameters - SMALL.vocab_size * SMALL.hidden_size)
    assert seconds == pytest.approx(read / 1e11, rel=0.05)
    elsewhere = draft_token_s(
        SMALL, hardware, whole_on(SMALL, 1, 2), dtype="bfloat16", bounds=bounds, batch=1, context=0
    )
    assert elsewhere == pytest.approx(seconds, rel=0.05)


def test_where_the_fastest_place_leaves_no_room_the_next_is_taken() -> None:
    bounds = bounds_of(LARGE, draft=SMALL)
    roomy = group(gpu(1e12, memory=80 * GB), cpu(1e11))
    found = solve(LARGE, roomy, dtype="bfloat16", placement=PlacementSpec(), bounds=bounds)
    assert found.draft is not None
    assert found.draft.name == "GPU"
    assert "draft model on rank 0: " in found.reason
    tight = group(gpu(1e12, memory=2.5 * GB), cpu(1e11))
    found = solve(LARGE, tight, dtype="bfloat16", placement=PlacementSpec(), bounds=bounds)
    assert found.draft is not None
    assert found.draft.plan.owners == (1,)
    assert "draft model on rank 1: " in found.reason
    assert not MemoryModel(LARGE, tight, bounds.drafting_at(found.draft), dtype="bfloat16").problem(found.plan)
    told = replace(bounds, draft_ranks=DraftRanks.GPU)
    with pytest.raises(PlanError):
        solve(LARGE, group(gpu(1e12, memory=2.5 * GB)), dtype="bfloat16", placement=PlacementSpec(), bounds=told)


def test_each_rank_s_part_counts_in_its_memory() -> None:
    hardware = group(cpu(1e11), cpu(1e11))
    plan = solve(LARGE, hardware, dtype="bfloat16", placement=PlacementSpec(), bounds=bounds_of(LARGE)).plan
    on = {
        name: MemoryModel(LARGE, hardware, bounds_of(LARGE, draft=SMALL, draft_plan=drafted), dtype="bfloat16")
        for name, drafted in (("first", whole_on(SMALL, 0, 2)), ("second", whole_on(SMALL, 1, 2)))
    }
    alone = MemoryModel(LARGE, hardware, bounds_of(LARGE), dtype="bfloat16")
    needs = {
        name: [model.need(rank, plan.ranks[rank]).weights for rank in (0, 1)]
        for name, model in {**on, "alone": alone}.items()
    }
    assert needs["first"][1] == needs["alone"][1]
    assert needs["second"][0] == needs["alone"][0]
    assert needs["second"][1] - needs["alone"][1] == needs["first"][0] - needs["alone"][0] > 0
    # A rank without a part of the served model holds the draft model all the same.
    empty = whole_on(LARGE, 0, 2).ranks[1]
    assert on["second"].need(1, empty).weights > 0
    assert alone.need(1, empty).total == 0
