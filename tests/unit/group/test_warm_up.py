"""Warm-up plans obey the protocol at every size and leave nothing bound."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.warm_up import (
    HOST_SEQS,
    HOST_TOKENS,
    MAX_WARM_SEQS,
    StepBounds,
    masks_of,
    sampling_slots,
    warm_up_plans,
)
from tests.unit.group.group_setup import WarmRanks

pytestmark = pytest.mark.unit


def shape_of(plan: ranks_pb2.StepPlan) -> list[int]:
    """Tokens that each sequence computes, in batch order."""
    return [1] * len(plan.decode_slots) + [span.num_tokens for span in plan.spans]


@given(
    bounds=st.builds(
        StepBounds,
        max_num_seqs=st.integers(1, 100),
        max_num_batched_tokens=st.integers(1, 200),
        max_model_len=st.integers(1, 100),
        block_size=st.integers(1, 32),
        num_blocks=st.integers(1, 60),
    ),
    brief=st.booleans(),
    graph_sizes=st.sets(st.integers(1, 100), max_size=8),
)
def test_ranks_can_do_every_plan_and_end_with_no_slot_bound(
    bounds: StepBounds, brief: bool, graph_sizes: set[int]
) -> None:
    ranks = WarmRanks(
        num_blocks=bounds.num_blocks, block_size=bounds.block_size, vocab_size=9, max_num_seqs=bounds.max_num_seqs
    )
    lengths: dict[int, int] = {}
    for step_id, plan in enumerate(warm_up_plans(bounds, brief=brief, graph_sizes=graph_sizes), 1):
        plan.step_id = step_id
        for slot in plan.released_slots:
            del lengths[slot]
        masks = masks_of(plan, vocab_size=9)
        result = ranks.execute(plan, masks=masks)
        assert masks == [b"\xff\x01"] * len(plan.masked_slots)
        assert list(result.slots) == sampling_slots(plan) == [*plan.decode_slots, *(s.slot for s in plan.spans)]
        assert sum(shape_of(plan)) <= bounds.max_num_batched_tokens
        for slot, num_tokens in zip(result.slots, shape_of(plan), strict=True):
            lengths[slot] = lengths.get(slot, 0) + num_tokens
            assert lengths[slot] < bounds.max_model_len
    assert ranks.bound_slots == set()


LARGE = StepBounds(max_num_seqs=200, max_num_batched_tokens=128, max_model_len=512, block_size=16, num_blocks=400)


def test_it_prefills_as_much_as_a_step_takes_then_decodes_one_and_many() -> None:
    plans = warm_up_plans(LARGE)
    assert [shape_of(plan) for plan in plans[:5]] == [[128], [1], [1] * MAX_WARM_SEQS, [1] * MAX_WARM_SEQS, []]
    assert list(plans[4].released_slots) == list(range(MAX_WARM_SEQS))


@pytest.mark.parametrize(("seqs", "together"), [(200, [5]), (3, [3, 2]), (1, [1] * 5)])
def test_it_draws_in_every_way_and_with_a_mask_however_few_sequences_there_is_room_for(
    seqs: int, together: list[int]
) -> None:
    plans = warm_up_plans(dataclasses.replace(LARGE, max_num_seqs=seqs))[5:]
    assert [shape_of(plan) for plan in plans] == [part for n in together for part in ([1] * n, [1] * n, [])]
    draws = [new.sampling for plan in plans for new in plan.new_sequences]
    assert [draw.temperature for draw in draws] == [0, 1, 1, 1, 1]
    assert [draw.top_k > 0 for draw in draws] == [False, False, True, False, False]
    assert [draw.top_p < 1 for draw in draws] == [False, False, False, True, False]
    assert [draw.repetition_penalty > 1 for draw in draws] == [False] * 4 + [True]
    assert [list(plan.masked_slots) for plan in plans if plan.decode_slots] == [[0]] * len(together)


def test_a_brief_one_has_a_short_prefill_and_the_same_decodes() -> None:
    brief, full = warm_up_plans(LARGE, brief=True), warm_up_plans(LARGE)
    assert shape_of(brief[0]) == [16]
    assert list(map(shape_of, brief[1:])) == list(map(shape_of, full[1:5]))


def test_host_cores_warm_up_with_a_prefill_and_a_batch_of_less_than_a_step_takes() -> None:
    bounds = dataclasses.replace(LARGE, max_num_batched_tokens=300)
    on_host, usual = warm_up_plans(bounds, on_host=True), warm_up_plans(bounds)
    assert [shape_of(plan) for plan in usual[:4]] == [[300], [1], [1] * MAX_WARM_SEQS, [1] * MAX_WARM_SEQS]
    assert [shape_of(plan) for plan in on_host[:4]] == [[HOST_TOKENS], [1], [1] * HOST_SEQS, [1] * HOST_SEQS]
    assert list(map(shape_of, on_host[4:])) == list(map(shape_of, usual[4:]))
    assert shape_of(warm_up_plans(bounds, on_host=True, brief=True)[0]) == [16]


def test_without_room_for_a_sequence_there_is_nothing_to_warm() -> None:
    bounds = StepBounds(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=4, block_size=4, num_blocks=2)
    assert warm_up_plans(bounds) == ()


def test_steps_that_graphs_are_made_in_come_last_and_the_largest_first() -> None:
    graph_sizes = (1, 2, 4, 8, 120)
    plans = warm_up_plans(LARGE, graph_sizes=graph_sizes)
    usual = warm_up_plans(LARGE)
    assert plans[: len(usual)] == usual
    made = [shape_of(plan) for plan in plans[len(usual) :]]
    assert made == [[1] * 120, *([1] * size for size in reversed(graph_sizes) for _ in range(2)), []]
    assert list(plans[-1].released_slots) == list(range(120))


@pytest.mark.parametrize(
    ("graph_sizes", "blocks", "warmed"),
    [((1, 2, 4), 4, [2, 2, 1, 1]), ((1, 2, 4), 5, [4, 4, 2, 2, 1, 1]), ((300,), 400, []), ((), 400, [])],
)
def test_graphs_that_there_is_no_room_for_are_left_out(
    graph_sizes: tuple[int, ...], blocks: int, warmed: list[int]
) -> None:
    bounds = StepBounds(
        max_num_seqs=200, max_num_batched_tokens=128, max_model_len=512, block_size=16, num_blocks=blocks
    )
    plans = warm_up_plans(bounds, graph_sizes=graph_sizes)[len(warm_up_plans(bounds)) :]
    assert [len(plan.decode_slots) for plan in plans if plan.decode_slots] == warmed


def test_a_draft_model_reads_the_long_sequence_behind_its_first_decode() -> None:
    plain, drafting = warm_up_plans(LARGE), warm_up_plans(LARGE, drafts=True)
    assert [list(plan.draft_slots) for plan in drafting if plan.draft_slots] == [[0]]
    assert list(drafting[1].decode_slots) == [0]
    for plan in drafting:
        plan.ClearField("draft_slots")
        plan.ClearField("num_drafts")
    assert drafting == plain
