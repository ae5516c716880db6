"""Tokens that were proposed to ranks change no token, whichever of them are right, and whoever computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import EngineConfig, SpeculationConfig
from hetero_gateway.engine.request import Completion, GenerationRequest
from hetero_gateway.engine.scheduler import Scheduler
from hetero_gateway.engine.speculation.speculator import Speculator
from hetero_gateway.engine.step import CompletionUpdate
from hetero_gateway.engine.steps_in_flight import StepsInFlight
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.errors import ProtocolError
from hetero_worker.runners import running_step
from hetero_worker.runners.draft import DraftedBlocks, DraftModel
from hetero_worker.runners.input_batch import InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, PlanCheck
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.shard import budget_of
from hetero_worker.runners.slots import SlotCounts, SlotTable
from hetero_worker.sampling.request import SequenceSampling
from tests.support.async_serving import BLOCK_SIZE, MAX_TOKENS, Asked, AsyncRank, random_requests
from tests.support.draft_models import without_layers
from tests.support.examples import examples
from tests.support.rank_group import GREEDY, PlanBuilder, RankGroup, Shares
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import VOCAB_SIZE, save_tiny
from tests.unit.engine.engine_setup import has_requests
from tests.unit.engine.oracle import OracleProposer

pytestmark = pytest.mark.unit

ONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
TWO = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
THREE = Shares(kv_heads=((4, 2, 2),), mlp_columns=((17, 16, 17),), vocab_rows=(64, 0, 136), experts=((1, 2, 3),))
STAGES = Shares(
    kv_heads=((8, 0), (0, 8)), mlp_columns=((50, 0), (0, 50)), vocab_rows=(192, 8), experts=((6, 0), (0, 6))
)
MAX_SEQS = 8
Told = Mapping[str, Sequence[tuple[int, bytes]]]
"""Tokens by completion, each with its log-probabilities as bytes."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3")).directory


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of three keep states of sequences."""
    return save_tiny("qwen3-next", tmp_path_factory.mktemp("qwen3-next")).directory


@pytest.fixture(scope="module")
def smaller(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its last layer."""
    return without_layers(qwen3, tmp_path_factory.mktemp("smaller"), number=1)


def name_of(completion: Completion) -> str:
    return f"{completion.request.request_id}/{completion.index}"


def speculator_of(known: Told, *, rate: float) -> Speculator:
    """Proposes what `known` says, each token right with the chance `rate`."""

    def answer(completion: Completion, count: int) -> Sequence[int]:
        return [token for token, _ in known[name_of(completion)][:count]]

    proposer = OracleProposer(answer, rate=rate, vocab_size=VOCAB_SIZE)
    return Speculator(SpeculationConfig(max_tokens=5), proposer)


def serve(
    group: RankGroup, asked: Sequence[Asked], speculator: Speculator | None = None
) -> tuple[Told, ranks_pb2.StepResult]:
    """All requests' tokens, and in `step_id` the number of steps, in `token_ids` proposed and accepted ones."""
    group.start()
    config = EngineConfig(
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        block_size=BLOCK_SIZE,
        max_model_len=128,
        max_queued_requests=1000,
        enable_prefix_caching=True,
        eos_token_ids=frozenset({2}),
        vocab_size=VOCAB_SIZE,
        keeps_states=group.requests[0].config.delta is not None,
        speculation=SpeculationConfig(max_tokens=6) if speculator is not None else None,
    )
    scheduler = Scheduler(
        config,
        num_blocks=group.num_blocks,
        num_snapshots=group.num_snapshots,
        speculator=speculator or Speculator(None),
    )
    told: dict[str, list[tuple[int, bytes]]] = {}
    in_flight, waiting = StepsInFlight(), sorted(asked, key=lambda each: each.turn)
    for turn in range(10_000):
        while waiting and (waiting[0].turn <= turn or not has_requests(scheduler)):
            scheduler.add(waiting.pop(0).request, now=0.0)
        step = scheduler.schedule(0.0, in_flight=in_flight)
        if step is None and not in_flight:
            break
        if step is not None:
            in_flight.submit(step)
            in_flight.answer(result_of(group, step.plan))
            continue
        taken = in_flight.take()
        assert taken is not None
        assert taken.result is not None
        for update in scheduler.apply(taken.step, taken.result).updates:
            told.setdefault(name_of(update.completion), []).append(told_of(update))
    stats = scheduler.stats()
    assert not has_requests(scheduler)
    return told, ranks_pb2.StepResult(step_id=stats.steps, token_ids=[stats.proposed_tokens, stats.accepted_tokens])


