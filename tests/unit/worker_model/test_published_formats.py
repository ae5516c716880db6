"""Models in the formats in which they are published: logits are those of the numbers that the files stand for."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import INT8, WeightFormat, int4
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import quantize
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.linear import ShardedLinear
from hetero_worker.layers.native_linear import NativeLinear, NativeWeight
from tests.support.native_compute import op_queue_of
from tests.support.quantized_files import (
    FP8_BLOCKS,
    MODELOPT_NVFP4,
    WEIGHT,
    Quantized,
    Written,
    act_order,
    awq_config,
    awq_tensors,
    compressed_config,
    float_config,
    gptq_config,
    gptq_tensors,
    int_tensors,
    mxfp4,
    nvfp4,
    packed_int_tensors,
    random_quantized,
    save_packed,
    wide_floats,
)
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.resident_weights import resident_weights
from tests.support.tiny_checkpoints import TinyCheckpoint, edit_config, save_tiny

pytestmark = pytest.mark.unit

SHAPE: Final = {"hidden_size": 64, "intermediate_size": 96}
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "llama": SHAPE,
    "glm4-moe": SHAPE | {"moe_intermediate_size": 64},
    "deepseek-v3": {},
    "minimax-m2": {},
    "glm4-moe, wider": {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 256, "head_dim": 32,
    },
}  # fmt: skip
ONE: Final = Shares(kv_heads=((8,),), mlp_columns=((96,),), vocab_rows=(200,), experts=((6,),))
UNEVEN: Final = Shares(kv_heads=((5, 3),), mlp_columns=((32, 64),), vocab_rows=(64, 136), experts=((1, 5),))
SLICES: Final = Shares(kv_heads=((5, 3),), mlp_columns=((32, 64),), vocab_rows=(64, 136), expert_slices=(1, 3))
"""16 and 48 columns of each expert."""
WHOLE_GROUPS: Final = Shares(kv_heads=((6, 2),), mlp_columns=((48, 48),), vocab_rows=(64, 136), experts=((1, 5),))
"""Kernels want groups of 16 inputs or more."""
IN_HALVES: Final = Shares(kv_heads=((6, 2),), mlp_columns=((64, 64),), vocab_rows=(64, 192), experts=((1, 5),))
TINY: Final = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
_FLOATS: Final = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight", "bias")

Write = Callable[[int, int, int], Written]
"""Rows, columns and a seed."""


def _ints(pack: Callable[[Quantized], dict[str, torch.Tensor]], bits: int, group: int, *, symmetric: bool) -> Write:
    def write(outputs: int, inputs: int, seed: int) -> Written:
        matrix = random_quantized(outputs, inputs, bits=bits, group=group, symmetric=symmetric, seed=seed)
        if bits == 8:  # as large as those of 4 bits
            matrix = matrix._replace(scales=matrix.scales / 16)
        values, zeros = torch.from_numpy(matrix.values), torch.from_numpy(matrix.zeros)
        middle = 0 if bits == 4 else 128
        scales = matrix.scales.float()
        minima = (scales * -(zeros - middle)).half().float()  # what ranks keep of zero points
        spread = [each.repeat_interleave(matrix.group, 1)[:, :inputs] for each in (scales, minima)]
        numbers = matrix.numbers if symmetric else (values - middle) * spread[0] + spread[1]
        return Written(pack(matrix), numbers)

    return write


def _act_order(layout: str, *, symmetric: bool) -> Write:
    """Ranks keep it in 8 bits."""

    def write(outputs: int, inputs: int, seed: int) -> Written:
        written = act_order(outputs, inputs, group=32, symmetric=symmetric, layout=layout, seed=seed)
        return Written(written.tensors, quantize(written.numbers, INT8).dequantized())

    return write


FORMATS: Final[dict[str, tuple[Write, dict[str, Any], WeightFormat]]] = {
    "fp8 blocks": (
        lambda out, into, seed: wide_floats(out, into, rows=16, columns=32, scale="weight_scale_inv", seed=seed),
        FP8_BLOCKS,
        WeightFormat(8, 32, is_float=True),
    ),
    "fp8 rows": (
        lambda out, into, seed: wide_floats(out, into, rows=1, columns=0, seed=seed),
        float_config("float-quantized", 8, strategy="channel"),
        WeightFormat(8, is_float=True),
    ),
    "fp8 compressed blocks": (
        lambda out, into, seed: wide_floats(out, into, rows=16, columns=32, seed=seed),
        float_config("float-quantized", 8, strategy="block", block_structure=[16, 32]),
        WeightFormat(8, 32, is_float=True),
    ),
    "fp8 tensors": (
        lambda out, into, seed: wide_floats(out, into, rows=0, columns=0, seed=seed),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        WeightFormat(8, is_float=True),
    ),
    "nvfp4 compressed": (
        lambda out, into, seed: nvfp4(out, into, modelopt=False, seed=seed),
        float_config("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
        WeightFormat(4, 16, is_float=True),
    ),
    "nvfp4 modelopt": (
        lambda out, into, seed: nvfp4(out, into, modelopt=True, seed=seed),
        {"quant_method": "modelopt", **MODELOPT_NVFP4},
        WeightFormat(4, 16, is_float=True),
    ),
    "mxfp4": (
        lambda out, into, seed: mxfp4(out, into, seed=seed),
        float_config("mxfp4-pack-quantized", 4, strategy="group", group_size=32),
        WeightFormat(4, 32, is_float=True),
    ),
    "awq": (_ints(awq_tensors, 4, 32, symmetric=False), awq_config(32), int4(32)),
    "gptq": (
        _ints(lambda each: gptq_tensors(each, 4), 4, 32, symmetric=True),
        gptq_config(4, 32, symmetric=True),
        WeightFormat(4, 32),
    ),
    "gptq act-order": (_act_order("gptq", symmetric=True), gptq_config(4, 32, symmetric=True, desc_act=True), INT8),
    "packed ints act-order": (
        _act_order("compressed", symmetric=False),
        compressed_config("pack-quantized", 4, 32, symmetric=False, actorder="group"),
        INT8,
    ),
    "packed ints in rows": (
        _ints(lambda each: packed_int_tensors(each, 4, symmetric=True), 4, 0, symmetric=True),
        compressed_config("pack-quantized", 4, 0, symmetric=True),
        WeightFormat(4),
    ),
    "ints": (
        _ints(lambda each: int_tensors(each, symmetric=True), 8, 0, symmetric=True),
        compressed_config("int-quantized", 8, 0, symmetric=True),
        WeightFormat(8),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], TinyCheckpoint]:
    """Checkpoints of a variant in a format, with transformers' model of the numbers; each is made once."""
    made: dict[tuple[str, str], TinyCheckpoint] = {}

    def make(variant: str, name: str) -> TinyCheckpoint:
        if (variant, name) not in made:
            made[variant, name] = _save(variant, name, tmp_path_factory)
        return made[variant, name]

    return make


