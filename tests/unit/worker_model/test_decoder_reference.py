"""Logits equal transformers' in float32, for every switch of the model family and every layout."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hetero_api.model_config import ModelConfig
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import VARIANTS, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4

LAYOUTS = {
    "one rank": Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),)),
    "uneven": Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),)),
    "5:2:1:0": Shares(
        kv_heads=((5, 2, 1, 0),), mlp_columns=((31, 13, 6, 0),), vocab_rows=(128, 64, 8, 0), experts=((3, 1, 2, 0),)
    ),
    "first rank idle": Shares(kv_heads=((0, 8),), mlp_columns=((0, 50),), vocab_rows=(0, 200), experts=((0, 6),)),
    "mlp elsewhere": Shares(
        kv_heads=((8, 0, 0),), mlp_columns=((0, 49, 1),), vocab_rows=(0, 64, 136), experts=((0, 5, 1),)
    ),
    "helpers of two holders": Shares(
        kv_heads=((5, 3, 0, 0),), mlp_columns=((9, 20, 0, 21),), vocab_rows=(64, 0, 64, 72), experts=((1, 0, 3, 2),)
    ),
    "the leader has no experts": Shares(
        kv_heads=((0, 5, 3),), mlp_columns=((30, 0, 20),), vocab_rows=(0, 200, 0), experts=((4, 0, 2),)
    ),
    "layers of stages": Shares(
        kv_heads=((8, 0), (3, 5), (0, 8)),
        mlp_columns=((50, 0), (0, 50)),
        vocab_rows=(192, 8),
        experts=((6, 0), (2, 4), (0, 6)),
    ),
}

CURRENT = (
    "smollm3",
    "glm4",
    "glm4-moe-grouped",
    "gpt-oss",
    "minimax-m2",
    "deepseek-v3",
    "deepseek-v3-yarn",
    "glm4-moe-lite",
    "gemma4",
    "gemma4-moe",
    "gemma4-readers",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
)
"""Architectures with parts that others do not have."""
MORE_CURRENT = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3")
"""The older ones; `make test-all` tries them."""
EVERY_LAYOUT = (
    "llama-biased", "qwen3", "qwen3-moe-some-dense", "gemma3", "glm4-moe", "gpt-oss", "minimax-m2", "deepseek-v3",
    "gemma4-moe", "gemma4-inputs", "gemma4-readers",
    "qwen3-next-odd",
)  # fmt: skip
MORE_IN_EVERY_LAYOUT = (
    "mistral-window", "mixtral-window", "qwen2-window", "gemma2", "smollm3-window", "glm4", "glm4-moe-lite",
    "qwen3.5-odd", "qwen3.5-moe",
)  # fmt: skip
"""Made of parts that the others have; `make test-all` tries them."""
ODD_HEADS = (
    "mistral-window", "gpt-oss", "glm4-moe", "minimax-m2", "smollm3", "glm4", "qwen3-next", "qwen3.5",
    "qwen3.5-moe", "gemma4", "gemma4-moe", "deepseek-v3", "glm4-moe-lite",
)  # fmt: skip
MORE_ODD_HEADS = ("llama", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3")
HEADS = [(15, 3), (3, 3), (10, 2)]
"""Query and KV heads: groups of five and of one. Latent attention has as many of both."""
OTHER_LAYOUTS = [name for name in LAYOUTS if name not in ("one rank", "5:2:1:0")]
REFUSED = {("gemma4-readers", "layers of stages")}
"""Layers that read other layers' keys and values have to be with them (tests/unit/api/test_sharding.py)."""
PROMPT = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    return {variant: save_tiny(variant, tmp_path_factory.mktemp(variant)) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [pytest.param("one rank", marks=pytest.mark.extended), "5:2:1:0"])
def test_logits_equal_the_reference_for_every_variant(
    checkpoints: dict[str, TinyCheckpoint], variant: str, layout: str
) -> None:
    _check_prefill_and_decode(checkpoints[variant], LAYOUTS[layout])


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        pytest.param(variant, layout, marks=[pytest.mark.extended] if variant in MORE_IN_EVERY_LAYOUT else [])
        for variant in (*EVERY_LAYOUT, *MORE_IN_EVERY_LAYOUT)
        for layout in OTHER_LAYOUTS
        if (variant, layout) not in REFUSED
    ],
)
def test_logits_equal_the_reference_for_every_layout(
    checkpoints: dict[str, TinyCheckpoint], variant: str, layout: str
) -> None:
    _check_prefill_and_decode(checkpoints[variant], LAYOUTS[layout])


