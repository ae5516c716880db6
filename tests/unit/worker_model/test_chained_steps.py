"""A step that begins while the one before is under way changes no token, whatever was guessed and whatever follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.sharding import UnitRange
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.request import GenerationRequest
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.errors import ProtocolError
from hetero_worker.layers.sampler import SampledRows, sample_tokens
from hetero_worker.runners.begun_step import BegunStep
from hetero_worker.runners.device_inputs import DeviceInputs, stand_in_of
from hetero_worker.runners.graphs.padding import Padding
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.slots import SlotTable
from hetero_worker.runners.trust import MOST_STEPS, Trust
from hetero_worker.sampling.device_scores import Contest, TorchDrawKernels
from hetero_worker.sampling.drawing import ShardDrawing
from hetero_worker.sampling.request import SamplingRow
from tests.support.chained_serving import Asked, ChainedRank, MisleadingDrawing, late_drawing, random_requests
from tests.support.pseudo_gpu import PseudoGpuPlatform
from tests.support.rank_group import GREEDY
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import VOCAB_SIZE, save_tiny

pytestmark = pytest.mark.unit

PENALIZED = ranks_pb2.Sampling(top_p=1, presence_penalty=0.5)
BIASED = ranks_pb2.Sampling(top_p=1, bias_token_ids=[4], biases=[1.0])
MIN_TOKENS = ranks_pb2.Sampling(top_p=1, min_tokens=9, end_token_ids=[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama-biased", tmp_path_factory.mktemp("llama"), num_hidden_layers=2).directory


def greedy(name: str, length: int, *, max_tokens: int) -> Asked:
    prompt = tuple(3 + (7 * i + length) % 190 for i in range(length))
    return Asked(
        GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=ranks_pb2.Sampling(seed=1),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
    )


def chained_share(rank: ChainedRank) -> float:
    summary = rank.runner._times.summary()
    assert summary is not None
    return summary.chained_share


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("seed", "wrong"), [(1, 0.0), (2, 0.3), (3, 1.0)])
def test_tokens_are_those_of_steps_one_by_one(model: Path, seed: int, wrong: float, graphs: bool) -> None:
    """Arrivals and ends, chunked prompts, common prefixes, preemption, every kind of draw, some guesses wrong."""
    asked = random_requests(seed, 14, vocabulary=VOCAB_SIZE)
    expected = ChainedRank(model, chained=False).serve(asked)
    drawing = MisleadingDrawing(wrong=wrong)
    rank = ChainedRank(model, drawing=drawing, make_graphs=TapeBackend if graphs else None)
    assert rank.serve(asked) == expected
    assert chained_share(rank) > 0.2
    assert rank.runner._times._num_remade == drawing.misled
    assert bool(drawing.misled) == bool(wrong)


def test_too_small_a_cache_preempts_and_changes_no_token(model: Path) -> None:
    asked = [greedy(f"{i}", 9 + i, max_tokens=20) for i in range(5)]
    expected = ChainedRank(model, chained=False).serve(asked)
    rank = ChainedRank(model, drawing=MisleadingDrawing(wrong=0.2), num_blocks=16)
    assert rank.serve(asked) == expected
    assert chained_share(rank) > 0.3


def test_each_step_begins_before_the_one_before_is_answered(model: Path) -> None:
    rank = ChainedRank(model)
    rank.serve([greedy("a", 5, max_tokens=6)])
    expected = ["begin 1"]
    for number in range(2, 7):
        expected += [f"begin {number}", f"answer {number - 1}"]
    assert rank.said[: len(expected)] == expected
    assert rank.said[len(expected) :] == ["answer 6", "begin 7", "answer 7"]  # which only releases
    assert chained_share(rank) == 1.0


@pytest.mark.parametrize(("steps_ahead", "chained"), [(1, True), (2, False)])
def test_steps_go_one_by_one_without_overlap_or_when_chaining_is_off(
    model: Path, steps_ahead: int, chained: bool
) -> None:
    rank = ChainedRank(model, chained=chained)
    rank.serve([greedy("a", 5, max_tokens=6)], steps_ahead=steps_ahead)
    answers = [said for said in rank.said if said.startswith("answer")]
    assert answers == [f"answer {number}" for number in range(1, 8)]
    assert chained_share(rank) == 0.0
    assert f"steps={'chained' if chained else 'one by one (turned off)'}" in rank.report.kernels


class NobodyIsProven(TorchDrawKernels):
    """Every draw is decided on the host, from its whole row: which is fetched after the next step began."""

    def contest(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Contest:
        ids, rivals = super().contest(logits, rows, keys, temperatures, begin)
        return Contest(ids, torch.full_like(rivals, torch.inf))


def test_logits_outlive_the_next_steps_pass(model: Path) -> None:
    asked = [
        Asked(
            GenerationRequest(
                request_id=f"{i}",
                prompt_token_ids=(5 + i, 8),
                sampling=ranks_pb2.Sampling(seed=i, temperature=1.0),
                max_tokens=12,
            )
        )
        for i in range(3)
    ]
    expected = ChainedRank(model, chained=False).serve(asked)
    rank = ChainedRank(model, drawing=late_drawing(NobodyIsProven()), make_graphs=TapeBackend)
    assert rank.serve(asked) == expected
    assert chained_share(rank) > 0.8


def test_guesses_that_never_come_true_are_not_trusted_for_long_and_good_ones_are_again(model: Path) -> None:
    asked = [greedy("a", 5, max_tokens=110)]
    expected = ChainedRank(model, chained=False).serve(asked)
    bad = MisleadingDrawing(wrong=1.0)
    rank = ChainedRank(model, drawing=bad, trust=Trust())
    assert rank.serve(asked) == expected
    assert bad.misled == 6, "after 0, 1, 3, 7, 15 and 31 steps one by one"
    few = MisleadingDrawing(wrong=0.02)
    rank = ChainedRank(model, drawing=few, trust=Trust())
    assert rank.serve(asked) == expected
    assert few.misled
    assert chained_share(rank) > 0.9


def test_trust_is_lost_for_so_many_steps_at_most_and_won_back_by_right_guesses() -> None:
    trust = Trust()
    pauses = []
    for _ in range(9):
        trust.wrong()
        pauses.append(0)
        while not trust.is_given:
            trust.count_step()
            pauses[-1] += 1
    assert pauses == [1, 3, 7, 15, 31, MOST_STEPS, MOST_STEPS, MOST_STEPS, MOST_STEPS]
    for _ in range(6):
        trust.right()
    trust.wrong()
    trust.count_step()
    assert trust.is_given


# --- which plans may follow -----------------------------------------------------------------------------


def first_plan(*samplings: ranks_pb2.Sampling) -> ranks_pb2.StepPlan:
    """Slot i begins with three tokens and samples; slot 5 computes the first two of its five."""
    slots = [*range(len(samplings)), 5]
    plan = ranks_pb2.StepPlan(step_id=1)
    for slot, sampling in zip(slots, [*samplings, GREEDY], strict=True):
        tokens = [3 + slot, 4, 5] if slot < 5 else [9, 8, 7, 6, 5]
        plan.new_sequences.add(slot=slot, token_ids=tokens, num_prompt_tokens=len(tokens), sampling=sampling)
        plan.block_slots.extend([slot, slot])
        plan.block_ids.extend([1 + 2 * slot, 2 + 2 * slot])
        plan.spans.add(slot=slot, num_tokens=3 if slot < 5 else 2, sample=slot < 5)
    return plan


def begun(model: Path, *samplings: ranks_pb2.Sampling) -> BegunStep:
    step = ChainedRank(model).runner.begin(first_plan(*samplings))
    assert isinstance(step, BegunStep)
    return step


def second(**fields: Any) -> ranks_pb2.StepPlan:
    return ranks_pb2.StepPlan(step_id=2, **fields)


def bound_to(slot: int, **fields: Any) -> ranks_pb2.NewSequence:
    return ranks_pb2.NewSequence(slot=slot, token_ids=[1, 2], num_prompt_tokens=2, block_ids=[20], **fields)


SPAN = ranks_pb2.ScheduledSpan
FOLLOWERS: dict[str, tuple[ranks_pb2.StepPlan, tuple[ranks_pb2.Sampling, ...], bool]] = {
    "decodes what was drawn": (second(decode_slots=[0, 1]), (GREEDY, GREEDY), True),
    "a span of another slot": (second(spans=[SPAN(slot=5, num_tokens=3, sample=True)]), (GREEDY,), True),
    "a span of a slot that drew": (second(spans=[SPAN(slot=0, num_tokens=1, sample=True)]), (GREEDY,), False),
    "computes nothing": (second(released_slots=[0]), (GREEDY,), False),
    "a command": (second(command=ranks_pb2.GroupCommand(start_profile=ranks_pb2.StartProfile())), (GREEDY,), False),
    "masks": (second(decode_slots=[0, 1], masked_slots=[1]), (GREEDY, GREEDY), False),
    "penalties": (second(decode_slots=[0]), (PENALIZED,), False),
    "penalties in a slot that rests": (second(decode_slots=[0]), (GREEDY, PENALIZED), True),
    "min_tokens in a slot that rests": (second(decode_slots=[0]), (GREEDY, MIN_TOKENS), True),
    "a draw that only the host makes": (second(decode_slots=[0, 1]), (GREEDY, BIASED), False),
    "such a draw of a slot that is released": (
        second(decode_slots=[0], released_slots=[1]),
        (GREEDY, BIASED),
        True,
    ),
    "a slot that drew is bound anew": (
        second(
            released_slots=[1],
            new_sequences=[bound_to(1)],
            decode_slots=[0],
            spans=[SPAN(slot=1, num_tokens=2, sample=True)],
        ),
        (GREEDY, PENALIZED),
        True,
    ),
    "log-probabilities of the step's draws": (
        second(decode_slots=[0]),
        (GREEDY, ranks_pb2.Sampling(top_p=1, num_logprobs=1)),
        False,
    ),
    "log-probabilities of a prompt": (
        second(
            new_sequences=[bound_to(3, sampling=ranks_pb2.Sampling(num_prompt_logprobs=1))],
            spans=[SPAN(slot=3, num_tokens=2, sample=True)],
        ),
        (GREEDY,),
        False,
    ),
}


@pytest.mark.parametrize(("plan", "samplings", "may_follow"), FOLLOWERS.values(), ids=list(FOLLOWERS))
def test_a_plan_may_follow_if_nothing_but_tokens_is_missing(
    model: Path, plan: ranks_pb2.StepPlan, samplings: Sequence[ranks_pb2.Sampling], may_follow: bool
) -> None:
    assert begun(model, *samplings).may_be_followed_by(plan) == may_follow


def test_a_plan_that_cannot_follow_does_not_begin(model: Path) -> None:
    rank = ChainedRank(model)
    step = rank.runner.begin(first_plan(GREEDY))
    with pytest.raises(RuntimeError, match="step plan 2 begins before the step that it cannot follow"):
        rank.runner.begin(second(released_slots=[0]))
    assert len(step.finish().sampled) == 1
    assert rank.runner.execute(second(released_slots=[0])).sampled == ()


def test_no_third_step_begins_while_two_are_under_way(model: Path) -> None:
    rank = ChainedRank(model)
    rank.runner.begin(first_plan(GREEDY))
    rank.runner.begin(second(decode_slots=[0]))
    with pytest.raises(RuntimeError, match="step plan 3 begins before"):
        rank.runner.begin(ranks_pb2.StepPlan(step_id=3, decode_slots=[0]))


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (second(decode_slots=[0, 3]), "slot 3"),
        (second(decode_slots=[0], block_slots=[0], block_ids=[99]), "a block outside"),
        (ranks_pb2.StepPlan(step_id=7, decode_slots=[0]), "expected step 2"),
    ],
)
def test_an_answer_outlives_the_failure_of_the_next_plan(model: Path, plan: ranks_pb2.StepPlan, problem: str) -> None:
    expected = ChainedRank(model).runner.execute(first_plan(GREEDY))
    rank = ChainedRank(model)
    rank.begin(first_plan(GREEDY))
    assert not rank.results
    with pytest.raises(ProtocolError, match=problem):
        rank.begin(plan)
    assert list(rank.results[0].token_ids) == [token.token for token in expected.sampled]
    assert not rank.chain.is_open


class FailsOnce:
    """Draws as ever, but for one step."""

    def __init__(self, step: int) -> None:
        self._left = step

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        *,
        head_ranges: Sequence[UnitRange],
        exchange: Exchange,
        drawing: ShardDrawing,
    ) -> SampledRows:
        self._left -= 1
        if not self._left:
            raise ProtocolError("no token can be drawn")
        return sample_tokens(logits, rows, head_ranges=head_ranges, exchange=exchange, drawing=drawing)


def test_a_step_whose_draws_fail_ends_the_epoch_and_the_next_one_serves(model: Path) -> None:
    rank = ChainedRank(model, sample=FailsOnce(2))
    rank.begin(first_plan(GREEDY))
    rank.begin(second(decode_slots=[0]))
    with pytest.raises(ProtocolError, match="no token can be drawn"):
        rank.begin(ranks_pb2.StepPlan(step_id=3, decode_slots=[0]))
    assert [result.step_id for result in rank.results] == [1]
    rank.chain.drop()
    exchange = rank.runner._exchange
    assert exchange is not None
    rank.runner.attach(exchange)
    rank.runner.load(rank.load_request)
    rank.runner.allocate(40, 4)
    assert len(rank.runner.execute(first_plan(GREEDY)).sampled) == 1


# --- a step's inputs ------------------------------------------------------------------------------------


def inputs_with_stand_ins() -> tuple[DeviceInputs, SlotTable, torch.Tensor]:
    """Slots 0 to 2 decode, in rows 1, 2, 0; the tokens of slots 0 and 2 are the guesses in places 1 and 0."""
    slots, plan = slots_with(GREEDY, GREEDY, GREEDY), ranks_pb2.StepPlan(decode_slots=[0, 1, 2])
    slots.counts.num_computed[:3] = [3, 2, 4]
    slots.counts.num_tokens[:3] = [4, 3, 5]
    slots.last_tokens[:3] = [stand_in_of(1), 150, stand_in_of(0)]
    bounds = PlanBounds(
        max_num_seqs=6, max_num_batched_tokens=24, max_model_len=32, vocab_size=200, num_blocks=20, block_size=4
    )
    inputs = DeviceInputs(bounds, PseudoGpuPlatform(), Padding((1, 4)))
    return inputs, slots, inputs.fill(plan, slots).decoder_input.token_ids


def test_guesses_take_the_place_of_stand_ins_on_the_device() -> None:
    inputs, _, token_ids = inputs_with_stand_ins()
    assert token_ids.tolist() == [-1, -2, 150, 0]
    inputs.put_guesses(3, torch.tensor([70, 71]))
    assert token_ids.tolist() == [70, 71, 150, 0]


def test_what_guesses_should_have_been_takes_their_place_and_they_leave_no_trace() -> None:
    inputs, slots, token_ids = inputs_with_stand_ins()
    inputs.put_guesses(3, torch.tensor([70, 71]))
    inputs.correct(3, [70, 99])
    assert token_ids.tolist() == [70, 99, 150, 0]
    slots.last_tokens[:3] = [5, 6, 7]
    inputs.fill(ranks_pb2.StepPlan(decode_slots=[0, 1, 2]), slots)
    assert token_ids.tolist() == [7, 5, 6, 0]


# --- the slots' state -----------------------------------------------------------------------------------


def slots_with(*samplings: ranks_pb2.Sampling) -> SlotTable:
    slots = SlotTable(max_num_seqs=6, max_model_len=32, block_size=4)
    slots.apply(first_plan(*samplings))
    return slots


def test_expected_tokens_settle_to_what_appending_them_gives() -> None:
    expecting, appending = slots_with(GREEDY, PENALIZED, MIN_TOKENS), slots_with(GREEDY, PENALIZED, MIN_TOKENS)
    for tokens in ([7, 8, 9], [1, 8, 3]):
        expected = expecting.expect_tokens([0, 1, 2], [-1, -2, -3])
        assert expecting.last_tokens[:3].tolist() == [-1, -2, -3]
        expecting.settle_tokens(expected, tokens)
        appending.append_tokens(torch.arange(3).numpy(), tokens)
    for name in ("num_tokens", "num_computed"):
        assert getattr(expecting.counts, name).tolist() == getattr(appending.counts, name).tolist()
    assert expecting.last_tokens.tolist() == appending.last_tokens.tolist()
    assert expecting.token_ids.tolist() == appending.token_ids.tolist()
    for slot in range(3):
        ours, theirs = expecting.sampling(slot).draw(), appending.sampling(slot).draw()
        assert ours.position == theirs.position
        assert (ours.edits is None) == (theirs.edits is None)
    edits = expecting.sampling(1).draw().edits
    assert edits is not None
    assert edits.penalties is not None
    assert (edits.penalties.counts.ids.tolist(), edits.penalties.counts.counts.tolist()) == ([8], [2.0])


def test_a_token_for_a_slot_that_was_released_or_bound_anew_is_nobodys() -> None:
    slots = slots_with(GREEDY, GREEDY, GREEDY)
    expected = slots.expect_tokens([0, 1, 2], [-1, -2, -3])
    slots.apply(second(released_slots=[0, 1], new_sequences=[bound_to(1)]))
    slots.settle_tokens(expected, [7, 8, 9])
    assert slots.counts.num_tokens[:3].tolist() == [0, 2, 4]
    assert slots.last_tokens[:3].tolist() == [-1, 2, 9]
    assert slots.token_ids[1, :4].tolist() == [1, 2, 5, 0]
    assert slots.token_ids[2, :4].tolist() == [5, 4, 5, 9]
