"""However a sequence's tokens reach the cache, the logits are those of one full forward pass."""

from __future__ import annotations

import pytest
import torch

from hetero_api.v1 import logprobs_pb2, ranks_pb2
from tests.support.rank_group import PlanBuilder, RankGroup, Shares, StepOutcome
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
BLOCK_SIZE = 4
ONE_RANK = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))
THREE_RANKS = Shares(kv_heads=((1, 0, 7),), mlp_columns=((0, 20, 30),), vocab_rows=(64, 64, 72))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(params=[ONE_RANK, THREE_RANKS], ids=["one rank", "three ranks"])
def builder(checkpoint: TinyCheckpoint, request: pytest.FixtureRequest) -> PlanBuilder:
    return PlanBuilder(RankGroup(checkpoint.directory, request.param, block_size=BLOCK_SIZE))


def _prompt(length: int, *, seed: int = 1) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % VOCAB_SIZE for i in range(length)]


def _check(outcome: StepOutcome, builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    """Every draw's logits are those of its whole sequence, drawn token excluded."""
    for row, (slot, _) in enumerate(outcome.sampled):
        expected = checkpoint.logits(builder.sequences[slot].tokens[:-1])[-1]
        assert (outcome.logits[row] - expected).abs().max() <= TOLERANCE, f"slot {slot}"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 16, 17])
