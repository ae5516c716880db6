"""A prediction head proposes what its formula says, and its proposals change no token."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.config import SpeculationConfig
from hetero_gateway.engine.speculation.speculator import Speculator
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.models.layer_inputs import JoinedStates
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.prediction_head import PredictionHead
from hetero_worker.runners.shard import budget_of, memory_of
from tests.support.async_serving import AsyncRank, random_requests
from tests.support.examples import examples
from tests.support.prediction_heads import LAYERS, HeadedCheckpoint, save_with_head
from tests.support.rank_group import LogitsRecorder, PlanBuilder, RankGroup, Shares
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import VOCAB_SIZE, edit_config
from tests.unit.worker_model.test_proposals import (
    ONE,
    THREE,
    TWO,
    every_kind_of_draw,
    prompts_with_drafts,
    repeating,
    serve,
)

pytestmark = pytest.mark.unit

STAGES = Shares(
    kv_heads=((8, 0), (0, 8)), mlp_columns=((50, 0), (0, 50)), vocab_rows=(0, 200), experts=((6, 0), (0, 6))
)
"""The last rank has the output head, as in mode Layer: it sends rank 0 the states."""
LAYOUTS: Mapping[str, tuple[Shares, Mapping[str, Any]]] = {
    "one": (ONE, {}),
    "two": (TWO, {}),
    "three": (THREE, {}),
    "stages": (STAGES, {}),
    "bfloat16": (STAGES, {"dtype": "bfloat16"}),
    "int8": (TWO, {"quantization": "int8"}),
    "torch": (ONE, {"native": False, "batch_invariant": True}),
    "GPU and CPU": (TWO, {"num_gpu_ranks": 1, "make_graphs": TapeBackend, "batch_invariant": True}),
}
DRAFTING = SpeculationConfig(max_tokens=5, drafts=True, has_head=True)
MODELS = ("deepseek-v3", "glm4-moe", "qwen3-next")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that their heads agree with now and then."""
    return {each: save_with_head(each, tmp_path_factory.mktemp(each), agrees=True).directory for each in MODELS}


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> HeadedCheckpoint:
    return save_with_head("glm4-moe", tmp_path_factory.mktemp("random"))


# --- against the formula ----------------------------------------------------------------------------------


def drafting_group(directory: Path, shares: Shares, **options: Any) -> tuple[RankGroup, list[torch.Tensor]]:
    """A group, and the logits [slots, vocabulary] of each token that its head draws, in order."""
    group = RankGroup(directory, shares, has_prediction_head=True, **options)
    head, recorder, logits = head_of(group), LogitsRecorder(), list[torch.Tensor]()

    def record(*args: Any, **named: Any) -> Any:
        sampled = recorder(*args, **named)
        logits.append(recorder.last)
        return sampled

    head._sample = record
    return group, logits


def head_of(group: RankGroup) -> PredictionHead:
    head = group.runners[0]._draft
    assert isinstance(head, PredictionHead)
    return head


def step(
    builder: PlanBuilder, *, drafts: int, proposed: Sequence[int] = (), keeps_states: bool = False
) -> Sequence[int]:
    """Decode slot 0, let the head draft so many tokens behind it, and return them."""
    builder.schedule(0, proposed=list(proposed), saved=range(len(proposed)) if keeps_states else ())
    plan = builder.take_plan()
    if drafts:
        plan.draft_slots.append(0)
        plan.num_drafts = drafts
    outcome = builder.send(plan)
    sequence, tokens = builder.sequences[0], [token for _, token in outcome.sampled]
    sequence.tokens += tokens
    sequence.computed = len(sequence.tokens) - 1
    return [token for draft in outcome.outputs[0].drafts for token in draft.token_ids]


def differences(logits: list[torch.Tensor], expected: torch.Tensor) -> float:
    assert len(logits) == len(expected)
    return max(float((each[0] - wanted).abs().max()) for each, wanted in zip(logits, expected, strict=True))


