"""Adapters that cannot be served are refused before anything of them is read, by file and by field or tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.model_directory import ADAPTER_CONFIG, ADAPTER_TENSORS
from hetero_api.sharding import UnitRange
from hetero_worker.adapters.peft_files import LoraAdapter
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.models.decoder_layer import adapter_targets
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

TARGETS = {"model.layers.0.self_attn.q_proj": (6, 4), "model.layers.0.mlp.down_proj": (4, 8)}
DOWN, UP = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "bias": "none"}


def write(directory: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """An adapter of one module; fields and tensors replace its own, None leaves a tensor out."""
    own = {DOWN: torch.arange(8.0).view(2, 4), UP: torch.arange(12.0).view(6, 2)}
    kept = {name: tensor for name, tensor in (own | tensors).items() if tensor is not None}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(CONFIG | (config or {})))
    save_file(kept, directory / ADAPTER_TENSORS)
    return directory


def opened(directory: Path, **bounds: int) -> frozenset[str]:
    with LoraAdapter(directory, TARGETS, **bounds) as adapter:
        return adapter.modules


def test_a_slice_gets_its_rows_of_the_one_factor_and_its_columns_of_the_other(tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj.weight"
    with LoraAdapter(write(tmp_path), TARGETS) as adapter:
        rows = adapter.factors(TensorSlice(module, (6, 4), rows=UnitRange(1, 3)))
        columns = adapter.factors(TensorSlice(module, (6, 4), columns=UnitRange(2, 4)))
        other = adapter.factors(TensorSlice("model.layers.0.mlp.down_proj.weight", (4, 8)))
    assert other is None
    assert rows is not None
    assert columns is not None
    assert rows.down.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows.up.tolist() == [[3, 4.5], [6, 7.5]], "with the scaling 3 / 2"
    assert columns.down.tolist() == [[2, 3], [6, 7]]
    assert columns.up.shape == (6, 2)


@pytest.mark.parametrize("part", ["model.language_model", "language_model.model"])
def test_factors_of_the_text_part_of_a_model_of_several_media_are_read(tmp_path: Path, part: str) -> None:
    own = load_file(write(tmp_path) / ADAPTER_TENSORS)
    renamed = {name.replace("model.layers", f"{part}.layers"): tensor.clone() for name, tensor in own.items()}
    save_file(renamed, tmp_path / ADAPTER_TENSORS)
    with LoraAdapter(tmp_path, TARGETS) as adapter:
        found = adapter.factors(TensorSlice("model.layers.0.self_attn.q_proj.weight", (6, 4)))
    assert found is not None
    assert torch.equal(found.down, own[DOWN])
    save_file(own | renamed, tmp_path / ADAPTER_TENSORS)
    with pytest.raises(ModelError, match="factors of a module by two names"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"), ("r", 0), ("r", 257), ("r", "8"), ("r", True), ("lora_alpha", -1), ("bias", "all"),
        ("lora_alpha", float("nan")), ("use_dora", True), ("lora_bias", True), ("fan_in_fan_out", True),
        ("modules_to_save", ["lm_head"]), ("rank_pattern", {"q_proj": 4}), ("alpha_pattern", {"q_proj": 4}),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]), ("init_lora_weights", "pissa"), ("use_qalora", True),
        ("alora_invocation_tokens", [5]), ("of_a_later_peft", {"x": 1}),
    ],
)  # fmt: skip
def test_a_config_that_means_something_else_is_refused_by_its_field(tmp_path: Path, field: str, value: object) -> None:
    write(tmp_path, {field: value})
    with pytest.raises(ModelError, match=rf"{ADAPTER_CONFIG}: {field}: "):
        opened(tmp_path)


def test_a_rank_beyond_what_memory_is_kept_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"r: 2 is more than the 1 .*spec\.engine\.adapters\.maxRank"):
        opened(write(tmp_path), max_rank=1)


ROUTER = "base_model.model.model.layers.0.mlp.gate.lora_A.weight"
IMAGES = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight"
MAGNITUDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (UP, None, "is missing"),
        (DOWN, None, "is missing"),
        (UP, torch.zeros(6, 3), r"has shape \[6, 3\].*\[6, 2\]"),
        (DOWN, torch.zeros(2, 5), r"has shape \[2, 5\].*\[2, 4\]"),
        (DOWN, torch.zeros(2, 4, dtype=torch.float64), "is stored as F64"),
        (DOWN, torch.zeros(2, 4, dtype=torch.int8), "is stored as I8"),
        (ROUTER, torch.zeros(2, 4), r"model\.layers\.0\.mlp\.gate takes no adapter.*down_proj, q_proj"),
        (IMAGES, torch.zeros(2, 4), r"vision_tower.* takes no adapter"),
        (MAGNITUDE, torch.zeros(6), "is no LoRA factor"),
        (EMBEDDING, torch.zeros(2, 4), "is no LoRA factor"),
    ],
)
def test_a_file_with_other_tensors_is_refused_by_the_tensor(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, problem: str
) -> None:
    write(tmp_path, None, **{name: tensor})
    with pytest.raises(ModelError, match=rf"{ADAPTER_TENSORS}: {name}: .*{problem}"):
        opened(tmp_path)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    write(tmp_path, None, **{UP: torch.full((6, 2), number)})
    with LoraAdapter(tmp_path, TARGETS) as adapter, pytest.raises(ModelError, match=rf"{UP}: .*not finite"):
        adapter.factors(TensorSlice("model.layers.0.self_attn.q_proj.weight", (6, 4)))


def test_files_that_are_missing_damaged_or_lie_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{ADAPTER_CONFIG}: cannot be read"):
        opened(tmp_path)
    write(tmp_path)
    whole = (tmp_path / ADAPTER_TENSORS).read_bytes()
    for damaged in (b"", whole[:-1], b"\xff" * 8 + whole[8:], whole[:8] + b"{" + whole[9:-1]):
        (tmp_path / ADAPTER_TENSORS).write_bytes(damaged)
        with pytest.raises(ModelError, match=ADAPTER_TENSORS):
            opened(tmp_path)
    (tmp_path / ADAPTER_CONFIG).unlink()
    (tmp_path / ADAPTER_CONFIG).symlink_to("/etc/hostname")
    with pytest.raises(ModelError, match="outside the model directory"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        ("llama-tied", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3-moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("glm4", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("deepseek-v3-dense", {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_modules_that_take_adapters_follow_from_the_model(tmp_path: Path, variant: str, kinds: set[str]) -> None:
    """Experts and latent attention take none."""
    targets = adapter_targets(ModelConfig.from_directory(save_tiny(variant, tmp_path).directory))
    assert {name.rpartition(".")[2] for name in targets} == kinds


STACK = "base_model.model.model.layers.0.mlp.experts"
OF_EXPERTS = {
    f"model.layers.0.mlp.experts.{number}.{name}": shape
    for number in range(3)
    for name, shape in (("gate_proj", (5, 4)), ("up_proj", (5, 4)), ("down_proj", (4, 5)))
}


def stack(module: str, down: tuple[int, int], up: tuple[int, int]) -> dict[str, torch.Tensor | None]:
    return {f"{module}.lora_A.weight": torch.ones(down), f"{module}.lora_B.weight": torch.ones(up)}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (stack(STACK, (6, 4), (9, 6)), r"experts.lora_B.weight: has shape \[9, 6\].*\[10, 6\]"),
        (stack(STACK, (4, 4), (10, 4)), r"experts.lora_A.weight: has shape \[4, 4\].*\[6, 4\]"),
        (
            stack(STACK, (6, 4), (10, 6)) | stack(f"{STACK}.base_layer", (6, 4), (10, 6)),
            r"changes model.layers.0.mlp.experts.gate_up_proj, as .* does",
        ),
        (stack(STACK, (6, 5), (4, 6)) | stack(f"{STACK}.1.down_proj", (2, 5), (4, 2)), "of stacks of experts, too"),
        ({f"{STACK}.lora_B.weight": torch.ones(10, 6)}, "experts.lora_A.weight: is missing"),
        (stack(f"{STACK}.base_layer.base_layer", (6, 4), (10, 6)), "takes no adapter in this model"),
    ],
)
def test_stacks_of_experts_that_do_not_fit_are_refused_by_the_tensor(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], problem: str
) -> None:
    write(tmp_path, None, **{UP: None, DOWN: None} | tensors)
    with pytest.raises(ModelError, match=problem), LoraAdapter(tmp_path, OF_EXPERTS):
        pass
