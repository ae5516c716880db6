"""Models with experts, sliding windows or capped scores: every way of a sequence to the cache, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hetero_api.model_config import ModelConfig
from hetero_worker.layers.moe import ExpertMlp
from tests.support.rank_group import PlanBuilder, RankGroup, Shares, StepOutcome
from tests.support.rank_shares import layers_on
from tests.support.stages import Stages
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, edit_config, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
BLOCK_SIZE = 4
NUM_LAYERS = 4
LAYOUTS = {
    "one rank": Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),)),
    "three ranks": Shares(
        kv_heads=((1, 0, 7),), mlp_columns=((0, 20, 30),), vocab_rows=(64, 64, 72), experts=((0, 5, 1),)
    ),
}
STAGES = {
    "2 stages": layers_on(0, 1, 1, 1, world_size=2),
    "4 stages": layers_on(0, 1, 2, 3, world_size=4),
    "2+1 ranks": Shares(
        kv_heads=((5, 3, 0), (5, 3, 0), (0, 0, 8)),
        mlp_columns=((17, 33, 0), (17, 33, 0), (0, 0, 50)),
        experts=((0, 6, 0), (5, 1, 0), (0, 0, 6)),
        vocab_rows=(0, 0, VOCAB_SIZE),
        embedding_rows=(64, 136, 0),
    ),
}
STATEFUL = ("qwen3-next-odd", "qwen3.5", "qwen3.5-moe")
"""Variants with layers that keep a state of each sequence."""
VARIANTS = (
    "mixtral-window", "qwen3-moe-some-dense", "gemma2", "gemma3", "smollm3-window", "glm4-moe-grouped", "gpt-oss",
    "minimax-m2", "deepseek-v3", "gemma4-moe", "gemma4-readers", *STATEFUL,
)  # fmt: skip
MORE_VARIANTS = ("glm4", "glm4-moe-lite-direct", "qwen2-window", "qwen3", "mistral", "llama")
"""Made of parts that the others have; `make test-all` tries them."""
ALL = (*VARIANTS, *(pytest.param(variant, marks=pytest.mark.extended) for variant in MORE_VARIANTS))
IN_STAGES = tuple("gemma4-inputs" if variant == "gemma4-readers" else variant for variant in ALL)
"""Layers that read other layers' keys and values are on the same rank as these."""


@pytest.fixture(scope="module", params=ALL)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(params=LAYOUTS)
def builder(checkpoint: TinyCheckpoint, request: pytest.FixtureRequest) -> PlanBuilder:
    group = RankGroup(checkpoint.directory, LAYOUTS[request.param], block_size=BLOCK_SIZE, num_snapshots=3)
    return PlanBuilder(group)


def _prompt(length: int, *, seed: int = 1) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % VOCAB_SIZE for i in range(length)]


