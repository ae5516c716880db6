"""A step that begins while the one before is running changes no token, whichever plan follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from hetero_worker.memory.streams import HOST
from hetero_worker.runners.graphs.device_inputs import DeviceInputs
from hetero_worker.runners.graphs.padding import Padding
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.running_step import RunningStep
from hetero_worker.runners.slots import SlotTable, pending_token
from hetero_worker.sampling import device_edits
from hetero_worker.sampling.base import ShardSampler, StartedDraws
from hetero_worker.sampling.request import SamplingRow
from tests.support.async_serving import Asked, AsyncRank, random_requests
from tests.support.pseudo_gpu import PlayedStreams
from tests.support.rank_group import GREEDY
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import VOCAB_SIZE, save_tiny

pytestmark = pytest.mark.unit

PENALIZED = ranks_pb2.Sampling(top_p=1, presence_penalty=0.5)
BIASED = ranks_pb2.Sampling(top_p=1, bias_token_ids=[4], biases=[1.0])
MIN_TOKENS = ranks_pb2.Sampling(top_p=1, min_tokens=9, end_token_ids=[2])
SAMPLED = ranks_pb2.Sampling(top_p=1, temperature=1.5, seed=7)
NUCLEUS = ranks_pb2.Sampling(top_p=0.9, temperature=1.5, seed=7, top_k=100, min_p=0.01)
ATTRACTED = ranks_pb2.Sampling(top_p=1, frequency_penalty=-20.0)
"""Draws its first token again and again."""
SATED = ranks_pb2.Sampling(top_p=1, frequency_penalty=10.0, bias_token_ids=[4], biases=[25.0])
"""Draws token 4 three times."""


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


def overlapped_share(rank: AsyncRank) -> float:
    summary = rank.runner._times.summary()
    assert summary is not None
    return summary.overlapped_share


@pytest.mark.parametrize(("seed", "graphs"), [(1, False), (2, True), (3, True)])
def test_tokens_are_those_of_steps_one_by_one(model: Path, seed: int, graphs: bool) -> None:
    """Arrivals and ends, chunked prompts, common prefixes, preemption, every kind of draw."""
    asked = random_requests(seed, 14, vocabulary=VOCAB_SIZE)
    expected = AsyncRank(model, async_steps=False).serve(asked)
    rank = AsyncRank(model, make_graphs=TapeBackend if graphs else None)
    assert rank.serve(asked) == expected
    assert overlapped_share(rank) > 0.2


def test_too_small_a_cache_preempts_and_changes_no_token(model: Path) -> None:
    asked = [greedy(f"{i}", 9 + i, max_tokens=20) for i in range(5)]
    expected = AsyncRank(model, async_steps=False).serve(asked)
    rank = AsyncRank(model, num_blocks=16)
    assert rank.serve(asked) == expected
    assert overlapped_share(rank) > 0.3


def test_each_step_begins_before_the_one_before_is_answered(model: Path) -> None:
    rank = AsyncRank(model)
    rank.serve([greedy("a", 5, max_tokens=6)])
    expected = ["begin 1"]
    for number in range(2, 7):
        expected += [f"begin {number}", f"answer {number - 1}"]
    assert rank.said[: len(expected)] == expected
    assert rank.said[len(expected) :] == ["answer 6", "begin 7", "answer 7"]  # which only releases
    assert overlapped_share(rank) == 1.0


@pytest.mark.parametrize(("steps_ahead", "async_steps"), [(1, True), (2, False)])
def test_steps_go_one_by_one_without_overlap_or_when_they_are_synchronous(
    model: Path, steps_ahead: int, async_steps: bool
) -> None:
    rank = AsyncRank(model, async_steps=async_steps)
    rank.serve([greedy("a", 5, max_tokens=6)], steps_ahead=steps_ahead)
    answers = [said for said in rank.said if said.startswith("answer")]
    assert answers == [f"answer {number}" for number in range(1, 8)]
    assert overlapped_share(rank) == 0.0
    assert f"steps={'async' if async_steps else 'synchronous (turned off)'}" in rank.report.kernels


@pytest.mark.parametrize(
    "kind", [GREEDY, PENALIZED, BIASED, MIN_TOKENS, SAMPLED, NUCLEUS], ids=lambda kind: str(kind)[:40]
)
def test_tokens_on_the_device_are_the_next_steps_input(model: Path, kind: ranks_pb2.Sampling) -> None:
    """Five steps of every kind of draw, each begun with the last one's tokens on the device."""
    alone, overlapped = AsyncRank(model, async_steps=False), AsyncRank(model)
    for rank in (alone, overlapped):
        rank.begin(first_plan(kind, GREEDY))
        for number in range(2, 7):
            rank.begin(ranks_pb2.StepPlan(step_id=number, decode_slots=[0, 1]))
        rank.steps.finish()
    assert [r.token_ids for r in overlapped.results] == [r.token_ids for r in alone.results]
    assert overlapped_share(overlapped) == 1.0


def _puts_tokens_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    stale: list[torch.Tensor] = []

    def mutant(self: DeviceInputs, num_decode: int, token_ids: torch.Tensor) -> None:
        stale.append(token_ids.clone())
        put(self, num_decode, stale[max(0, len(stale) - 2)])

    put = DeviceInputs.put_tokens
    patch.setattr(DeviceInputs, "put_tokens", mutant)


def _mixes_up_the_draws(patch: pytest.MonkeyPatch) -> None:
    put = DeviceInputs.put_tokens
    patch.setattr(DeviceInputs, "put_tokens", lambda self, n, token_ids: put(self, n, token_ids.flip(0)))


def _forgets_tokens_that_only_the_device_knows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningStep, "_unknown_tokens", lambda self, draw_slots, rows: None)