def test_chunked_prefill_equals_the_whole(builder: PlanBuilder, checkpoint: TinyCheckpoint, chunk: int) -> None:
    prompt = _prompt(17)
    builder.start(0, prompt)
    for _ in range(-(-len(prompt) // chunk)):
        builder.schedule(0, chunk)
        outcome = builder.run()
    assert len(outcome.sampled) == 1
    _check(outcome, builder, checkpoint)
    builder.schedule(0)
    _check(builder.run(), builder, checkpoint)


def test_an_unfinished_chunk_samples_nothing(builder: PlanBuilder) -> None:
    builder.start(0, _prompt(9))
    builder.schedule(0, 5)
    assert builder.run().sampled == []


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_prefix_hit_reads_another_sequences_blocks(
    builder: PlanBuilder, checkpoint: TinyCheckpoint, shared: int
) -> None:
    common = _prompt(3 * BLOCK_SIZE)
    builder.start(0, [*common, 5])
    builder.schedule(0)
    builder.run()
    blocks = builder.sequences[0].blocks[:shared]
    builder.start(1, [*common[: shared * BLOCK_SIZE], 9, 8, 7], shared_blocks=blocks)
    builder.schedule(1)
    builder.schedule(0)
    _check(builder.run(), builder, checkpoint)


def test_full_hit_still_computes_the_last_token(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    prompt = _prompt(2 * BLOCK_SIZE + 1)
    builder.start(0, prompt)
    builder.schedule(0)
    builder.run()
    builder.start(1, prompt, shared_blocks=builder.sequences[0].blocks[:2])
    builder.schedule(1)
    outcome = builder.run()
    _check(outcome, builder, checkpoint)


def test_mixed_batch_decodes_first_and_then_works_off_the_spans_in_order(
    builder: PlanBuilder, checkpoint: TinyCheckpoint
) -> None:
    for slot, length in {0: 6, 1: 19}.items():
        builder.start(slot, _prompt(length, seed=slot + 2))
        builder.schedule(slot)
    _check(builder.run(), builder, checkpoint)
    builder.start(2, _prompt(13, seed=9))
    builder.start(3, _prompt(1, seed=4))
    for slot, count in {2: 7, 0: None, 3: None, 1: None}.items():
        builder.schedule(slot, count)
    outcome = builder.run()
    assert [slot for slot, _ in outcome.sampled] == [0, 3, 1]
    _check(outcome, builder, checkpoint)
    for slot in (2, 3, 1, 0):
        builder.schedule(slot)
    outcome = builder.run()
    assert [slot for slot, _ in outcome.sampled] == [3, 1, 0, 2]
    _check(outcome, builder, checkpoint)


def test_preempted_sequence_is_recomputed_from_its_tokens(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    builder.start(0, _prompt(7))
    for _ in range(3):
        builder.schedule(0)
        builder.run()
    tokens = list(builder.sequences[0].tokens)
    builder.release(0)
    builder.start(0, tokens)
    builder.schedule(0)
    _check(builder.run(), builder, checkpoint)


def test_a_released_slots_state_is_gone_for_the_next_request(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    builder.start(5, _prompt(20))
    builder.schedule(5)
    builder.run()
    builder.release(5)
    builder.start(5, _prompt(3, seed=8))
    builder.schedule(5)
    _check(builder.run(), builder, checkpoint)


def test_a_new_epoch_computes_from_nothing_with_the_kept_weights(checkpoint: TinyCheckpoint) -> None:
    group = RankGroup(checkpoint.directory, THREE_RANKS, block_size=BLOCK_SIZE)
    assert all(report.load_s > 0 for report in group.reports)
    builder = PlanBuilder(group)
    builder.start(0, _prompt(9))
    builder.schedule(0)
    first = builder.run()
    group.start()
    assert all(report.load_s == 0 for report in group.reports)
    again = PlanBuilder(group)
    again.start(0, _prompt(9))
    again.schedule(0)
    assert again.run().sampled == first.sampled


def test_sampled_tokens_do_not_depend_on_layout_or_company(checkpoint: TinyCheckpoint) -> None:
    sampling = ranks_pb2.Sampling(temperature=0.9, top_k=0, top_p=0.95, min_p=0.01, seed=2**63 + 11)
    outputs = []
    for shares, company in [(ONE_RANK, 0), (ONE_RANK, 4), (THREE_RANKS, 0), (THREE_RANKS, 3)]:
        builder = PlanBuilder(RankGroup(checkpoint.directory, shares, block_size=BLOCK_SIZE))
        builder.start(1, _prompt(5), sampling=sampling)
        for other in range(2, 2 + company):
            builder.start(other, _prompt(4 + other, seed=other))
        for _ in range(8):
            for slot in builder.sequences:
                builder.schedule(slot)
            builder.run()
        outputs.append(builder.sequences[1].tokens)
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("length", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 1])
def test_a_hit_of_all_blocks_but_the_last_tokens_equals_the_whole(
    builder: PlanBuilder, checkpoint: TinyCheckpoint, length: int
) -> None:
    """Also of a prompt of just so many blocks, of which the last must be computed anew."""
    prompt = _prompt(length)
    builder.start(0, prompt)
    builder.schedule(0)
    builder.run()
    shared = (length - 1) // BLOCK_SIZE
    builder.start(1, prompt, shared_blocks=builder.sequences[0].blocks[:shared])
    for _ in range(3):
        builder.schedule(1)
        builder.schedule(0)
        _check(builder.run(), builder, checkpoint)


def test_a_preempted_sequence_comes_back_through_its_own_blocks(
    builder: PlanBuilder, checkpoint: TinyCheckpoint
) -> None:
    builder.start(0, _prompt(2 * BLOCK_SIZE + 2))
    for _ in range(3):
        builder.schedule(0)
        builder.run()
    tokens, blocks = list(builder.sequences[0].tokens), builder.sequences[0].blocks[:2]
    builder.release(0)
    builder.start(4, tokens, shared_blocks=blocks)
    builder.schedule(4, 2)
    builder.run()
    builder.schedule(4)
    _check(builder.run(), builder, checkpoint)


def test_plans_sent_ahead_decode_tokens_that_nobody_has_seen(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    """The gateway need not know a token for the next step to compute it."""
    builder.start(0, _prompt(5))
    builder.start(1, _prompt(9, seed=3))
    builder.schedule(0)
    builder.schedule(1)
    plans = [builder.take_plan()]
    for _ in range(4):
        for slot in (0, 1):
            builder.sequences[slot].tokens.append(-1)
            builder.schedule(slot)
        plans.append(builder.take_plan())
    outcomes = [builder.send(plan) for plan in plans]
    for slot, length in {0: 5, 1: 9}.items():
        builder.sequences[slot].tokens[length:] = [dict(outcome.sampled)[slot] for outcome in outcomes]
    _check(outcomes[-1], builder, checkpoint)


RESHAPED = {
    "contiguous": [(9, 128)],
    "contiguous and back": [(9, 128), (64, BLOCK_SIZE)],
    "smaller blocks": [(150, 1)],
    "odd blocks": [(40, 7)],
}


@pytest.mark.parametrize("name", RESHAPED)
def test_every_path_is_right_after_the_cache_was_reset(
    builder: PlanBuilder, checkpoint: TinyCheckpoint, name: str
) -> None:
    _use_and_release(builder)
    for num_blocks, block_size in RESHAPED[name]:
        order = ranks_pb2.AllocateCache(num_blocks=num_blocks, block_size=block_size)
        _obey(builder, ranks_pb2.GroupCommand(reset_cache=order))
        builder.use_blocks(num_blocks, block_size)
    _check_all_paths(builder, checkpoint)


@pytest.mark.parametrize("level", [1, 2])
def test_every_path_is_right_after_sleep(builder: PlanBuilder, checkpoint: TinyCheckpoint, level: int) -> None:
    _use_and_release(builder)
    _obey(builder, ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)))
    cache = ranks_pb2.AllocateCache(num_blocks=64, block_size=BLOCK_SIZE)
    _obey(builder, ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)))
    builder.use_blocks(64, BLOCK_SIZE)
    _check_all_paths(builder, checkpoint)


def _use_and_release(builder: PlanBuilder) -> None:
    builder.start(6, _prompt(11, seed=6))
    builder.schedule(6)
    builder.run()
    builder.release(6)


def _obey(builder: PlanBuilder, command: ranks_pb2.GroupCommand) -> None:
    outputs = builder.command(command).outputs
    assert all(output.report is not None and output.report.done for output in outputs)


def _check_all_paths(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    """Whole, in chunks, and decoding in company."""
    builder.start(0, _prompt(13, seed=2))
    builder.start(1, _prompt(10, seed=5))
    builder.schedule(0)
    builder.schedule(1, 4)
    _check(builder.run(), builder, checkpoint)
    for _ in range(4):
        builder.schedule(0)
        builder.schedule(1, 3)
        _check(builder.run(), builder, checkpoint)


@pytest.mark.parametrize("chunk", [None, 1, 3, 5])
def test_log_probabilities_of_a_prompt_are_the_references(
    builder: PlanBuilder, checkpoint: TinyCheckpoint, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_worker.runners.running_step.PROMPT_LOGIT_ROWS", 2)
    prompt = _prompt(9)
    expected = checkpoint.logits(prompt).log_softmax(-1)
    builder.start(0, _prompt(4, seed=7))
    builder.schedule(0)
    builder.run()
    builder.start(3, prompt, sampling=ranks_pb2.Sampling(num_prompt_logprobs=2, num_logprobs=1))
    told: dict[int, logprobs_pb2.TokenLogprobs] = {}
    outcome = None
    while outcome is None or not any(slot == 3 for slot, _ in outcome.sampled):
        builder.schedule(0)
        builder.schedule(3, chunk)
        outcome = builder.run()
        for span in outcome.outputs[0].prompt_logprobs:
            assert span.slot == 3
            told.update(enumerate(span.positions, start=span.begin))
    assert list(told) == list(range(1, len(prompt)))
    for position, logprobs in told.items():
        row = expected[position - 1]
        assert logprobs.token_id == prompt[position]
        assert logprobs.logprob == pytest.approx(float(row[prompt[position]]), abs=TOLERANCE)
        assert list(logprobs.top_token_ids) == row.topk(2).indices.tolist()
    (drawn,) = outcome.outputs[0].logprobs
    assert drawn.token_id == dict(outcome.sampled)[3]


def _hidden(checkpoint: TinyCheckpoint, tokens: list[int]) -> torch.Tensor:
    """Hidden states behind the last norm, [tokens, hidden], as transformers computes them."""
    with torch.inference_mode():
        states: torch.Tensor = checkpoint.reference.model(torch.tensor([tokens])).last_hidden_state[0]
    return states.float()


HEAD_ELSEWHERE = Shares(kv_heads=((8, 0),), mlp_columns=((25, 25),), vocab_rows=(0, 200), embedding_rows=(200, 0))


@pytest.mark.parametrize("shares", [ONE_RANK, THREE_RANKS, HEAD_ELSEWHERE], ids=["one", "three", "head elsewhere"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_pooled_hidden_states_are_the_references(checkpoint: TinyCheckpoint, shares: Shares, chunk: int | None) -> None:
    builder = PlanBuilder(RankGroup(checkpoint.directory, shares, block_size=BLOCK_SIZE))
    prompts = {0: _prompt(10), 1: _prompt(10, seed=3)}
    pooling = {0: ranks_pb2.POOLING_MEAN, 1: ranks_pb2.POOLING_LAST}
    for slot, prompt in prompts.items():
        builder.start(slot, prompt, sampling=ranks_pb2.Sampling(pooling=pooling[slot]))
    builder.start(2, _prompt(3))
    builder.schedule(2)
    told: dict[int, list[ranks_pb2.PooledSpan]] = {0: [], 1: []}
    sampled: set[int] = set()
    while not sampled >= {0, 1}:
        for slot in prompts:
            builder.schedule(slot, chunk)
        outcome = builder.run()
        sampled.update(slot for slot, _ in outcome.sampled)
        for span in outcome.outputs[0].pooled:
            told[span.slot].append(span)
    expected = {0: _hidden(checkpoint, prompts[0]).sum(0), 1: _hidden(checkpoint, prompts[1])[-1]}
    for slot, spans in told.items():
        sums = torch.tensor([list(span.sums) for span in spans]).sum(0)
        assert (sums - expected[slot]).abs().max() <= 10 * TOLERANCE
    assert sum(span.num_tokens for span in told[0]) == 10
    assert [span.num_tokens for span in told[1]] == [1]


def test_a_masked_draw_keeps_to_its_mask_and_leaves_others_alone(builder: PlanBuilder) -> None:
    for slot in (0, 1):
        builder.start(slot, _prompt(6))
        builder.schedule(slot)
    free = dict(builder.run().sampled)[0]
    builder.schedule(0)
    builder.schedule(1)
    only = (free + 17) % VOCAB_SIZE
    mask = bytearray(-(-VOCAB_SIZE // 8))
    mask[only // 8] |= 1 << only % 8
    plan = builder.take_plan()
    plan.masked_slots.append(1)
    tokens = dict(builder.send(plan, masks=[bytes(mask)]).sampled)
    assert tokens[1] == only
    assert tokens[0] != only