def _check(outcome: StepOutcome, builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    """Every draw's logits are those of its whole sequence, drawn token excluded."""
    assert outcome.sampled
    for row, (slot, _) in enumerate(outcome.sampled):
        expected = checkpoint.logits(builder.sequences[slot].tokens[:-1])[-1]
        assert (outcome.logits[row] - expected).abs().max() <= TOLERANCE, f"slot {slot}"


@pytest.mark.parametrize("chunk", [*(pytest.param(tokens, marks=pytest.mark.extended) for tokens in (1, 3, 4)), 7])
def test_chunked_prefill_and_decode_equal_the_whole(
    builder: PlanBuilder, checkpoint: TinyCheckpoint, chunk: int
) -> None:
    prompt = _prompt(17)
    builder.start(0, prompt)
    for _ in range(-(-len(prompt) // chunk)):
        builder.schedule(0, chunk)
        outcome = builder.run()
    _check(outcome, builder, checkpoint)
    for _ in range(3):
        builder.schedule(0)
        _check(builder.run(), builder, checkpoint)


def test_a_prefix_hit_reads_another_sequences_blocks(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    common = _prompt(3 * BLOCK_SIZE)
    keeps_states = ModelConfig.from_directory(checkpoint.directory).delta is not None
    builder.start(0, [*common, 5, 6])
    builder.schedule(0, snapshots={len(common): 2, len(common) + 1: 0} if keeps_states else None)
    builder.run()
    builder.start(1, [*common, 9, 8, 7], shared_blocks=builder.sequences[0].blocks[:3])
    builder.schedule(1, from_snapshot=2 if keeps_states else None)
    builder.schedule(0)
    _check(builder.run(), builder, checkpoint)


def test_a_mixed_batch_and_a_recomputed_sequence(builder: PlanBuilder, checkpoint: TinyCheckpoint) -> None:
    for slot, length in {0: 6, 1: 19}.items():
        builder.start(slot, _prompt(length, seed=slot + 2))
        builder.schedule(slot)
    _check(builder.run(), builder, checkpoint)
    builder.start(2, _prompt(13, seed=9))
    for slot, count in {2: 7, 0: None, 1: None}.items():
        builder.schedule(slot, count)
    _check(builder.run(), builder, checkpoint)
    tokens = list(builder.sequences[1].tokens)
    builder.release(1)
    builder.start(1, tokens)
    for slot in (2, 1, 0):
        builder.schedule(slot)
    _check(builder.run(), builder, checkpoint)


@pytest.mark.parametrize("checkpoint", IN_STAGES, indirect=True)
@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("num_parts", [pytest.param(1, marks=pytest.mark.extended), 3])
def test_layers_on_different_ranks_compute_the_same(checkpoint: TinyCheckpoint, layout: str, num_parts: int) -> None:
    stages = Stages.load(checkpoint.directory, STAGES[layout], num_parts=num_parts)
    prompt = _prompt(13)
    expected = checkpoint.logits(prompt)
    sequence = stages.start(prompt)
    for count in (7, 1, 5):
        begin = sequence.computed
        got = stages.logits((sequence, count))
        assert (got - expected[begin : begin + count]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("num_parts", [1, 3])
def test_layers_that_read_others_keys_and_values_compute_beside_them(tmp_path: Path, num_parts: int) -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    checkpoint = save_tiny("gemma4-readers", tmp_path, num_hidden_layers=6, layer_types=kinds)
    stages = Stages.load(checkpoint.directory, layers_on(0, 0, 1, 1, 1, 1, world_size=2), num_parts=num_parts)
    assert [cache is not None for cache in stages.caches[1]] == [False, False, True, True, False, False]
    prompt = _prompt(13)
    expected, sequence = checkpoint.logits(prompt), stages.start(prompt)
    for begin, count in ((0, 7), (7, 1), (8, 5)):
        got = stages.logits((sequence, count))
        assert (got - expected[begin : begin + count]).abs().max() <= TOLERANCE


WRONG_SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "a window too wide": ("gemma2", {"sliding_window": 6}),
    "a window too narrow": ("mistral-window", {"sliding_window": 4}),
    "no window": ("mixtral-window", {"sliding_window": None}),
    "windows in other layers": ("gemma3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "another scale": ("gemma2", {"query_pre_attn_scalar": 21}),
    "scores capped elsewhere": ("gemma2", {"attn_logit_softcapping": 4.2}),
    "scores not capped": ("gemma2", {"attn_logit_softcapping": None}),
    "logits not capped": ("gemma2", {"final_logit_softcapping": None}),
    "rotations of full attention in all layers": ("gemma3", {"rope_parameters": {"rope_theta": 5000.0}}),
    "one expert less": ("mixtral-window", {"num_experts_per_tok": 2}),
    "all layers rotated": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    "whole heads rotated": ("glm4", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
    "groups of experts left out": ("glm4-moe-grouped", {"n_group": 1, "topk_group": 1}),
    "experts not scaled": ("glm4-moe-grouped", {"routed_scaling_factor": 1.0}),
    "pairs that do not lie side by side": ("deepseek-v3", {"rope_interleave": False}),
    "scores of long contexts": ("deepseek-v3-yarn", {"rope_parameters": {"rope_theta": 1000.0}}),
    "frequencies of short contexts": ("gpt-oss", {"rope_parameters": {"rope_theta": 1000.0}}),
    "values made by keys": ("gemma4-values", {"attention_k_eq_v": True}),
    "all pairs of a head rotated": ("gemma4", {"rope_parameters": None}),
    "whole heads rotated beside gates": (
        "qwen3-next",
        {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ),
    "weights of experts normalised": ("qwen3-moe-some-dense", {"norm_topk_prob": True}),
}


@pytest.mark.parametrize("case", WRONG_SWITCHES)
def test_a_wrong_switch_is_seen(tmp_path: Path, case: str) -> None:
    """The tests above are tight enough for each of these."""
    variant, change = WRONG_SWITCHES[case]
    checkpoint = save_tiny(variant, tmp_path, num_hidden_layers=NUM_LAYERS)
    edit_config(checkpoint.directory, **change)
    stages, prompt = Stages.load(checkpoint.directory, LAYOUTS["one rank"]), _prompt(13)
    got = stages.logits((stages.start(prompt), len(prompt)))
    assert (got - checkpoint.logits(prompt)).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("fault", ["dropped", "counted twice", "swapped"])
def test_a_fault_of_one_expert_is_seen(tmp_path: Path, fault: str) -> None:
    checkpoint = save_tiny("qwen3-moe-some-dense", tmp_path, num_hidden_layers=NUM_LAYERS)
    stages, prompt = Stages.load(checkpoint.directory, LAYOUTS["three ranks"]), _prompt(13)
    mlp = stages.decoders[1]._layers[2].mlp
    assert isinstance(mlp, ExpertMlp)
    expert: Any = mlp._experts[0]
    if fault == "swapped":
        mlp._experts[0], mlp._experts[3] = mlp._experts[3], mlp._experts[0]
    else:
        factor = 0.0 if fault == "dropped" else 2.0
        mlp._experts[0] = cast("Any", lambda normed: expert(normed) * factor)
    got = stages.logits((stages.start(prompt), len(prompt)))
    assert (got - checkpoint.logits(prompt)).abs().max() > 10 * TOLERANCE
