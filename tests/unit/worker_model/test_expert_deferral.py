"""Experts that come a layer late: what helpers owe is added once, in the next layer, as the reference does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hetero_api.errors import ModelError
from tests.support.deferred_reference import deferring
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.stages import Stages
from tests.support.tiny_checkpoints import NUM_EXPERTS, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

NUM_LAYERS = 4
PROMPT = (7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127)
TOLERANCE = 1e-4
ALL = frozenset(range(NUM_EXPERTS))
ON_HELPERS = frozenset({2, 3, 4, 5})


@dataclass(frozen=True, slots=True)
class Layout:
    shares: Shares
    late: dict[int, frozenset[int]]
    """Experts on helpers, by layer; without the last layers of stages."""


HELPED = Layout(
    Shares(kv_heads=((8, 0, 0),), mlp_columns=((20, 15, 15),), vocab_rows=(200, 0, 0), experts=((2, 1, 3),)),
    dict.fromkeys(range(3), ON_HELPERS),
)
LAYOUTS = {
    "helped": HELPED,
    "all experts on one helper": Layout(
        Shares(kv_heads=((8, 0),), mlp_columns=((50, 0),), vocab_rows=(200, 0), experts=((0, 6),)),
        dict.fromkeys(range(3), ALL),
    ),
    "slices": Layout(
        Shares(
            kv_heads=((8, 0, 0),), mlp_columns=((50, 0, 0),), vocab_rows=(200, 0, 0), experts=((1, 0, 0),),
            expert_slices=(0, 1, 3),
        ),
        dict.fromkeys(range(3), ALL - {0}),
    ),
    "one helps two stages": Layout(
        Shares(
            kv_heads=((8, 0, 0), (8, 0, 0), (0, 8, 0)), mlp_columns=((40, 0, 10), (40, 0, 10), (0, 40, 10)),
            vocab_rows=(64, 64, 72), experts=((2, 0, 4), (2, 0, 4), (0, 2, 4)),
        ),
        {0: ON_HELPERS, 2: ON_HELPERS},
    ),
}  # fmt: skip
VARIANTS = ("qwen3-moe", "qwen3-moe-some-dense", "deepseek-v3")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    """With weights that are small enough for the tolerance."""
    return {
        variant: save_tiny(
            variant, tmp_path_factory.mktemp(variant), initializer_range=0.15, num_hidden_layers=NUM_LAYERS
        )
        for variant in VARIANTS
    }


def late_of(checkpoint: TinyCheckpoint, layout: Layout) -> dict[int, frozenset[int]]:
    """Layers of the model that have experts, as the next one has."""
    has_experts = [hasattr(layer.mlp, "experts") for layer in checkpoint.reference.model.layers]
    return {i: experts for i, experts in layout.late.items() if has_experts[i] and has_experts[i + 1]}


def completed(group: RankGroup, *, chunk: int | None = None) -> tuple[torch.Tensor, list[int]]:
    """Logits of a greedy completion of PROMPT, whose first `chunk` tokens go first, and all tokens."""
    builder, logits, tokens = PlanBuilder(group), [], list(PROMPT)
    builder.start(0, PROMPT)
    if chunk is not None:
        builder.schedule(0, chunk)
        builder.run()
    for _ in range(4):
        builder.schedule(0)
        outcome = builder.run()
        logits.append(outcome.logits[0])
        tokens.append(outcome.sampled[0].token)
    return torch.stack(logits), tokens


CASES = [("qwen3-moe", layout, native) for layout in LAYOUTS for native in (True, False)]
CASES += [(variant, layout, True) for variant in VARIANTS[1:] for layout in ("helped", "one helps two stages")]


@pytest.mark.parametrize(("variant", "layout", "native"), CASES)
def test_logits_are_those_of_the_reference_that_adds_them_late(
    checkpoints: dict[str, TinyCheckpoint], variant: str, layout: str, *, native: bool
) -> None:
    """GPU ranks are played; the third decode step is the first that is replayed."""
    checkpoint, case = checkpoints[variant], LAYOUTS[layout]
    num_gpu_ranks = 2 if layout == "one helps two stages" else 1
    for number in (1, 2):
        group = RankGroup(
            checkpoint.directory, case.shares, num_gpu_ranks=num_gpu_ranks, native=native, expert_deferral=number
        )
        logits, tokens = completed(group, chunk=5)
        with deferring(checkpoint.reference, late_of(checkpoint, case), number):
            expected = checkpoint.logits(tokens[:-1])[-len(logits) :]
        assert (logits - expected).abs().max() <= TOLERANCE
        assert (checkpoint.logits(tokens[:-1])[-len(logits) :] - expected).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("link_rows", [1, 2, 5])
def test_many_slices_and_micro_batches_owe_their_own_rows(
    checkpoints: dict[str, TinyCheckpoint], link_rows: int
) -> None:
    """However little a link holds, and in two stages."""
    checkpoint, case = checkpoints["qwen3-moe"], LAYOUTS["one helps two stages"]
    link_bytes = link_rows * checkpoint.reference.config.hidden_size * torch.float32.itemsize
    stages = Stages.load(checkpoint.directory, case.shares, num_parts=3, link_bytes=link_bytes, expert_deferral=2)
    tokens = [*PROMPT, *PROMPT[::-1]]
    logits = stages.logits((stages.start(tokens), len(tokens)))
    with deferring(checkpoint.reference, case.late, 2):
        assert (logits - checkpoint.logits(tokens)).abs().max() <= TOLERANCE


def test_it_costs_no_message_and_no_round(checkpoints: dict[str, TinyCheckpoint]) -> None:
    traffic = []
    for number in (0, 2):
        stages = Stages.load(checkpoints["qwen3-moe"].directory, HELPED.shares, expert_deferral=number)
        stages.logits((stages.start(list(PROMPT)), len(PROMPT)))
        traffic.append([exchange.traffic for exchange in stages.exchanges])
    assert traffic[0] == traffic[1]


def test_a_token_gets_the_same_however_its_prompt_is_cut(checkpoints: dict[str, TinyCheckpoint]) -> None:
    """Late sums of few rows are computed afterwards, those of many rows at once."""
    directory = checkpoints["qwen3-moe"].directory
    groups = [RankGroup(directory, HELPED.shares, expert_deferral=2, num_gpu_ranks=1) for _ in range(3)]
    whole, *cut = [completed(group, chunk=chunk)[0] for group, chunk in zip(groups, (None, 9, 10), strict=True)]
    for logits in cut:
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)


def test_helpers_defer_in_all_layers_of_a_stage_but_the_last(checkpoints: dict[str, TinyCheckpoint]) -> None:
    config = RankGroup(checkpoints["qwen3-moe"].directory, HELPED.shares).requests[0].config
    whole = Shares(kv_heads=((5, 3),), mlp_columns=((25, 25),), vocab_rows=(100, 100), experts=((3, 3),))
    found = {
        name: [plan.deferring_layers(rank) for rank in range(plan.world_size)]
        for name, plan in {
            "helped": HELPED.shares.plan_for(config),
            "stages": LAYOUTS["one helps two stages"].shares.plan_for(config),
            "all hold heads": whole.plan_for(config),
        }.items()
    }
    assert found == {"helped": [(), (0, 1, 2), (0, 1, 2)], "stages": [(), (), (0, 2)], "all hold heads": [(), ()]}


def test_weights_that_were_loaded_for_another_number_are_not_kept(checkpoints: dict[str, TinyCheckpoint]) -> None:
    group = RankGroup(checkpoints["qwen3-moe"].directory, HELPED.shares, expert_deferral=1)
    request = group.requests[1]
    assert group.runners[1].load(request).load_s == 0
    assert group.runners[1].load(replace(request, expert_deferral=2)).load_s > 0


@pytest.mark.parametrize(
    ("variant", "number", "problem"),
    [
        ("llama", 1, "the model has no experts"),
        ("qwen3-moe", 3, "of the 3 experts of a token, one of which must not be late; use 2 at most"),
        ("gemma4-moe", 1, "the model norms sums of experts"),
    ],
)
def test_what_cannot_be_deferred_is_refused_by_name(tmp_path: Path, variant: str, number: int, problem: str) -> None:
    checkpoint = save_tiny(variant, tmp_path)
    with pytest.raises(ModelError, match=rf"spec\.engine\.expertDeferral: {number}.*{problem}"):
        RankGroup(checkpoint.directory, HELPED.shares, expert_deferral=number)
