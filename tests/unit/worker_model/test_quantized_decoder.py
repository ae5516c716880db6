"""A model whose weights are quantised at load gives the logits of one that has those numbers, on every layout."""

from __future__ import annotations

import copy
from typing import Final

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_worker.backends.cpu import CpuBackend
from hetero_worker.checkpoints.quantized_matrix import quantize
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel
from tests.support.narrow_kernel import NarrowKernel
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE: Final = 1e-4
PROMPT: Final = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]
LAYOUTS: Final = {
    "one rank": Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),)),
    "within groups": Shares(
        kv_heads=((5, 2, 1, 0),), mlp_columns=((31, 13, 6, 0),), vocab_rows=(128, 64, 8, 0), experts=((3, 1, 2, 0),)
    ),
    "helpers": Shares(kv_heads=((8, 0, 0),), mlp_columns=((0, 49, 1),), vocab_rows=(0, 64, 136), experts=((0, 5, 1),)),
}
VARIANTS: Final = ("llama-biased", "qwen3", "qwen3-moe-some-dense", "gemma3", "glm4", "glm4-moe", "minimax-m2")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    return {variant: save_tiny(variant, tmp_path_factory.mktemp(variant)) for variant in VARIANTS}


def _as_quantized(checkpoint: TinyCheckpoint, quantization: str) -> TinyCheckpoint:
    """The reference with its linear layers' and its embedding's weights quantised and widened."""
    config = ModelConfig.from_directory(checkpoint.directory).quantized(quantization)
    assert config.weights.layers is not None
    assert config.weights.vocabulary is not None
    model = copy.deepcopy(checkpoint.reference)
    units = {"o_proj": config.group_size * config.head_dim, "down_proj": 64}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.split(".")[-2]
            is_vocabulary = module in ("embed_tokens", "lm_head")
            if weight.dim() == 1 or module == "gate":
                continue
            weights = config.weights.vocabulary if is_vocabulary else config.weights.layers
            for matrix in weight if weight.dim() == 3 else [weight]:  # experts are stacked
                unit = 0 if weight.dim() == 3 else units.get(module, 0)
                matrix.copy_(quantize(matrix, weights.within(unit)).dequantized())
    return TinyCheckpoint(checkpoint.directory, model)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.extended), "int4"])
def test_logits_are_those_of_the_quantised_numbers_on_every_layout(
    checkpoints: dict[str, TinyCheckpoint],
    variant: str,
    layout: str,
    quantization: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _use(PlainKernel(), monkeypatch)
    _check(_as_quantized(checkpoints[variant], quantization), LAYOUTS[layout], quantization)


@pytest.mark.parametrize("variant", ["qwen3-moe-some-dense", "gemma3"])
def test_a_kernel_that_keeps_weights_narrow_gives_the_same(
    checkpoints: dict[str, TinyCheckpoint], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = NarrowKernel()
    _use(kernel, monkeypatch)
    _check(_as_quantized(checkpoints[variant], "int4"), LAYOUTS["within groups"], "int4")
    assert {matrix.format.bits for matrix in kernel.matrices} >= {4}
    assert all(weight.dtype == torch.float32 for weight in kernel.floats)


def _use(kernel: LinearKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that rounds no inputs: what is looked at here is weights."""
    monkeypatch.setattr(CpuBackend, "linear", lambda *_, **__: kernel)


def _check(checkpoint: TinyCheckpoint, shares: Shares, quantization: str) -> None:
    builder = PlanBuilder(RankGroup(checkpoint.directory, shares, quantization=quantization))
    builder.start(3, PROMPT)
    for _ in range(3):
        expected = checkpoint.logits(builder.sequences[3].tokens)[-1]
        builder.schedule(3)
        assert (builder.run().logits[0] - expected).abs().max() <= TOLERANCE
