"""Experts in slices: ranks with some columns of each compute what whole experts do, for each model and format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import NUM_EXPERTS, TinyCheckpoint, save_tiny
from tests.unit.worker_model.test_expert_commands import move

pytestmark = pytest.mark.unit

WHOLE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
ONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), expert_slices=(1,))
EVEN = Shares(kv_heads=((4, 4),), mlp_columns=((25, 25),), vocab_rows=(100, 100), expert_slices=(1, 1))
UNEVEN = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), expert_slices=(3, 7))
THREE = Shares(kv_heads=((3, 3, 2),), mlp_columns=((17, 0, 33),), vocab_rows=(64, 100, 36), expert_slices=(2, 0, 3))
HELPED = Shares(kv_heads=((8, 0, 0),), mlp_columns=((20, 15, 15),), vocab_rows=(200, 0, 0), expert_slices=(0, 1, 3))
MIXED = replace(HELPED, experts=((2, 0, 0),))
"""The first rank has two whole experts."""
LAYOUTS = {"one": ONE, "even": EVEN, "uneven": UNEVEN, "three": THREE, "helped": HELPED, "mixed": MIXED}
EVERY_LAYOUT = ("qwen3-moe-some-dense", "gpt-oss")
OTHERS = ("mixtral", "glm4-moe-grouped", "minimax-m2", "deepseek-v3", "qwen3-next", "gemma4-moe")
"""With shared experts, too: gated, and such that add up apart."""
CASES = [(variant, layout, native) for variant in EVERY_LAYOUT for layout in LAYOUTS for native in (True, False)]
CASES += [(variant, layout, True) for variant in OTHERS for layout in ("uneven", "mixed")]
PROMPT = (7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    """With weights that are small enough for the tolerance."""
    made: dict[str, TinyCheckpoint] = {}
    for variant in (*EVERY_LAYOUT, *OTHERS):
        made[variant] = save_tiny(variant, tmp_path_factory.mktemp(variant), initializer_range=0.15)
    return made


def completed(builder: PlanBuilder) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of a greedy completion of PROMPT, and the tokens."""
    logits, tokens = [], list(PROMPT)
    builder.start(0, PROMPT)
    for _ in range(3):
        builder.schedule(0)
        outcome = builder.run()
        logits.append(outcome.logits[0])
        tokens.append(outcome.sampled[0].token)
    return logits, tokens


@pytest.mark.parametrize(("variant", "layout", "native"), CASES)
def test_logits_are_transformers(
    checkpoints: dict[str, TinyCheckpoint], variant: str, layout: str, *, native: bool
) -> None:
    checkpoint = checkpoints[variant]
    group = RankGroup(checkpoint.directory, LAYOUTS[layout], native=native)
    group.plan.validate_for(group.requests[0].config)
    logits, tokens = completed(PlanBuilder(group))
    expected = checkpoint.logits(tokens[:-1])[-len(logits) :]
    assert (torch.stack(logits) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_quantised_at_load_are_the_same_numbers_in_slices(tmp_path: Path, quantization: str) -> None:
    """Torch widens them and rounds nothing else; slices cut no group."""
    checkpoint = save_tiny("qwen3-moe", tmp_path, moe_intermediate_size=192, initializer_range=0.15)
    groups = [
        RankGroup(checkpoint.directory, shares, quantization=quantization, native=False)
        for shares in (WHOLE, replace(UNEVEN, expert_slices=(1, 2)))
    ]
    (whole, tokens), (sliced, same) = (completed(PlanBuilder(group)) for group in groups)
    assert tokens == same
    assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(whole, sliced, strict=True))


def test_a_rank_holds_and_counts_no_more_than_its_slices(checkpoints: dict[str, TinyCheckpoint]) -> None:
    directory = checkpoints["qwen3-moe-some-dense"].directory
    (whole,) = RankGroup(directory, WHOLE).reports
    halves = RankGroup(directory, EVEN)
    first, second = halves.reports
    assert first.weight_bytes == pytest.approx(second.weight_bytes, rel=0.05)
    assert first.weight_bytes < 0.6 * whole.weight_bytes
    builder = PlanBuilder(halves)
    count = ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts())
    builder.command(count)
    builder.start(0, PROMPT)
    builder.schedule(0)
    builder.run()
    builder.release(0)
    one, two = (output.report for output in builder.command(count).outputs)
    assert one is not None
    assert two is not None
    assert [list(each.tokens) for each in one.expert_counts] == [list(each.tokens) for each in two.expert_counts]
    assert all(sum(each.tokens) == 3 * len(PROMPT) for each in one.expert_counts)


@pytest.mark.parametrize("num_gpu_ranks", [0, 1])
def test_experts_move_between_a_rank_and_the_slices_of_others(
    checkpoints: dict[str, TinyCheckpoint], num_gpu_ranks: int
) -> None:
    checkpoint = checkpoints["qwen3-moe-some-dense"]
    group = RankGroup(checkpoint.directory, MIXED, num_gpu_ranks=num_gpu_ranks)
    layers = group.requests[0].config.expert_layers
    orders = [(4, 1, 0, 2, 3, 5) if layer in layers else () for layer in range(group.plan.num_layers)]
    plan = replace(group.plan, expert_orders=tuple(orders))
    builder = PlanBuilder(group)
    assert len(move(group, builder, plan)) == 3
    assert set(plan.experts_of(0, layers[0])) == {1, 4}
    assert set(plan.experts_of(1, layers[0])) == set(range(NUM_EXPERTS)) - {1, 4}
    logits, tokens = completed(builder)
    expected = checkpoint.logits(tokens[:-1])[-len(logits) :]
    assert (torch.stack(logits) - expected).abs().max() <= TOLERANCE