def _save(variant: str, name: str, factory: pytest.TempPathFactory) -> TinyCheckpoint:
    write, config, _ = FORMATS[name]
    directory, floats = factory.mktemp("packed"), factory.mktemp("floats")
    plain = save_tiny(variant.split(",")[0], directory, **CHANGES[variant])
    path, packed, numbers = directory / "model.safetensors", {}, {}
    for seed, (key, weight) in enumerate(sorted(load_file(path).items())):
        if key.endswith(_FLOATS):
            packed[key] = numbers[key] = weight
            continue
        tensors, numbers[key] = write(weight.shape[0], weight.shape[1], seed)
        stem = key.removesuffix(".weight")
        packed |= {f"{stem}.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}
    save_file(packed, path)
    edit_config(directory, quantization_config=config)
    return TinyCheckpoint(directory, _reference(plain, numbers, floats))


def _reference(plain: TinyCheckpoint, numbers: dict[str, torch.Tensor], folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    copy.deepcopy(plain.reference.config).save_pretrained(folder)
    save_file(
        {name: each.contiguous() for name, each in numbers.items()}, folder / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.eval()


def _logits(
    checkpoint: TinyCheckpoint, shares: Shares, *, native: bool
) -> tuple[torch.Tensor, torch.Tensor, RankGroup]:
    """Of a prompt and two tokens, with those that transformers has."""
    group = RankGroup(checkpoint.directory, shares, native=native)
    builder = PlanBuilder(group)
    builder.start(0, [7, 150, 3, 88, 199, 0, 42])
    found, expected = [], []
    for _ in range(3):
        expected.append(checkpoint.logits(builder.sequences[0].tokens)[-1])
        builder.schedule(0)
        found.append(builder.run().logits[0])
    return torch.stack(found), torch.stack(expected), group


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers(saved: Callable[[str, str], TinyCheckpoint], name: str) -> None:
    found, expected, _ = _logits(saved("glm4-moe", name), UNEVEN, native=False)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("variant", "shares"),
    [("glm4-moe", ONE), ("glm4-moe", SLICES), ("llama", ONE), ("llama", UNEVEN)],
    ids=["glm4-moe on one", "glm4-moe in slices", "llama on one", "llama, uneven"],
)
def test_other_layouts_and_models_have_the_same_logits(
    saved: Callable[[str, str], TinyCheckpoint], variant: str, name: str, shares: Shares
) -> None:
    found, expected, _ = _logits(saved(variant, name), shares, native=False)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "gptq act-order", "ints"])
