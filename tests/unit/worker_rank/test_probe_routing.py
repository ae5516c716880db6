"""What experts cost is measured with as many of them at work as there are on average."""

from __future__ import annotations

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import ExpertsConfig
from hetero_worker.layers.blocks import mlp_norm
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.probe.synthetic import EvenRouter, SyntheticWeights, active_experts, even_choices, even_units

pytestmark = pytest.mark.unit

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "num_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    }
)  # fmt: skip


def shape() -> ExpertsConfig:
    assert CONFIG.experts is not None
    return CONFIG.experts


@pytest.mark.parametrize("own", [1, 2, 5, 16, 31, 32])
@pytest.mark.parametrize("rows", [1, 4, 8, 32, 256])
def test_an_even_choice_has_the_mean_numbers(own: int, rows: int) -> None:
    choices = even_choices(shape(), own=own, rows=rows)
    assert choices.shape == (rows, 4)
    assert choices.min() >= 0
    assert choices.max() < 32
    inside = choices[choices < own]
    active = active_experts(shape(), own=own, rows=rows)
    assert len(set(inside.tolist())) == active
    assert len(inside) == pytest.approx(max(rows * 4 * own / 32, active), abs=0.5)
    per_expert = torch.bincount(inside, minlength=1)[:active]
    assert per_expert.max() - per_expert.min() <= 1


@pytest.mark.parametrize(
    ("own", "rows", "active"), [(32, 1, 4), (16, 1, 2), (2, 1, 1), (32, 256, 32), (16, 8, 11), (1, 1, 1)]
)
def test_active_experts_are_those_of_the_mean(own: int, rows: int, active: int) -> None:
    assert active_experts(shape(), own=own, rows=rows) == active


def test_units_make_up_for_rounding() -> None:
    assert even_units(shape(), own=16, rows=1) == pytest.approx(16)
    assert even_units(shape(), own=2, rows=1) == pytest.approx(8), "one active expert is what 8 experts have on average"
    assert even_units(shape(), own=16, rows=10_000) == pytest.approx(16)


def test_a_layer_of_experts_follows_the_even_router() -> None:
    mlp = ExpertMlp(
        CONFIG, 0, range(16), norm=mlp_norm(CONFIG, 0), make_router=lambda *given: EvenRouter(*given, own=16)
    )
    mlp.load(SyntheticWeights(), dtype=torch.float32, kernel=PlainKernel())
    for _ in range(3):
        mlp(torch.randn(1, 64))
        assert [n for n in mlp.take_counts() if n] == [1, 1]
    mlp(torch.randn(64, 64))
    assert sum(mlp.take_counts()) == 128