@pytest.mark.parametrize(
    "variant",
    ["deepseek-v3", "deepseek-v3-yarn", "glm4-moe", "glm4-moe-grouped", "glm4-moe-lite", "qwen3-next", "qwen3.5-moe"],
)
@pytest.mark.parametrize("layout", ["one", "stages", "GPU and CPU"])
def test_drafts_are_those_of_the_formula(tmp_path: Path, variant: str, layout: str) -> None:
    """Behind a prompt in chunks, behind tokens that were accepted, and behind tokens of its own."""
    changes: dict[str, Any] = {"mlp_layer_types": ["dense", *["sparse"] * LAYERS]} if variant == "glm4-moe-lite" else {}
    headed = save_with_head(variant, tmp_path, **changes)
    if changes:
        edit_config(tmp_path, mlp_layer_types=changes["mlp_layer_types"][:LAYERS])
    shares, options = LAYOUTS[layout]
    if headed.offset:
        options = {**options, "num_snapshots": 4}
    group, logits = drafting_group(headed.directory, shares, block_size=32, **options)
    builder = PlanBuilder(group)
    builder.start(0, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    builder.schedule(0, 4)
    builder.run()
    builder.schedule(0)
    builder.run()
    # The second proposal is right up to the draw behind which the next begins.
    proposed: Sequence[int] = ()
    for _ in range(3):
        logits.clear()
        drafts = step(builder, drafts=3, proposed=proposed, keeps_states=bool(headed.offset))
        known = builder.sequences[0].tokens
        assert differences(logits, headed.drafted(known, ahead=list(drafts[:-1]))) < 1e-4
        proposed = right_then_wrong(headed, known)
    assert len(known) > 9 + 1 + 3


def right_then_wrong(headed: HeadedCheckpoint, known: list[int]) -> list[int]:
    """Two tokens that the model draws next, and one that it does not."""
    tokens = list(known)
    with torch.inference_mode():
        for _ in range(3):
            tokens.append(int(headed.reference.lm_head(headed.states(tokens)[-1]).argmax()))
    return [*tokens[len(known) : -1], (tokens[-1] + 1) % VOCAB_SIZE]


def test_a_prefix_hit_needs_no_states_again(random_head: HeadedCheckpoint) -> None:
    """The head's keys and values lie in the blocks of the prefix; another token behind these costs one state."""
    group, logits = drafting_group(random_head.directory, TWO)
    builder, prompt = PlanBuilder(group), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    builder.start(0, prompt)
    builder.schedule(0)
    builder.run()
    blocks = builder.sequences[0].blocks[:2]
    for tokens, missing in ((prompt, []), ([*prompt[:8], 77, 78], [7])):
        builder.release(0)
        builder.start(0, tokens, shared_blocks=blocks)
        builder.schedule(0)
        builder.run()
        logits.clear()
        step(builder, drafts=1)
        known = builder.sequences[0].tokens
        states = random_head.states(known)[:-1]
        states[missing] = 0
        assert differences(logits, random_head.drafted(known, states=states)) < 1e-4


def test_what_came_while_nothing_was_drafted_is_read_without_states(random_head: HeadedCheckpoint) -> None:
    group, logits = drafting_group(random_head.directory, ONE, block_size=32)
    builder = PlanBuilder(group)
    builder.start(0, [5, 6, 7, 8, 9])
    builder.schedule(0)
    builder.run()
    for _ in range(6):
        step(builder, drafts=0)
    logits.clear()
    drafts = step(builder, drafts=2)
    known = builder.sequences[0].tokens
    missing = random_head.states(known)[:-1]
    missing[5:-1] = 0
    assert differences(logits, random_head.drafted(known, ahead=drafts[:1], states=missing)) < 1e-4


# --- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [0.0, 0.6], ids=["greedy", "seeded"])
def test_many_prompts(saved: Mapping[str, Path], model: str, layout: str, temperature: float) -> None:
    """200 prompts, dealt to the models."""
    assert_fewer_steps(examples(67), saved[model], layout, temperature)


@pytest.mark.parametrize("layout", ["one", "two", "stages", "GPU and CPU"])
def test_tokens_are_those_without_a_head(saved: Mapping[str, Path], layout: str) -> None:
    assert_fewer_steps(20, saved["glm4-moe"], layout, 0.6)


def assert_fewer_steps(number: int, model: Path, layout: str, temperature: float) -> None:
    shares, options = LAYOUTS[layout]
    if ModelConfig.from_directory(model).delta is not None:
        options = {**options, "num_snapshots": 24}
    plain, proposing = prompts_with_drafts(number, model, (shares, options), temperature, has_prediction_head=True)
    assert proposing < plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_a_model_with_states_are_those_without_a_head(saved: Mapping[str, Path], layout: str) -> None:
    assert_fewer_steps(20, saved["qwen3-next"], layout, 0.6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_draw(saved: Mapping[str, Path], layout: str) -> None:
    every_kind_of_draw(saved["deepseek-v3"], LAYOUTS[layout], has_prediction_head=True)


def test_a_head_that_agrees_is_often_right(saved: Mapping[str, Path]) -> None:
    """Far more often than one whose states are of other tokens."""
    asked = [repeating(number, temperature=0.0) for number in range(20)]
    _, proposing = serve(
        RankGroup(saved["glm4-moe"], ONE, keeps_logits=False, has_prediction_head=True), asked, Speculator(DRAFTING)
    )
    proposed, accepted = proposing.token_ids
    assert accepted > 0.2 * proposed


def test_steps_that_overlap_wait_for_the_head(tmp_path: Path) -> None:
    """A GPU rank alone, whose steps overlap where nothing is drafted."""
    directory = save_with_head("deepseek-v3-dense", tmp_path, agrees=True).directory
    asked = random_requests(2, 14, vocabulary=VOCAB_SIZE)
    expected = AsyncRank(directory, async_steps=False).serve(asked)
    speculator = Speculator(DRAFTING)
    rank = AsyncRank(directory, make_graphs=TapeBackend, speculator=speculator, has_prediction_head=True)
    assert rank.serve(asked) == expected
    assert speculator._drafts is not None
    alone = AsyncRank(directory)
    alone.serve(asked)
    assert len(rank.said) < len(alone.said)


# --- cache, sleep, memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [ONE, TWO], ids=["borrows", "has its own"])
@pytest.mark.parametrize("level", [1, 2])
def test_it_follows_the_cache_to_another_size_to_sleep_and_to_new_weights(
    random_head: HeadedCheckpoint, shares: Shares, level: int
) -> None:
    group, logits = drafting_group(random_head.directory, shares, block_size=32)
    builder = PlanBuilder(group)
    assert_drafts_are_right(builder, logits, random_head)
    other = ranks_pb2.AllocateCache(num_blocks=40, block_size=16)
    for command in (
        ranks_pb2.GroupCommand(reset_cache=other),
        ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)),
        ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True)),
        ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(cache=other)),
        ranks_pb2.GroupCommand(update_weights=ranks_pb2.UpdateWeights()),
    ):
        outcome = builder.command(command)
        assert all(output.report is not None and output.report.done for output in outcome.outputs)
    builder.use_blocks(other.num_blocks, other.block_size)
    assert_drafts_are_right(builder, logits, random_head)


