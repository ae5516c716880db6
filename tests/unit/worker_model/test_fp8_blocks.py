"""Checkpoints of 8-bit floats in blocks, as DeepSeek-V3 and MiniMax-M2 are published."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, edit_config, save_tiny

pytestmark = pytest.mark.unit

ROWS, COLUMNS = 16, 8
UNEVEN = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
FIELDS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [ROWS, COLUMNS]}
_FLOATS = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight", "bias")


@pytest.fixture(scope="module", params=["deepseek-v3", "minimax-m2"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    """All linear layers in 8 bits, with random scales; the reference has what they stand for."""
    directory = tmp_path_factory.mktemp(request.param)
    saved = save_tiny(request.param, directory)
    path, generator, numbers = directory / "model.safetensors", torch.Generator().manual_seed(0), {}
    tensors = load_file(path)
    for name in [name for name in tensors if not name.endswith(_FLOATS)]:
        scales, weight = blocks_of(tensors[name], generator)
        tensors[name], tensors[f"{name}_scale_inv"] = weight, scales
        numbers[name] = widened(weight, scales)
    save_file(tensors, path)
    edit_config(directory, quantization_config=FIELDS)
    return TinyCheckpoint(directory, _reference(saved, {**load_file(path), **numbers}, tmp_path_factory))


def blocks_of(weight: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and values for them."""
    scales = 0.01 + torch.rand(-(-weight.shape[0] // ROWS), -(-weight.shape[1] // COLUMNS), generator=generator) / 50
    return scales, (weight / spread(scales, weight.shape)).to(torch.float8_e4m3fn)


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(ROWS, 0).repeat_interleave(COLUMNS, 1)[: shape[0], : shape[1]]


def widened(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight.float() * spread(scales, weight.shape)).bfloat16().float()


def _reference(saved: TinyCheckpoint, tensors: dict[str, torch.Tensor], factory: pytest.TempPathFactory) -> Any:
    """transformers' model of the widened numbers."""
    from transformers import AutoModelForCausalLM

    folder = factory.mktemp("widened")
    copy.deepcopy(saved.reference.config).save_pretrained(folder)
    floats = {name: each for name, each in tensors.items() if not name.endswith("_scale_inv")}
    save_file(floats, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.eval()


def test_logits_are_those_of_the_widened_numbers(checkpoint: TinyCheckpoint) -> None:
    assert ModelConfig.from_directory(checkpoint.directory).weights.floats == "bfloat16"
    builder = PlanBuilder(RankGroup(checkpoint.directory, UNEVEN))
    builder.start(0, [7, 150, 3, 88, 199, 0, 42])
    for _ in range(3):
        expected = checkpoint.logits(builder.sequences[0].tokens)[-1]
        builder.schedule(0)
        assert (builder.run().logits[0] - expected).abs().max() <= 1e-4


def save_one(folder: Path, **changes: torch.Tensor) -> torch.Tensor:
    """A matrix of blocks of 16 x 8, the last ones cut off; returns its numbers."""
    scales, weight = blocks_of(torch.randn(40, 30), torch.Generator().manual_seed(1))
    save_file({"w.weight": weight, "w.weight_scale_inv": scales, **changes}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    edit_config(folder, quantization_config=FIELDS)
    return widened(weight, scales)


@pytest.mark.parametrize("rows", [None, UnitRange(3, 37)])
@pytest.mark.parametrize("columns", [None, UnitRange(5, 29)])
def test_any_rectangle_is_read(tmp_path: Path, rows: UnitRange | None, columns: UnitRange | None) -> None:
    expected = save_one(tmp_path)
    part = TensorSlice("w.weight", (40, 30), rows=rows, columns=columns)
    into = torch.empty(part.shape)
    with Checkpoint(tmp_path) as opened:
        assert opened.dtype_of(part) == torch.bfloat16
        opened.read(part, into)
    assert torch.equal(into, expected[slice(*part.row_range), slice(*part.column_range)])


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    save_one(tmp_path, **{"w.weight_scale_inv": torch.ones(3, 3)})
    with Checkpoint(tmp_path) as opened, pytest.raises(ModelError, match=r"w\.weight_scale_inv has shape \[3, 3\]"):
        opened.read(TensorSlice("w.weight", (40, 30)), torch.empty(40, 30))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3, float8_e4m3fn"),
        ({"weight_block_size": None}, "weight_block_size must be two whole numbers, rows and columns, not None"),
        ({"weight_block_size": [128, 0]}, "weight_block_size must be two whole numbers"),
    ],
)
def test_other_kinds_are_named(checkpoint: TinyCheckpoint, tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "config.json").write_text((checkpoint.directory / "config.json").read_text())
    edit_config(tmp_path, quantization_config=FIELDS | change)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_directory(tmp_path)
