"""What the CPU runner refuses, and that a refusal changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hetero_api.errors import ModelError, PlanError
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.errors import ExchangeAborted, MemoryBudgetError, ProtocolError
from hetero_worker.runners.base import LoadRequest, Runner, WorkProgress
from hetero_worker.runners.plan_runner import PlanRunner
from tests.support.rank_group import GREEDY, PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

ONE_RANK = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))
TWO_RANKS = Shares(kv_heads=((8, 0),), mlp_columns=((20, 30),), vocab_rows=(200, 0))
Plan = ranks_pb2.StepPlan


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def group(checkpoint: TinyCheckpoint) -> RankGroup:
    """Slot 0 holds 5 computed tokens and one drawn one in two blocks of 4; step 1 is done."""
    group = RankGroup(checkpoint.directory, ONE_RANK, num_blocks=16, max_num_batched_tokens=40)
    group.run(_begin(step_id=1))
    return group


def _begin(*, step_id: int, slot: int = 0) -> Plan:
    return Plan(
        step_id=step_id,
        new_sequences=[_new(slot=slot)],
        block_slots=[slot, slot],
        block_ids=[3, 9],
        spans=[_span(slot=slot, num_tokens=5, sample=True)],
    )


def _new(**fields: Any) -> ranks_pb2.NewSequence:
    defaults: dict[str, Any] = {"slot": 1, "token_ids": [1, 2, 3, 4, 5], "sampling": GREEDY, "num_prompt_tokens": 1}
    return ranks_pb2.NewSequence(**{**defaults, **fields})


def _span(**fields: Any) -> ranks_pb2.ScheduledSpan:
    return ranks_pb2.ScheduledSpan(**fields)


def _decode(step_id: int) -> Plan:
    return Plan(step_id=step_id, decode_slots=[0])


def _with(**fields: Any) -> Plan:
    """Step 2, beside sequence 0."""
    return Plan(step_id=2, **fields)


def _chunk(num_tokens: int, *blocks: int, sample: bool = False, **new: Any) -> Plan:
    """Step 2: slot 1 is bound and computes so many tokens."""
    return _with(
        new_sequences=[_new(**new)],
        block_slots=[1] * len(blocks),
        block_ids=blocks,
        spans=[_span(slot=1, num_tokens=num_tokens, sample=sample)],
    )


BIASED = ranks_pb2.Sampling(bias_token_ids=[1, 2], biases=[0.5])
RESET = ranks_pb2.GroupCommand(reset_cache=ranks_pb2.AllocateCache(num_blocks=8, block_size=4))

BAD_PLANS: dict[str, tuple[Plan, str]] = {
    "step repeated": (_decode(1), "expected step 2"),
    "step skipped": (_decode(3), "expected step 2"),
    "release of a free slot": (_with(released_slots=[4]), "slot 4"),
    "release beyond the slots": (_with(released_slots=[99]), "slot 99"),
    "release twice": (_with(released_slots=[0, 0]), "slot 0, which is not in use"),
    "bind of a slot in use": (_with(new_sequences=[_new(slot=0)]), "slot 0, which is in use"),
    "bind twice": (_with(new_sequences=[_new(), _new()]), "slot 1, which is in use"),
    "bind beyond the slots": (_with(new_sequences=[_new(slot=8)]), "slot 8"),
    "no tokens": (_with(new_sequences=[ranks_pb2.NewSequence(slot=1)]), "0 tokens"),
    "too many tokens": (_with(new_sequences=[_new(token_ids=[1] * 130)]), "1 to 128"),
    "no prompt": (_with(new_sequences=[_new(num_prompt_tokens=0)]), "of which 0 are the prompt's"),
    "a prompt longer than the tokens": (_with(new_sequences=[_new(num_prompt_tokens=6)]), "of which 6"),
    "token beyond the vocabulary": (_with(new_sequences=[_new(token_ids=[200])]), "vocabulary"),
    "bias beyond the vocabulary": (
        _with(new_sequences=[_new(sampling=ranks_pb2.Sampling(bias_token_ids=[200], biases=[1.0]))]),
        "a bias_token_id beyond",
    ),
    "end token beyond the vocabulary": (
        _with(new_sequences=[_new(sampling=ranks_pb2.Sampling(min_tokens=1, end_token_ids=[200]))]),
        "an end_token_id beyond",
    ),
    "fewer biases than tokens": (_with(new_sequences=[_new(sampling=BIASED)]), "1 biases for 2"),
    "nothing left to compute": (
        _with(new_sequences=[_new(num_computed_tokens=5, block_ids=[1, 2])]),
        "one must be left",
    ),
    "computed tokens without blocks": (_with(new_sequences=[_new(num_computed_tokens=4)]), "0 blocks of 4"),
    "null block": (_with(new_sequences=[_new(block_ids=[0])]), "outside [1, 16)"),
    "block beyond the pool": (_with(new_sequences=[_new(block_ids=[16])]), "outside [1, 16)"),
    "null block appended": (_with(block_slots=[0], block_ids=[0]), "outside [1, 16)"),
    "block beyond the pool appended": (_with(block_slots=[0], block_ids=[16]), "outside [1, 16)"),
    "block for a free slot": (_with(block_slots=[6], block_ids=[1]), "slot 6, which is not in use"),
    "block for a slot beyond": (_with(block_slots=[99], block_ids=[1]), "slot 99, which is not in use"),
    "block for a released slot": (
        _with(released_slots=[0], block_slots=[0], block_ids=[1]),
        "slot 0, which is not in use",
    ),
    "more slots than blocks": (_with(block_slots=[0, 0], block_ids=[1]), "2 block_slots for 1"),
    "more blocks than a sequence can fill": (_with(new_sequences=[_new(block_ids=[1] * 33)]), "at most 32"),
    "more blocks appended than a sequence can fill": (
        _with(block_slots=[0] * 31, block_ids=[1] * 31),
        "33 blocks, at most 32",
    ),
    "decoding in a free slot": (_with(decode_slots=[5]), "slot 5, which is not in use"),
    "decoding beyond the slots": (_with(decode_slots=[8]), "beyond the 8"),
    "decoding in a released slot": (_with(released_slots=[0], decode_slots=[0]), "slot 0, which is not in use"),
    "decoding with two tokens left": (
        _with(new_sequences=[_new(token_ids=[1, 2])], block_slots=[1], block_ids=[4], decode_slots=[0, 1]),
        "slot 1 reaches 1 of 2 tokens",
    ),
    "decoding without a block": (
        _with(new_sequences=[_new(token_ids=[1])], decode_slots=[0, 1]),
        "slot 1 has 0 blocks",
    ),
    "decoding twice": (_with(decode_slots=[0, 0]), "slot twice"),
    "decoding and a span": (_with(decode_slots=[0], spans=[_span(slot=0, num_tokens=1, sample=True)]), "slot twice"),
    "span of a free slot": (_with(spans=[_span(slot=5, num_tokens=1, sample=True)]), "slot 5, which is not in use"),
    "span beyond the slots": (_with(spans=[_span(slot=99, num_tokens=1)]), "slot 99, which is not in use"),
    "span twice": (_with(spans=[_span(slot=0, num_tokens=1, sample=True)] * 2), "slot twice"),
    "zero tokens": (_with(spans=[_span(slot=0, num_tokens=0, sample=True)]), "computes 0"),
    "more tokens than known": (_with(spans=[_span(slot=0, num_tokens=2, sample=True)]), "computes 2 tokens of slot 0"),
    "no sample at the last token": (_with(spans=[_span(slot=0, num_tokens=1, sample=False)]), "sample is False"),
    "sample before the last token": (_chunk(2, 4, sample=True), "sample is True"),
    "too few blocks": (_chunk(5, 4, sample=True), "1 blocks of 4 for 5 tokens"),
    "budget exceeded": (_chunk(41, *range(1, 12), token_ids=[1] * 42), "at most 40"),
    "mask for a slot that does not sample": (
        _with(decode_slots=[0], masked_slots=[1]),
        "slot 1, which does not sample",
    ),
    "mask for a slot beyond": (_with(decode_slots=[0], masked_slots=[99]), "slot 99, which does not sample"),
    "mask twice": (_with(decode_slots=[0], masked_slots=[0, 0]), "slot 0, twice"),
    "unknown command": (_with(command=ranks_pb2.GroupCommand()), "does not know"),
    "command beside computing": (_with(command=RESET, decode_slots=[0]), "computes beside its command reset_cache"),
    "command while a slot is in use": (_with(command=RESET), "1 slots are in use"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(group: RankGroup, case: str) -> None:
    plan, words = BAD_PLANS[case]
    with pytest.raises(ProtocolError) as caught:
        group.runners[0].execute(plan)
    assert words in str(caught.value)
    assert f"step plan {plan.step_id}" in str(caught.value)
    assert [slot for slot, _ in group.run(_decode(2)).sampled] == [0]


def test_slot_released_and_bound_in_one_plan_is_the_new_sequence(group: RankGroup) -> None:
    plan = _begin(step_id=2)
    plan.released_slots.append(0)
    assert len(group.run(plan).sampled) == 1


def test_a_span_may_have_one_token(checkpoint: TinyCheckpoint) -> None:
    as_span, as_decode = (RankGroup(checkpoint.directory, ONE_RANK, num_blocks=16) for _ in range(2))
    for group in (as_span, as_decode):
        group.run(_begin(step_id=1))
    span = as_span.run(_with(spans=[_span(slot=0, num_tokens=1, sample=True)]))
    decode = as_decode.run(_decode(2))
    assert (span.logits - decode.logits).abs().max() <= 1e-5


def test_a_plan_without_sequences_is_a_step(group: RankGroup) -> None:
    assert group.run(Plan(step_id=2, released_slots=[0])).sampled == []
    assert len(group.run(_begin(step_id=3)).sampled) == 1


def test_orders_out_of_turn_are_refused(checkpoint: TinyCheckpoint) -> None:
    runner: Runner = PlanRunner(cpu_backend())
    with pytest.raises(ProtocolError, match="LoadModel"):
        runner.allocate(8, 4)
    with pytest.raises(ProtocolError, match="AllocateCache"):
        runner.execute(_begin(step_id=1))


def test_a_load_counts_the_bytes_that_it_read(group: RankGroup) -> None:
    seen: list[tuple[int, int]] = []

    class Seen(WorkProgress):
        """Progress that notes each step of it."""

        def _advance(self, amount: int) -> None:
            super()._advance(amount)
            now = self.message()
            assert now is not None
            assert (now.work, now.unit) == ("reading weights", "B")
            seen.append((now.done, now.total))

    progress = Seen()
    runner = PlanRunner(cpu_backend(), progress=progress)
    runner.attach(LocalExchange())
    loaded = runner.load(group.requests[0])
    layers = group.requests[0].config.num_layers
    assert len(seen) >= layers
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][1] == loaded.weight_bytes
    assert seen[-1][0] > 0.9 * loaded.weight_bytes
    assert progress.message() is None


def test_a_new_epoch_needs_a_new_cache_and_counts_steps_anew(group: RankGroup) -> None:
    runner = group.runners[0]
    runner.attach(LocalExchange())
    with pytest.raises(ProtocolError, match="AllocateCache"):
        runner.execute(_decode(2))
    assert runner.load(group.requests[0]).load_s == 0
    runner.allocate(16, 4)
    with pytest.raises(ProtocolError, match="slot 0"):
        runner.execute(_decode(1))
    assert len(runner.execute(_begin(step_id=1)).sampled) == 1


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 32}, True),
        ({"memory_bytes": 3 << 30}, True),
        ({"max_model_len": 64}, True),
        ({"dtype": "bfloat16"}, False),
    ],
    ids=["bounds", "memory", "shorter sequences", "dtype"],
)
def test_weights_are_kept_for_a_load_that_needs_the_same_and_read_for_any_other(
    changes: dict[str, Any], is_kept: bool, group: RankGroup
) -> None:
    runner = group.runners[0]
    runner.attach(LocalExchange())
    report = runner.load(dataclasses.replace(group.requests[0], **changes))
    assert (report.load_s == 0) is is_kept


def test_another_shard_is_another_load(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    assert group.runners[0].load(group.requests[1]).load_s > 0


def test_longer_sequences_than_the_weights_were_loaded_for_load_anew(group: RankGroup) -> None:
    runner = group.runners[0]
    shorter = dataclasses.replace(group.requests[0], dtype="bfloat16", max_model_len=64)
    runner.load(shorter)
    assert runner.load(dataclasses.replace(shorter, max_model_len=65)).load_s > 0


def test_allocate_reports_the_caches_bytes_and_keeps_to_the_budget(group: RankGroup) -> None:
    runner, report = group.runners[0], group.reports[0]
    assert report.kv_bytes_per_token == 3 * 2 * 8 * 8 * 4
    assert runner.allocate(10, 4) == 40 * report.kv_bytes_per_token
    too_many = report.kv_budget_bytes // (4 * report.kv_bytes_per_token) + 1
    with pytest.raises(MemoryBudgetError, match="fewer blocks"):
        runner.allocate(too_many, 4)


def test_a_rank_without_heads_allocates_nothing(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    assert (group.reports[1].kv_bytes_per_token, group.reports[1].kv_budget_bytes) == (0, 0)
    assert group.runners[1].allocate(8, 4) == 0


def test_reported_weights_are_the_shards(checkpoint: TinyCheckpoint) -> None:
    reports = RankGroup(checkpoint.directory, TWO_RANKS).reports
    whole = RankGroup(checkpoint.directory, ONE_RANK).reports[0]
    norms_and_tables = 3 * 32 * 4 + 2 * 128 * 8 * 4  # MLP norms on both ranks, rotary tables on both
    assert sum(report.weight_bytes for report in reports) == whole.weight_bytes + norms_and_tables
    assert all(report.kernels[0].startswith("linear=") for report in reports)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda r: dataclasses.replace(r, memory_bytes=1 << 20), MemoryBudgetError, "given"),
        (lambda r: dataclasses.replace(r, rank=1), PlanError, "rank 1 is not in a plan for 1"),
        (lambda r: dataclasses.replace(r, dtype="float16"), ModelError, "float32, bfloat16"),
        (lambda r: dataclasses.replace(r, max_model_len=10_000), ModelError, "128 positions"),
        (
            lambda r: dataclasses.replace(
                r, shard_plan=dataclasses.replace(r.shard_plan, ranks=r.shard_plan.ranks * 2)
            ),
            PlanError,
            "rank 1",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_reading(
    group: RankGroup, change: Callable[[LoadRequest], LoadRequest], error: type[Exception], words: str
) -> None:
    request = change(dataclasses.replace(group.requests[0], directory=group.requests[0].directory / "unread"))
    with pytest.raises(error, match=words):
        group.runners[0].load(request)


def test_an_aborted_step_ends_and_the_next_epoch_serves(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, TWO_RANKS)
    group.exchanges[1].abort()
    with pytest.raises(ExchangeAborted):
        group.runners[0].execute(_begin(step_id=1))
    group.start()
    builder = PlanBuilder(group)
    builder.start(0, [5, 6, 7])
    builder.schedule(0)
    assert len(builder.run().sampled) == 1