def test_experts_in_slices_have_the_same_logits(saved: Callable[[str, str], TinyCheckpoint], name: str) -> None:
    found, expected, _ = _logits(saved("glm4-moe", name), SLICES, native=False)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["deepseek-v3", "minimax-m2"])
def test_models_published_in_blocks_of_fp8_are_read(saved: Callable[[str, str], TinyCheckpoint], variant: str) -> None:
    found, expected, _ = _logits(saved(variant, "fp8 blocks"), TINY, native=False)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", FORMATS)
def test_native_kernels_keep_them_narrow(saved: Callable[[str, str], TinyCheckpoint], name: str) -> None:
    """Beside whole numbers and 4-bit floats rows are rounded, too; beside 8-bit floats they are not."""
    weights = FORMATS[name][2]
    found, expected, group = _logits(saved("glm4-moe", name), WHOLE_GROUPS, native=True)
    if weights.is_wide:
        assert (found - expected).abs().max() <= 1e-4
    else:
        correlation = torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]
        assert correlation >= 0.999
    kept = group.requests[0].config.weights
    assert (kept.layers, kept.experts) == (weights, None)
    layers = {line.split(" -> ")[1].split(",")[0] for report in group.reports for line in report.weight_formats}
    assert all(line.startswith(f"{weights.bits}") for line in layers), layers


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(None, UnitRange(128, 512)), (UnitRange(96, 256), None)], ids=["columns", "rows"]
)
def test_a_slice_takes_no_more_memory_than_its_width_says(
    tmp_path: Path, name: str, rows: UnitRange | None, columns: UnitRange | None
) -> None:
    write, config, weights = FORMATS[name]
    save_packed(tmp_path, write(256, 512, 1).tensors, config)
    part = TensorSlice(WEIGHT, (256, 512), rows=rows, columns=columns)
    linear = ShardedLinear([part])
    with Checkpoint(tmp_path) as checkpoint:
        linear.load(checkpoint, dtype=torch.float32, kernel=NativeLinear(op_queue_of()))
    assert isinstance(linear.packed, NativeWeight)
    assert weights.matrix_bytes(*part.shape) <= linear.packed.num_bytes <= 1.05 * weights.matrix_bytes(*part.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_takes_no_more_memory_than_is_counted(saved: Callable[[str, str], TinyCheckpoint], name: str) -> None:
    """Of two ranks, all of their weights."""
    group = RankGroup(saved("glm4-moe, wider", name).directory, IN_HALVES)
    for request in group.requests:
        found = resident_weights(request)
        assert 0.95 * found.counted <= found.resident <= 1.05 * found.counted


def test_status_tells_what_is_lost(saved: Callable[[str, str], TinyCheckpoint]) -> None:
    told = {}
    for name in ("fp8 rows", "gptq act-order"):
        _, _, group = _logits(saved("llama", name), ONE, native=True)
        told[name] = list(group.reports[0].weight_formats)
    assert told["fp8 rows"] == ["FP8 with a scale for each row -> 8-bit floats in rows, loss 0 %"]
    [line] = told["gptq act-order"]
    assert line.startswith("4 bits in groups of 32, act-order -> 8 bits in groups of 64, loss 0.")
    assert 0.1 <= float(line.split()[-2]) <= 1.0


def test_fp8_is_quantised_again_where_that_is_asked_for(saved: Callable[[str, str], TinyCheckpoint]) -> None:
    checkpoint = saved("llama", "fp8 blocks")
    group = RankGroup(checkpoint.directory, ONE, quantization="int4")
    lines = list(group.reports[0].weight_formats)
    assert [line.split(",")[0] for line in lines] == [
        "FP8 in blocks of 16 x 32 -> 4 bits in groups of 16 with minima",
        "FP8 in blocks of 16 x 32 -> 4 bits in groups of 32 with minima",
        "float32 -> 8 bits in groups of 64",
    ]
    with pytest.raises(ModelError, match="quantised already"):
        ModelConfig.from_directory(saved("llama", "mxfp4").directory).quantized("int4")


def test_modelopts_own_file_is_read(saved: Callable[[str, str], TinyCheckpoint], tmp_path: Path) -> None:
    source = saved("llama", "nvfp4 modelopt").directory
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", tmp_path)
    fields = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": MODELOPT_NVFP4}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(fields))
    assert ModelConfig.from_directory(tmp_path).weights.method == "modelopt"
    group = RankGroup(tmp_path, ONE)
    assert group.reports[0].weight_formats[0].startswith("NVFP4 -> 4-bit floats in groups of 16, loss")