@pytest.mark.parametrize(
    "command",
    [
        ranks_pb2.GroupCommand(update_weights=ranks_pb2.UpdateWeights()),
        ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=2)),
    ],
    ids=["update", "sleep"],
)
def test_old_weights_are_gone_when_their_memory_is_given_back(
    command: ranks_pb2.GroupCommand, random_head: HeadedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = drafting_group(random_head.directory, ONE, block_size=32)
    (runner,) = group.runners
    weights = weakref.ref(runner._model_state.loaded("the test")[0].decoder)
    alive = []
    pool = type(runner.backend.memory_pool)
    release = pool.release_unused

    def watched(self: Any) -> None:
        gc.collect()
        alive.append(weights() is not None)
        release(self)

    monkeypatch.setattr(pool, "release_unused", watched)
    outcome = PlanBuilder(group).command(command)
    assert outcome.outputs[0].report is not None
    assert outcome.outputs[0].report.done
    assert alive[0] is False


def test_logits_that_are_not_finite_spoil_a_proposal_and_no_group(random_head: HeadedCheckpoint) -> None:
    group, _ = drafting_group(random_head.directory, ONE, block_size=32)
    builder, head = PlanBuilder(group), head_of(group)
    builder.start(0, [5, 6, 7, 8, 9])
    builder.schedule(0)
    builder.run()
    whole, begin, decode = step(builder, drafts=2), head._begin, head._decode
    builder.release(0)

    def fails(*args: Any) -> torch.Tensor:
        logits = begin(*args)
        logits[:, ::2], logits[:, 1::2] = torch.nan, torch.inf
        return logits

    def fails_later(*args: Any) -> torch.Tensor:
        return decode(*args).fill_(-torch.inf)

    for name, failing, right in (("_decode", fails_later, 1), ("_begin", fails, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, name, failing)
            builder.start(0, [5, 6, 7, 8, 9])
            builder.schedule(0)
            builder.run()
            drafts = step(builder, drafts=2)
        assert len(drafts) == 2
        assert list(drafts[:right]) == list(whole[:right])
        builder.release(0)


def assert_drafts_are_right(builder: PlanBuilder, logits: list[torch.Tensor], headed: HeadedCheckpoint) -> None:
    builder.start(0, [5, 6, 7, 8, 9])
    builder.schedule(0)
    builder.run()
    logits.clear()
    drafts = step(builder, drafts=2)
    assert differences(logits, headed.drafted(builder.sequences[0].tokens, ahead=drafts[:1])) < 1e-4
    builder.release(0)


def test_it_is_a_part_of_rank_0_s_memory(random_head: HeadedCheckpoint) -> None:
    """With embedding and output head where rank 0 has not all of these."""
    directory, pool = random_head.directory, cpu_backend().memory_pool
    for shares in (ONE, TWO):
        without, beside = RankGroup(directory, shares), RankGroup(directory, shares, has_prediction_head=True)
        alone, more = without.reports[0], beside.reports[0]
        assert [report.weight_bytes for report in beside.reports[1:]] == [r.weight_bytes for r in without.reports[1:]]
        whole = sum(report.kv_bytes_per_token for report in without.reports)
        assert more.kv_bytes_per_token - alone.kv_bytes_per_token == whole // LAYERS
        request = beside.requests[0]
        needs = PredictionHead(cpu_backend(), request).load(request).draft
        assert more.weight_bytes - alone.weight_bytes == needs.weight_bytes
        shard = beside.runners[0]._draft._shard  # type: ignore[union-attr]
        assert shard is not None
        counted = memory_of(shard.request).weight_parts(shard.request.shard_plan.ranks[0], packs_head=True)
        borrowed = counted.vocabulary if shares is ONE else 0
        assert 0 <= counted.total - borrowed - needs.weight_bytes < 0.1 * needs.weight_bytes
        left = [
            budget_of(each, alone.weight_bytes, 0, pool).left_bytes for each in (request, replace(request, draft=needs))
        ]
        assert left[0] - left[1] == needs.weight_bytes + needs.step_bytes


# --- refusals ---------------------------------------------------------------------------------------------


def test_a_rank_without_a_head_refuses_to_draft_with_one(random_head: HeadedCheckpoint) -> None:
    runner = PlanRunner(cpu_backend())
    runner.attach(LocalExchange())
    request = RankGroup(random_head.directory, ONE, has_prediction_head=True).requests[0]
    headless = replace(request, config=replace(request.config, num_prediction_heads=0))
    with pytest.raises(ModelError, match=r"spec\.engine\.speculative\.kind is MTP, and these files have no"):
        runner.load(headless)


def test_a_head_counts_only_if_the_files_have_it(tmp_path: Path) -> None:
    directory = save_with_head("glm4-moe", tmp_path).directory
    config = ModelConfig.from_directory(directory)
    assert config.num_prediction_heads == 1
    head = config.prediction_head
    assert head is not None
    assert (head.num_layers, head.expert_layers, head.follows_states) == (1, (0,), True)
    tensors = {name: each for name, each in load_file(directory / "model.safetensors").items() if ".3." not in name}
    save_file(tensors, directory / "model.safetensors")
    assert ModelConfig.from_directory(directory).num_prediction_heads == 0
    norm = f"{config.prediction_head_prefixes['model.norm.']}weight"
    index = {"weight_map": dict.fromkeys([*tensors, norm], "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelConfig.from_directory(directory).num_prediction_heads == 1


# --- mutants: what must show in the test of the formula ---------------------------------------------------


def _states_come_first(patch: pytest.MonkeyPatch) -> None:
    call = JoinedStates.__call__
    patch.setattr(JoinedStates, "__call__", lambda self, embeddings, states: call(self, states, embeddings))


def _states_are_a_token_late(patch: pytest.MonkeyPatch) -> None:
    read = PredictionHead.read

    def mutant(self: PredictionHead, known: Any, states: Any) -> None:
        late = {slot: place._replace(position=place.position + 1) for slot, place in states.decodes.items()}
        read(self, known, replace(states, decodes=late))

    patch.setattr(PredictionHead, "read", mutant)


@pytest.mark.parametrize("mutant", [_states_come_first, _states_are_a_token_late])
def test_a_fault_shows(random_head: HeadedCheckpoint, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    group, logits = drafting_group(random_head.directory, ONE, block_size=32)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_drafts_are_right(PlanBuilder(group), logits, random_head)