def _counts_an_unknown_token_as_new(patch: pytest.MonkeyPatch) -> None:
    """As if the sequence had never had this token."""

    def mutant(logits: Any, penalties: Any, unknown: Any, entries: Any) -> Any:
        extended = with_unknown(logits, penalties, unknown, entries)
        assert extended is not None
        extended.numbers[0, len(entries.places) if entries is not None else 0 :] = 1.0
        extended.numbers[0].clamp_(max=1.0)
        return extended

    with_unknown = device_edits._with_unknown
    patch.setattr(device_edits, "_with_unknown", mutant)


@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (_puts_tokens_of_the_step_before, GREEDY),
        (_mixes_up_the_draws, GREEDY),
        (_forgets_tokens_that_only_the_device_knows, ATTRACTED),
        (_counts_an_unknown_token_as_new, SATED),
    ],
)
def test_a_mutant_of_overlapping_steps_is_caught(
    model: Path, mutate: Callable[[pytest.MonkeyPatch], None], kind: ranks_pb2.Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(rank: AsyncRank) -> list[list[int]]:
        rank.begin(first_plan(kind, SAMPLED))
        for number in range(2, 7):
            rank.begin(ranks_pb2.StepPlan(step_id=number, decode_slots=[0, 1]))
        rank.steps.finish()
        return [list(result.token_ids) for result in rank.results]

    expected = tokens(AsyncRank(model, async_steps=False))
    assert tokens(AsyncRank(model)) == expected
    mutate(monkeypatch)
    assert tokens(AsyncRank(model)) != expected


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


def begun(model: Path, *samplings: ranks_pb2.Sampling) -> RunningStep:
    step = AsyncRank(model).runner.begin(first_plan(*samplings))
    assert isinstance(step, RunningStep)
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
    "penalties": (second(decode_slots=[0]), (PENALIZED,), True),
    "penalties in a slot that rests": (second(decode_slots=[0]), (GREEDY, PENALIZED), True),
    "min_tokens in a slot that rests": (second(decode_slots=[0]), (GREEDY, MIN_TOKENS), True),
    "a draw with bias": (second(decode_slots=[0, 1]), (GREEDY, BIASED), True),
    "a slot is released": (second(decode_slots=[0], released_slots=[1]), (GREEDY, BIASED), True),
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
    "hidden states of a prompt": (
        second(
            new_sequences=[bound_to(3, sampling=ranks_pb2.Sampling(pooling=ranks_pb2.POOLING_LAST))],
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
    rank = AsyncRank(model)
    step = rank.runner.begin(first_plan(GREEDY))
    with pytest.raises(RuntimeError, match="step plan 2 begins before the step that it cannot follow"):
        rank.runner.begin(second(released_slots=[0]))
    assert len(step.finish().sampled) == 1
    assert rank.runner.execute(second(released_slots=[0])).sampled == ()


def test_no_third_step_begins_while_two_are_under_way(model: Path) -> None:
    rank = AsyncRank(model)
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
    expected = AsyncRank(model).runner.execute(first_plan(GREEDY))
    rank = AsyncRank(model)
    rank.begin(first_plan(GREEDY))
    assert not rank.results
    with pytest.raises(ProtocolError, match=problem):
        rank.begin(plan)
    assert list(rank.results[0].token_ids) == [token.token for token in expected.sampled]
    assert not rank.steps.is_open


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
        sampler: ShardSampler,
        started: StartedDraws | None,
    ) -> SampledRows:
        self._left -= 1
        if not self._left:
            raise ProtocolError("no token can be drawn")
        return sample_tokens(logits, rows, head_ranges=head_ranges, exchange=exchange, sampler=sampler, started=started)


def test_a_step_whose_draws_fail_ends_the_epoch_and_the_next_one_serves(model: Path) -> None:
    rank = AsyncRank(model, sample=FailsOnce(2))
    rank.begin(first_plan(GREEDY))
    rank.begin(second(decode_slots=[0]))
    with pytest.raises(ProtocolError, match="no token can be drawn"):
        rank.begin(ranks_pb2.StepPlan(step_id=3, decode_slots=[0]))
    assert [result.step_id for result in rank.results] == [1]
    rank.steps.drop()
    exchange = rank.runner._exchange
    assert exchange is not None
    rank.runner.attach(exchange)
    rank.runner.load(rank.load_request)
    rank.runner.allocate(40, 4)
    assert len(rank.runner.execute(first_plan(GREEDY)).sampled) == 1


# --- a step's inputs ------------------------------------------------------------------------------------


def test_tokens_take_the_place_of_pending_ones_on_the_device() -> None:
    """Slots 0 to 2 decode, in rows 1, 2, 0; the tokens of slots 0 and 2 are draws 1 and 0 of the running step."""
    slots, plan = slots_with(GREEDY, GREEDY, GREEDY), ranks_pb2.StepPlan(decode_slots=[0, 1, 2])
    slots.counts.num_computed[:3] = [3, 2, 4]
    slots.counts.num_tokens[:3] = [4, 3, 5]
    slots.last_tokens[:3] = [pending_token(1), 150, pending_token(0)]
    bounds = PlanBounds(
        max_num_seqs=6, max_num_batched_tokens=24, max_model_len=32, vocab_size=200, num_blocks=20, block_size=4
    )
    inputs = DeviceInputs(bounds, Padding((1, 4)), device=HOST, streams=PlayedStreams(), pins_memory=False)
    token_ids = inputs.fill(plan, slots).decoder_input.token_ids
    assert token_ids.tolist() == [-1, -2, 150, 0]
    inputs.put_tokens(3, torch.tensor([70, 71]))
    assert token_ids.tolist() == [70, 71, 150, 0]


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