def told_of(update: CompletionUpdate) -> tuple[int, bytes]:
    return update.token_id, b"" if update.logprobs is None else update.logprobs.SerializeToString(deterministic=True)


def result_of(group: RankGroup, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepResult:
    outcome = group.run(plan)
    return ranks_pb2.StepResult(
        step_id=plan.step_id,
        slots=[token.slot for token in outcome.sampled],
        token_ids=[token.token for token in outcome.sampled],
        logprobs=outcome.outputs[0].logprobs,
        prompt_logprobs=outcome.outputs[0].prompt_logprobs,
        drafts=outcome.outputs[0].drafts,
    )


LAYOUTS: Mapping[str, tuple[Shares, Mapping[str, Any]]] = {
    "one": (ONE, {}),
    "two": (TWO, {}),
    "three": (THREE, {}),
    "stages": (STAGES, {}),
    "bfloat16": (TWO, {"dtype": "bfloat16"}),
    "torch": (ONE, {"native": False, "batch_invariant": True}),
    "GPU and CPU": (TWO, {"num_gpu_ranks": 1, "make_graphs": TapeBackend, "batch_invariant": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_without_proposals(qwen3: Path, layout: str) -> None:
    """Every kind of draw, common prefixes, chunked prompts, preemption, several completions of a prompt."""
    assert_same_tokens_in_fewer_steps(qwen3, LAYOUTS[layout], seed=3, rate=0.8)


def assert_same_tokens_in_fewer_steps(
    model: Path, layout: tuple[Shares, Mapping[str, Any]], *, seed: int, rate: float
) -> None:
    """With proposals, each token of which is right with the chance `rate`."""
    shares, options = layout
    group = RankGroup(model, shares, keeps_logits=False, num_blocks=40, **options)
    asked = random_requests(seed, 14, vocabulary=VOCAB_SIZE)
    expected, plain = serve(group, asked)
    told, proposing = serve(group, asked, speculator_of(expected, rate=rate))
    assert told == expected
    proposed, accepted = proposing.token_ids
    assert 0 < accepted < proposed
    assert proposing.step_id < plain.step_id


STATEFUL: Mapping[str, tuple[Shares, Mapping[str, Any]]] = {
    name: (shares, {**options, "num_snapshots": 12}) for name, (shares, options) in LAYOUTS.items() if name != "torch"
} | {"token by token": (ONE, {"native": False, "num_snapshots": 12, "batch_invariant": True})}


@pytest.mark.parametrize("layout", STATEFUL)
def test_states_go_back_behind_a_token_that_was_wrong(qwen3_next: Path, layout: str) -> None:
    """Snapshots are short, so proposals are, too; prefixes begin from those that are left."""
    assert_same_tokens_in_fewer_steps(qwen3_next, STATEFUL[layout], seed=5, rate=0.6)


MANY = {
    "one": 200, "two": 200, "three": 200, "stages": 200, "GPU and CPU": 100, "bfloat16": 20, "torch": 20
}  # fmt: skip
"""Prompts on each layout; as much more or less with other profiles of Hypothesis."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.6], ids=["greedy", "seeded"])
def test_many_prompts(qwen3: Path, smaller: Path, layout: str, temperature: float) -> None:
    """Prompts that repeat themselves, and a small model that does so too, with n-grams and with a draft model."""
    shares, options = LAYOUTS[layout]
    group = RankGroup(qwen3, shares, keeps_logits=False, **options)
    asked = [repeating(number, temperature=temperature) for number in range(examples(MANY[layout]))]
    expected, _ = serve(group, asked)
    told, proposing = serve(group, asked, Speculator(SpeculationConfig(max_tokens=6)))
    assert told == expected
    assert proposing.token_ids[1] > 0
    serve_drafting(RankGroup(qwen3, shares, keeps_logits=False, draft=smaller, **options), asked, expected)


def repeating(number: int, *, temperature: float) -> Asked:
    """A phrase of so many tokens, twice and a half."""
    phrase = [3 + (number * 31 + 7 * i * i) % 190 for i in range(3 + number % 9)]
    request = GenerationRequest(
        request_id=f"{number}",
        prompt_token_ids=tuple((phrase * 3)[: 5 * len(phrase) // 2]),
        sampling=ranks_pb2.Sampling(temperature=temperature, top_p=0.9, seed=number),
        max_tokens=12 + number % 7,
        ignore_eos=True,
    )
    return Asked(request, turn=4 * number)


DRAFTING = SpeculationConfig(max_tokens=5, drafts=True)


@pytest.mark.parametrize("layout", ["one", "two", "GPU and CPU"])
def test_prompts_with_a_draft_model(qwen3: Path, smaller: Path, layout: str) -> None:
    prompts_with_drafts(20, qwen3, LAYOUTS[layout], 0.6, draft=smaller)


def prompts_with_drafts(
    number: int, model: Path, layout: tuple[Shares, Mapping[str, Any]], temperature: float, **drafting: Any
) -> tuple[int, int]:
    """Serve prompts without drafts and with them, to the same tokens; the number of steps of each."""
    shares, options = layout
    asked = [repeating(number, temperature=temperature) for number in range(number)]
    expected, plain = serve(RankGroup(model, shares, keeps_logits=False, **options), asked)
    group = RankGroup(model, shares, keeps_logits=False, **drafting, **options)
    return plain.step_id, serve_drafting(group, asked, expected)


def serve_drafting(group: RankGroup, asked: Sequence[Asked], expected: Told) -> int:
    """Serve prompts with drafts to the tokens that are expected; the number of steps."""
    told, proposing = serve(group, asked, Speculator(DRAFTING))
    assert told == expected
    proposed, accepted = proposing.token_ids
    assert 0 < accepted < proposed
    return proposing.step_id


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_model_serves_every_kind_of_draw(qwen3: Path, smaller: Path, layout: str) -> None:
    every_kind_of_draw(qwen3, LAYOUTS[layout], draft=smaller)


def every_kind_of_draw(model: Path, layout: tuple[Shares, Mapping[str, Any]], **drafting: Any) -> None:
    """Common prefixes, prompts in chunks, preemption, several completions of a prompt, penalties, biases."""
    shares, options = layout
    asked = random_requests(3, 14, vocabulary=VOCAB_SIZE)
    expected, _ = serve(RankGroup(model, shares, keeps_logits=False, num_blocks=40, **options), asked)
    group = RankGroup(model, shares, keeps_logits=False, num_blocks=40, **drafting, **options)
    told, proposing = serve(group, asked, Speculator(DRAFTING))
    assert told == expected
    assert proposing.token_ids[1] > 0
    again, _ = serve(group, asked, Speculator(DRAFTING))
    assert again == expected


ON_RANK_1 = Shares(kv_heads=((0, 8),), mlp_columns=((0, 50),), vocab_rows=(0, 200), experts=((0, 6),))
SHARED: Mapping[str, tuple[Shares, Mapping[str, Any]]] = {
    "split": (TWO, {"draft_shares": TWO}),
    "split in three": (THREE, {"draft_shares": THREE}),
    "split beside stages": (STAGES, {"draft_shares": TWO}),
    "on rank 1": (TWO, {"draft_shares": ON_RANK_1}),
    "on rank 1 beside stages": (STAGES, {"draft_shares": ON_RANK_1, "dtype": "bfloat16"}),
    "on the CPU rank": (TWO, {**LAYOUTS["GPU and CPU"][1], "draft_shares": ON_RANK_1}),
    "split over GPU and CPU": (TWO, {**LAYOUTS["GPU and CPU"][1], "draft_shares": TWO}),
}
"""Draft models of which rank 0 has a part, or nothing."""


@pytest.mark.parametrize("layout", SHARED)
def test_a_draft_model_of_several_ranks_serves_every_kind_of_draw(qwen3: Path, smaller: Path, layout: str) -> None:
    shares, options = SHARED[layout]
    plain = {name: option for name, option in options.items() if name != "draft_shares"}
    every_kind_of_draw(qwen3, (shares, plain), draft=smaller, draft_shares=options["draft_shares"])


@pytest.mark.parametrize("drafted", [None, "split", "on rank 1"])
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_a_model_that_drafts_for_itself_is_always_right(qwen3: Path, temperature: float, drafted: str | None) -> None:
    """Its cache holds the right tokens, and it draws by the keys and edits of the draws to come."""
    shares, options = (ONE, {}) if drafted is None else SHARED[drafted]
    asked = [replace(repeating(number, temperature=temperature), turn=12 * number) for number in range(20)]
    expected, plain = serve(RankGroup(qwen3, shares, keeps_logits=False, num_blocks=40), asked)
    group = RankGroup(qwen3, shares, keeps_logits=False, num_blocks=40, draft=qwen3, **options)
    told, proposing = serve(group, asked, Speculator(DRAFTING))
    assert told == expected
    proposed, accepted = proposing.token_ids
    assert proposed > 100
    assert accepted == proposed
    assert proposing.step_id < 0.8 * plain.step_id


@pytest.mark.parametrize("shares", [None, TWO, ON_RANK_1], ids=["on rank 0", "split", "on rank 1"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_draft_model_follows_the_cache_to_another_size_and_to_sleep(
    qwen3: Path, level: int, shares: Shares | None
) -> None:
    group = RankGroup(qwen3, TWO, draft=qwen3, draft_shares=shares)
    builder = PlanBuilder(group)
    assert_drafts_are_right(builder, everywhere=shares is not None)
    other = ranks_pb2.AllocateCache(num_blocks=40, block_size=8)
    for command in (
        ranks_pb2.GroupCommand(reset_cache=other),
        ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)),
        ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True)),
        ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(cache=other)),
    ):
        outcome = builder.command(command)
        assert all(output.report is not None and output.report.done for output in outcome.outputs)
    builder.use_blocks(other.num_blocks, other.block_size)
    assert_drafts_are_right(builder, everywhere=shares is not None)


def assert_drafts_are_right(builder: PlanBuilder, *, everywhere: bool) -> None:
    builder.start(0, [5, 6, 7, 8, 9])
    builder.schedule(0)
    builder.run()
    builder.schedule(0)
    plan = builder.take_plan()
    plan.draft_slots.append(0)
    plan.num_drafts = 2
    outcome = builder.send(plan)
    builder.sequences[0].tokens.append(outcome.sampled[0].token)
    (draft,) = outcome.outputs[0].drafts
    assert len(draft.token_ids) == 2
    assert list(outcome.outputs[1].drafts) == ([draft] if everywhere else [])
    for token in draft.token_ids:
        builder.schedule(0)
        assert builder.run().sampled[0].token == token
    builder.release(0)


def test_a_draft_model_is_a_part_of_rank_0_s_memory(qwen3: Path, smaller: Path) -> None:
    without, beside = RankGroup(qwen3, TWO), RankGroup(qwen3, TWO, draft=smaller)
    alone, more = without.reports[0], beside.reports[0]
    assert beside.reports[1].weight_bytes == without.reports[1].weight_bytes
    assert beside.reports[1].kv_bytes_per_token == without.reports[1].kv_bytes_per_token
    # A position of the draft model: that of the whole model, in one layer less.
    whole = sum(report.kv_bytes_per_token for report in without.reports)
    layers = ModelConfig.from_directory(qwen3).num_layers
    assert more.kv_bytes_per_token - alone.kv_bytes_per_token == whole * (layers - 1) // layers
    pool, request = cpu_backend().memory_pool, beside.requests[0]
    drafting = DraftModel(cpu_backend(), smaller).load(request)
    assert more.weight_bytes - alone.weight_bytes == drafting.draft.weight_bytes > 0
    left = [budget_of(each, alone.weight_bytes, 0, pool).left_bytes for each in (request, drafting)]
    assert left[0] - left[1] == drafting.draft.weight_bytes + drafting.draft.step_bytes
    assert drafting.draft.step_bytes > 0


def test_a_draft_model_of_all_ranks_is_a_part_of_each_one_s_memory(qwen3: Path, smaller: Path) -> None:
    without, beside = RankGroup(qwen3, TWO), RankGroup(qwen3, TWO, draft=smaller, draft_shares=TWO)
    whole = RankGroup(qwen3, TWO, draft=smaller)

    def more(group: RankGroup, name: str) -> list[int]:
        return [
            getattr(report, name) - getattr(alone, name)
            for report, alone in zip(group.reports, without.reports, strict=True)
        ]

    for name in ("weight_bytes", "kv_bytes_per_token"):
        assert min(more(beside, name)) > 0
        # Each rank has the norms.
        assert sum(more(whole, name)) <= sum(more(beside, name)) < 1.1 * sum(more(whole, name))
    assert all(any(kernel.startswith("draft=") for kernel in report.kernels) for report in beside.reports)
    assert not any(kernel.startswith("draft=") for kernel in whole.reports[1].kernels)


def test_drafts_are_asked_of_a_rank_that_has_a_draft_model(qwen3: Path) -> None:
    runner = PlanRunner(cpu_backend())
    runner.attach(LocalExchange())
    group = RankGroup(qwen3, ONE)
    request = replace(group.requests[0], draft_plan=group.plan)
    with pytest.raises(ModelError, match="rank 0 was started without a draft model"):
        runner.load(request)


def test_blocks_are_known_by_their_tokens_and_by_all_before() -> None:
    blocks, table = DraftedBlocks(9, 4), np.array([3, 5, 2, 0], dtype=np.int32)
    first, tokens = object(), np.arange(50, 61, dtype=np.int32)
    assert blocks.num_held(0, tokens, table, owner=first) == 0
    blocks.write(0, tokens, table, 0)
    assert blocks.num_held(0, tokens, table, owner=first) == 11
    # What was drafted wrongly is not held.
    other = tokens.copy()
    other[9] = 1
    assert blocks.num_held(0, other, table, owner=first) == 9
    blocks.write(0, other, table, 9)
    # Another sequence with the first two blocks, one with the second behind another first, and a block that was reused.
    assert blocks.num_held(1, tokens, np.array([3, 5, 7, 0], dtype=np.int32), owner=object()) == 8
    assert blocks.num_held(2, tokens, np.array([6, 5, 2, 0], dtype=np.int32), owner=object()) == 0
    second = np.array([6, 5, 0, 0], dtype=np.int32)
    blocks.write(2, tokens[:8], second, 0)
    assert blocks.num_held(2, tokens[:8], second, owner=object()) == 8
    assert blocks.num_held(3, tokens, table, owner=object()) == 11 - 2
    # The second block's own tokens, behind others.
    behind, third = np.concatenate([other[8:9] + np.arange(4, dtype=np.int32), tokens[4:8]]), np.array([7, 5, 0, 0])
    assert blocks.num_held(4, behind, third, owner=object()) == 0
    blocks.write(4, behind[:4], third, 0)
    assert blocks.num_held(5, behind, third, owner=object()) == 4


def test_right_proposals_take_a_fraction_of_the_steps(qwen3: Path) -> None:
    group = RankGroup(qwen3, ONE, keeps_logits=False)
    asked = [repeating(6, temperature=0.9)]
    expected, plain = serve(group, asked)
    told, proposing = serve(group, asked, speculator_of(expected, rate=1.0))
    assert told == expected
    proposed, accepted = proposing.token_ids
    assert accepted == proposed > 0
    assert proposing.step_id == plain.step_id - accepted


def test_stages_in_micro_batches_attend_to_the_tokens_before(qwen3: Path) -> None:
    """A slot's rows lie in several micro-batches, and each is computed before the next."""
    asked = random_requests(7, 6, vocabulary=VOCAB_SIZE)
    expected, _ = serve(RankGroup(qwen3, STAGES, keeps_logits=False), asked)
    group = RankGroup(qwen3, STAGES, keeps_logits=False, recorded=False)
    for runner in group.runners:
        shard, _, _ = runner._model_state.loaded("a test")
        shard.decoder._count_parts = lambda num_rows, num_stages: min(num_rows, 3)
    told, proposing = serve(group, asked, speculator_of(expected, rate=0.9))
    assert told == expected
    assert proposing.token_ids[1] > 0


def test_a_rank_with_overlapping_steps_finishes_them_before_proposals(tmp_path: Path) -> None:
    directory = save_tiny("llama-biased", tmp_path, num_hidden_layers=2).directory
    asked = random_requests(2, 14, vocabulary=VOCAB_SIZE)
    expected = AsyncRank(directory, async_steps=False).serve(asked)
    known = {name: [(token, b"") for token in tokens] for name, tokens in expected.items()}
    rank = AsyncRank(directory, make_graphs=TapeBackend, speculator=speculator_of(known, rate=0.8))
    assert rank.serve(asked) == expected
    alone = AsyncRank(directory)
    alone.serve(asked)
    assert len(rank.said) < len(alone.said)


# --- mutants: what must show in the test above ----------------------------------------------------------


def _appends_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(running_step, "num_accepted", lambda drawn, proposed: len(proposed))


def _draws_at_the_same_position(patch: pytest.MonkeyPatch) -> None:
    draw = SequenceSampling.draw
    patch.setattr(SequenceSampling, "draw", lambda self, mask=None, *, ahead=(): draw(self, mask))


def _rows_do_not_see_one_another(patch: pytest.MonkeyPatch) -> None:
    fill = InputBuffers._fill_proposed

    def mutant(self: InputBuffers, plan: ranks_pb2.StepPlan, slots: SlotTable, views: object) -> None:
        fill(self, plan, slots, views)  # type: ignore[arg-type]
        lengths = views.rows.lengths  # type: ignore[attr-defined]
        lengths[1:] = lengths[:-1].copy()

    patch.setattr(InputBuffers, "_fill_proposed", mutant)


@pytest.mark.parametrize("mutant", [_appends_all, _draws_at_the_same_position, _rows_do_not_see_one_another])
def test_a_fault_shows(qwen3: Path, monkeypatch: pytest.MonkeyPatch, mutant: object) -> None:
    group = RankGroup(qwen3, ONE, keeps_logits=False, num_blocks=40)
    asked = random_requests(3, 8, vocabulary=VOCAB_SIZE)
    expected, _ = serve(group, asked)
    mutant(monkeypatch)  # type: ignore[operator]
    try:
        told, _ = serve(group, asked, speculator_of(expected, rate=0.8))
    except Exception:
        return
    assert told != expected


# --- plans ----------------------------------------------------------------------------------------------


def bounds(*, keeps_states: bool = False) -> PlanBounds:
    return PlanBounds(
        max_num_seqs=4, max_num_batched_tokens=6, max_model_len=12, vocab_size=50, num_blocks=9, block_size=4,
        keeps_states=keeps_states,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("proposals", "problem"),
    [
        ([(1, [3])], "slot 1, which does not decode"),
        ([(9, [3])], "slot 9, which does not decode"),
        ([(0, [])], "no tokens for slot 0"),
        ([(0, [3]), (0, [4])], "twice for slot 0"),
        ([(0, [50])], "a proposed token beyond the vocabulary of 50"),
        ([(0, [3, 4, 5, 6])], "slot 0 has 2 blocks of 4 for 9 tokens"),
        ([(0, [3, 4, 5])], None),
    ],
)
def test_a_proposal_that_does_not_fit_is_refused(proposals: list[tuple[int, list[int]]], problem: str | None) -> None:
    counts = SlotCounts(4)
    counts.set(0, num_tokens=5, num_computed=4, num_blocks=2)
    plan = ranks_pb2.StepPlan(
        step_id=1,
        decode_slots=[0],
        proposals=[ranks_pb2.Proposal(slot=slot, token_ids=tokens) for slot, tokens in proposals],
    )
    if problem is None:
        PlanCheck(bounds()).run(plan, counts)
        return
    with pytest.raises(ProtocolError, match=problem):
        PlanCheck(bounds()).run(plan, counts)


@pytest.mark.parametrize(
    ("snapshots", "problem"),
    [
        ([[], [1]], "slot 0 with 0 snapshots, it needs 2"),
        ([[0, 1], [3]], "slot 1 uses snapshot 3, there are 3"),
        ([[0, 1], [1]], "two proposed tokens in one snapshot"),
        ([[0, 2], [1]], None),
    ],
)
def test_states_behind_each_proposed_token_have_a_snapshot(snapshots: list[list[int]], problem: str | None) -> None:
    counts = SlotCounts(6)
    for slot in range(2):
        counts.set(slot, num_tokens=3, num_computed=2, num_blocks=2)
    proposals = [
        ranks_pb2.Proposal(slot=slot, token_ids=[3, 4][: 2 - slot], snapshots=own) for slot, own in enumerate(snapshots)
    ]
    plan = ranks_pb2.StepPlan(step_id=1, decode_slots=[0, 1], proposals=proposals)
    check = PlanCheck(replace(bounds(keeps_states=True), max_num_seqs=6, num_snapshots=3))
    if problem is None:
        check.run(plan, counts)
        return
    with pytest.raises(ProtocolError, match=problem):
        check.run(plan, counts)


def test_proposals_share_the_bounds_of_a_step() -> None:
    counts = SlotCounts(4)
    for slot in range(2):
        counts.set(slot, num_tokens=3, num_computed=2, num_blocks=2)
    plan = ranks_pb2.StepPlan(
        step_id=1, decode_slots=[0, 1], proposals=[ranks_pb2.Proposal(slot=1, token_ids=[3, 4, 5])]
    )
    with pytest.raises(ProtocolError, match="makes 5 draws, at most 4 are allowed"):
        PlanCheck(bounds()).run(plan, counts)


def test_masks_are_given_for_each_draw(qwen3: Path) -> None:
    """The second draw is bound to another mask than the first, and a missing one is noticed."""
    group = RankGroup(qwen3, ONE)
    builder = PlanBuilder(group)
    builder.start(0, [5, 6, 7], sampling=GREEDY)
    builder.schedule(0)
    builder.run()
    builder.schedule(0, proposed=[9])
    plan = builder.take_plan()
    plan.masked_slots.append(0)
    only = [bytes(1 << token % 8 if token // 8 == byte else 0 for byte in range(25)) for token in (9, 77)]
    outcome = builder.send(plan, only)
    assert [token for _, token in outcome.sampled] == [9, 77]
    builder.sequences[0].tokens += [9, 77]
    builder.sequences[0].computed = 5
    builder.schedule(0, proposed=[9])
    plan = builder.take_plan()
    plan.masked_slots.append(0)
    with pytest.raises(ProtocolError, match="1 masks came for 2 draws"):
        builder.send(plan, only[:1])