@pytest.mark.parametrize(
    "variant", [*ODD_HEADS, *(pytest.param(variant, marks=pytest.mark.extended) for variant in MORE_ODD_HEADS)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [pytest.param(*HEADS[0], marks=pytest.mark.extended), *HEADS[1:]])
def test_logits_equal_the_reference_with_few_or_odd_heads(
    tmp_path: Path, variant: str, heads: int, kv_heads: int
) -> None:
    """Dealt 2:1:0, or 1:1 where that comes out even."""
    # Transformers wants a multiple of all these numbers of heads for Llama.
    of_model: dict[str, Any] = {"hidden_size": 30, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if variant.startswith(("qwen3-next", "qwen3.5")):
        of_model |= {"linear_num_key_heads": kv_heads, "linear_num_value_heads": 2 * kv_heads}
    if variant.startswith("gemma4"):
        of_model |= {"num_global_key_value_heads": kv_heads}
    if variant in ("deepseek-v3", "glm4-moe-lite"):
        kv_heads = of_model["num_key_value_heads"] = heads
    _check_prefill_and_decode(save_tiny(variant, tmp_path, **of_model), _dealt(kv_heads))


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("glm4-moe", {"n_shared_experts": 0}),
        ("deepseek-v3", {"n_shared_experts": 0}),
        ("deepseek-v3", {"n_shared_experts": 1, "first_k_dense_replace": 0}),
        ("glm4-moe-lite", {"n_shared_experts": 0, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        ("glm4-unbiased", {}),
        ("qwen3.5-moe-odd", {}),
    ],
)
@pytest.mark.parametrize("kv_heads", [pytest.param(3, marks=pytest.mark.extended), 2])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_logits_equal_the_reference_in_other_configurations(
    tmp_path: Path, variant: str, changes: dict[str, Any], kv_heads: int
) -> None:
    """Without shared experts, without dense layers, and second ones; dealt 2:1:0 or 1:1."""
    of_model = {**changes, "num_attention_heads": kv_heads, "num_key_value_heads": kv_heads}
    _check_prefill_and_decode(save_tiny(variant, tmp_path, **of_model), _dealt(kv_heads))


@pytest.mark.parametrize(
    "variant", [*CURRENT, *(pytest.param(variant, marks=pytest.mark.extended) for variant in MORE_CURRENT)]
)
@pytest.mark.parametrize("way", ["torch on host cores", "a GPU and host cores", "batch-invariant torch"])
def test_logits_equal_the_reference_whatever_computes(
    checkpoints: dict[str, TinyCheckpoint], variant: str, way: str
) -> None:
    _check_prefill_and_decode(
        checkpoints[variant],
        LAYOUTS["uneven"],
        native="torch" not in way,
        num_gpu_ranks=1 if "GPU" in way else 0,
        batch_invariant="invariant" in way,
    )


@pytest.mark.parametrize(
    "variant", ["llama", "gemma2", "gemma3", "gemma4-moe", "mixtral", "glm4", "gpt-oss", "deepseek-v3"]
)
def test_bfloat16_is_as_close_to_float32_as_the_references_own_bfloat16(
    checkpoints: dict[str, TinyCheckpoint], variant: str
) -> None:
    checkpoint = checkpoints[variant]
    rounded = TinyCheckpoint(checkpoint.directory, copy.deepcopy(checkpoint.reference).bfloat16())
    builder = PlanBuilder(RankGroup(checkpoint.directory, LAYOUTS["uneven"], dtype="bfloat16"))
    errors, allowed = 0.0, 0.0
    # Several prompts: a near tie of two experts may go the other way in one.
    for slot, factor in enumerate((1, 5, 7, 8, 11, 13, 15)):
        builder.start(slot, [token * factor % 200 for token in PROMPT])
        for _ in range(2):
            builder.schedule(slot)
            tokens = list(builder.sequences[slot].tokens)
            exact = checkpoint.logits(tokens)[-1]
            allowed += 2 * float((rounded.logits(tokens)[-1] - exact).abs().mean())
            errors += float((builder.run().logits[0] - exact).abs().mean())
    assert errors <= allowed


def test_weights_in_several_files_load_the_same(tmp_path: Path) -> None:
    checkpoint = save_tiny("qwen2", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _check_prefill_and_decode(checkpoint, LAYOUTS["uneven"])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_that_are_stacked_load_the_same(tmp_path: Path, quantization: str) -> None:
    """As Qwen3.5 is published with floats: two tensors of all experts of a layer."""
    one_by_one, stacked = (
        save_tiny("qwen3.5-moe", tmp_path / name, stacks_experts=name == "stacked") for name in ("each", "stacked")
    )
    with safe_open(stacked.directory / "model.safetensors", framework="pt") as file:
        assert [*file.get_slice("model.layers.0.mlp.experts.gate_up_proj").get_shape()] == [6, 40, 32]
    if quantization == "none":
        _check_prefill_and_decode(stacked, LAYOUTS["uneven"])
    logits = []
    for checkpoint in (one_by_one, stacked):
        builder = PlanBuilder(RankGroup(checkpoint.directory, LAYOUTS["uneven"], quantization=quantization))
        builder.start(0, PROMPT)
        builder.schedule(0)
        logits.append(builder.run().logits)
    assert torch.equal(*logits)


def test_a_dropped_contribution_would_be_seen(checkpoints: dict[str, TinyCheckpoint]) -> None:
    """The tolerance is tight enough to notice one missing MLP column."""
    checkpoint = checkpoints["llama"]
    with torch.no_grad():
        weight = checkpoint.reference.model.layers[1].mlp.down_proj.weight
        kept = weight[:, 49].clone()
        weight[:, 49] = 0
        damaged = checkpoint.logits(PROMPT)[-1]
        weight[:, 49] = kept
    assert (damaged - checkpoint.logits(PROMPT)[-1]).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_they_are_stored(checkpoints: dict[str, TinyCheckpoint], variant: str) -> None:
    with safe_open(checkpoints[variant].directory / "model.safetensors", framework="pt") as file:
        names = file.keys()
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    assert ModelConfig.from_directory(checkpoints[variant].directory).num_parameters == stored


def _check_prefill_and_decode(checkpoint: TinyCheckpoint, shares: Shares, **options: Any) -> None:
    builder = PlanBuilder(RankGroup(checkpoint.directory, shares, **options))
    builder.start(3, PROMPT)
    for _ in range(4):
        expected = checkpoint.logits(builder.sequences[3].tokens)[-1]
        builder.schedule(3)
        outcome = builder.run()
        assert (outcome.logits[0] - expected).abs().max() <= TOLERANCE
        (sampled,) = outcome.sampled
        assert sampled.slot == 3
        assert expected[sampled.token] >= expected.max() - TOLERANCE


def _dealt(kv_heads: int) -> Shares:
    """1:1 or 2:1:0 of all units."""
    if kv_heads % 2 == 0:
        return Shares(((kv_heads // 2,) * 2,), mlp_columns=((25, 25),), vocab_rows=(100, 100), experts=((3, 3),))
    return Shares(
        ((kv_heads * 2 // 3, kv_heads // 3, 0),),
        mlp_columns=((33, 17, 0),),
        vocab_rows=(136, 64, 0),
        experts=((4, 2, 0),),
    )
