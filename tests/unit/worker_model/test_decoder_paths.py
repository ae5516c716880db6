"""However a sequence's tokens reach the cache, the logits are those of one full forward pass."""

from __future__ import annotations

import pytest

from hetero_api.v1 import ranks_pb2
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


def test_mixed_batch_of_prefill_chunk_and_decode_keeps_the_plans_order(
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
    assert [slot for slot, _ in outcome.sampled] == [2, 3, 1, 0]
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
