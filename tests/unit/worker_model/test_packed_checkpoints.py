"""AWQ, GPTQ and compressed-tensors checkpoints: read as the numbers that they mean, whole and in slices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import FP8, INT8, WeightFormat
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import quantize
from hetero_worker.checkpoints.store import TensorSlice
from tests.support.bytes_read import counting_reads
from tests.support.quantized_files import (
    LAYER,
    WEIGHT,
    act_order,
    awq_config,
    compressed_config,
    float_config,
    gptq_config,
    gptq_tensors,
    int_tensors,
    nvfp4,
    random_quantized,
    save_packed,
    wide_floats,
)
from tests.support.quantized_layers import ACT_ORDER, CASES, FLOATS, INPUTS, OUTPUTS, save_layer
from tests.support.tiny_checkpoints import edit_config

pytestmark = pytest.mark.unit

RANGES: Final = (None, UnitRange(0, 64), UnitRange(32, 96), UnitRange(5, 11), UnitRange(33, 90))
ROWS: Final = (None, UnitRange(8, 24), UnitRange(13, 14), UnitRange(47, 48))


@pytest.mark.parametrize("name", CASES)
def test_slices_are_slices_of_the_numbers_that_are_meant(tmp_path: Path, name: str) -> None:
    save, matrix, weights = CASES[name]
    save(tmp_path, matrix)
    expected = matrix.numbers
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(TensorSlice(WEIGHT, (OUTPUTS, INPUTS))) == weights
        for rows in ROWS:
            for columns in RANGES:
                part = TensorSlice(WEIGHT, (OUTPUTS, INPUTS), rows=rows, columns=columns)
                meant = expected[slice(*part.row_range), slice(*part.column_range)]
                # Minima are rounded to float16: that is what may differ, by half a unit of its eleventh bit.
                bound = 15 * meant.abs().max() * 2**-11 if weights.has_minimum else 0.0
                found = checkpoint.read_quantized(part)
                assert (found.dequantized() - meant).abs().max() <= bound
                into = torch.empty(part.shape)
                checkpoint.read(part, into)
                assert torch.equal(into, found.dequantized())


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_kernels_are_promised(tmp_path: Path, name: str) -> None:
    save, matrix, weights = CASES[name]
    save(tmp_path, matrix)
    part = TensorSlice(WEIGHT, (OUTPUTS, INPUTS), columns=UnitRange(16, 96))
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.read_quantized(part)
        assert found.format == checkpoint.format_of(part)
    assert found.values.dtype == (torch.int8 if weights.bits == 8 else torch.uint8)
    assert found.values.shape == part.shape
    for numbers in filter(lambda each: each is not None, (found.scales, found.minima)):
        assert numbers is not None
        assert numbers.shape == (OUTPUTS, found.format.groups(80))
        assert torch.equal(numbers, numbers.half().float())
    assert (found.minima is not None) == weights.has_minimum


def test_what_config_leaves_out_of_a_quantised_checkpoint_is_floats(tmp_path: Path) -> None:
    save, matrix, _ = CASES["awq in groups"]
    save(tmp_path, matrix)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(4, 6, dtype=torch.float16)}, tmp_path / "model.safetensors")
    part, into = TensorSlice("lm_head.weight", (4, 6)), torch.empty(4, 6)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(part) is None
        assert checkpoint.dtype_of(part) == torch.float16
        checkpoint.read(part, into)
    assert torch.equal(into, torch.ones(4, 6))


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    save, matrix, _ = CASES["gptq"]
    save(tmp_path, matrix)
    part = TensorSlice(WEIGHT, (OUTPUTS, INPUTS), quantize_to=WeightFormat(8))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=r"spec\.model\.quantization to none"):
        checkpoint.read_quantized(part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qweight": torch.zeros(5, 6, dtype=torch.int32)}, "qweight has shape"),
        ({"qweight": torch.zeros(12, 48)}, "must be int32"),
        ({"g_idx": torch.arange(95, -1, -1, dtype=torch.int32) // 32}, "order of their own"),
        ({"scales": torch.full((3, 48), torch.inf, dtype=torch.float16)}, "not finite"),
        ({"qzeros": torch.zeros(3, 6, dtype=torch.int32)}, "symmetric"),
    ],
)
def test_a_damaged_layer_is_told(tmp_path: Path, change: dict[str, torch.Tensor], message: str) -> None:
    matrix = random_quantized(OUTPUTS, INPUTS, bits=4, group=32, symmetric=True)
    save_packed(tmp_path, gptq_tensors(matrix, 4) | change, gptq_config(4, 32, symmetric=True))
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=message) as caught:
        checkpoint.read_quantized(TensorSlice(WEIGHT, (OUTPUTS, INPUTS)))
    assert LAYER in str(caught.value)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        (awq_config(32, version="gemv"), "version 'gemv'"),
        (awq_config(32, bits=3), "bits 3"),
        (awq_config(32, group_size=8), "group_size"),
        (gptq_config(4, 32, symmetric=True, is_marlin_format=True), "is_marlin_format True"),
        ({"load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (gptq_config(2, 32, symmetric=True), "bits 2"),
        (gptq_config(4, 32, symmetric=True, dynamic={"-:.*q_proj": {}}), "dynamic"),
        (compressed_config("float-quantized", 8, 0, symmetric=True), "format 'float-quantized'"),
        (compressed_config("pack-quantized", 4, 32, symmetric=True, actorder="row"), "actorder 'row'"),
        (compressed_config("int-quantized", 8, 0, symmetric=True, type="float"), "format 'int-quantized'"),
        (compressed_config("int-quantized", 8, 0, symmetric=True, dynamic=True), "weights.dynamic True"),
        (compressed_config("int-quantized", 8, 0, symmetric=True) | {"transform_config": {"a": 1}}, "transform_config"),
        (
            compressed_config("int-quantized", 8, 0, symmetric=True)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
        ),
        (compressed_config("int-quantized", 8, 0, symmetric=True) | {"ignore": ["re:("]}, "ignore has a regular"),
        (compressed_config("int-quantized", 8, 0, symmetric=True) | {"ignore": "lm_head"}, "ignore must be a list"),
        (float_config("float-quantized", 8, strategy="group"), "strategy 'group'"),
        (float_config("float-quantized", 8, strategy="block", block_structure="128"), "block_structure must be"),
        (float_config("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=32), "group_size 32"),
        (compressed_config("int-quantized", 8, 0, symmetric=True) | {"config_groups": {}}, "config_groups"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    matrix = random_quantized(OUTPUTS, INPUTS, bits=4, group=32, symmetric=True)
    save_packed(tmp_path, gptq_tensors(matrix, 4), config)
    with pytest.raises(ModelError, match="quantization_config") as caught, Checkpoint(tmp_path):
        pass
    assert field in str(caught.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq"])
def test_who_refuses_a_method_says_what_to_do(tmp_path: Path, method: str) -> None:
    save_packed(tmp_path, {}, {"quant_method": method})
    with pytest.raises(ModelError, match=r"16 bits, and spec\.model\.quantization int8 or int4"), Checkpoint(tmp_path):
        pass


_PART: Final = TensorSlice(WEIGHT, (OUTPUTS, INPUTS))


@pytest.mark.parametrize("name", FLOATS)
def test_small_floats_are_read_as_exactly_their_numbers(tmp_path: Path, name: str) -> None:
    written, config, weights = FLOATS[name]
    save_packed(tmp_path, written.tensors, config)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(_PART) == weights
        for rows in ROWS:
            for columns in RANGES:
                part = TensorSlice(WEIGHT, (OUTPUTS, INPUTS), rows=rows, columns=columns)
                meant = written.numbers[slice(*part.row_range), slice(*part.column_range)]
                found = checkpoint.read_quantized(part)
                assert found.format == checkpoint.format_of(part)
                torch.testing.assert_close(found.dequantized(), meant, rtol=1e-6, atol=0)


COMPRESSED: Final = ("rows", "blocks", "nvfp4", "mxfp4", *(name for name in CASES if "ints" in name.split()))


@pytest.mark.parametrize("name", COMPRESSED)
def test_what_compressed_tensors_writes_is_read_as_the_numbers_that_it_reads(tmp_path: Path, name: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    save_layer(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    ours = {key.removeprefix(f"{LAYER}."): each for key, each in load_file(tmp_path / "model.safetensors").items()}
    if ours["weight_scale"].dtype == torch.float16:  # its numbers have the type of their scales
        ours["weight_scale"] = ours["weight_scale"].float()
    meant = compressor.decompress(ours, scheme)
    written = compressor.compress(meant, scheme)
    assert written.keys() == ours.keys()
    for key, each in written.items():  # of 4-bit floats it may write 0 for -0
        assert torch.equal(each, ours[key]) or (name, key) in (("nvfp4", "weight_packed"), ("mxfp4", "weight_packed"))
    save_packed(tmp_path, written, config)
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.read_quantized(_PART).dequantized()
    expected = meant["weight"].float()
    # Minima are rounded to float16.
    bound = 15 * expected.abs().max() * 2**-11 if "zero points" in name else 0.0
    assert (found - expected).abs().max() <= bound


@pytest.mark.parametrize("layout", ["gptq", "compressed"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_inputs_in_any_order_are_quantised_again(tmp_path: Path, layout: str, *, symmetric: bool) -> None:
    """To the same numbers in every slice, and near those that are stored."""
    written = act_order(OUTPUTS, INPUTS, group=32, symmetric=symmetric, layout=layout)
    config = gptq_config(4, 32, symmetric=symmetric, desc_act=True)
    if layout == "compressed":
        config = compressed_config("pack-quantized", 4, 32, symmetric=symmetric, actorder="group")
    save_packed(tmp_path, written.tensors, config)
    expected = quantize(written.numbers, INT8).dequantized()
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(_PART) == INT8
        for rows in ROWS:
            for columns in RANGES:
                part = TensorSlice(WEIGHT, (OUTPUTS, INPUTS), rows=rows, columns=columns)
                found = checkpoint.read_quantized(part)
                assert found.format == checkpoint.format_of(part)
                meant = expected[slice(*part.row_range), slice(*part.column_range)]
                assert torch.equal(found.dequantized(), meant)
        checkpoint.measure_loss(_PART, INT8)
        [line] = checkpoint.conversions.lines
    error = float((expected - written.numbers)[:4].norm() / written.numbers[:4].norm())
    assert line.endswith(f"act-order -> 8 bits in groups of 64, loss {100 * error:.2g} %")
    assert error <= 0.01


def test_a_usual_order_is_none(tmp_path: Path) -> None:
    save, matrix, weights = CASES["gptq"]
    save(tmp_path, matrix)
    edit_config(tmp_path, quantization_config=gptq_config(4, 32, symmetric=True, desc_act=True))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format_of(_PART) == weights


def test_scales_that_float16_has_not_are_rounded_and_that_is_told(tmp_path: Path) -> None:
    written = wide_floats(OUTPUTS, INPUTS, rows=1, columns=0, exact=False)
    save_packed(tmp_path, written.tensors, float_config("float-quantized", 8, strategy="channel"))
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.read_quantized(_PART).dequantized()
        checkpoint.measure_loss(_PART, FP8)
        [line] = checkpoint.conversions.lines
    torch.testing.assert_close(found, written.numbers, rtol=2**-11, atol=0)
    error = float((found - written.numbers)[:4].norm() / written.numbers[:4].norm())
    assert error > 0
    assert line == f"FP8 with a scale for each row -> 8-bit floats in rows, loss {100 * error:.2g} %"


@pytest.mark.parametrize("rows", [None, UnitRange(20, 40)], ids=["all rows", "rows"])
@pytest.mark.parametrize("columns", [None, UnitRange(64, 96)], ids=["all columns", "columns"])
@pytest.mark.parametrize("name", [*CASES, *FLOATS, *ACT_ORDER])
def test_a_rank_reads_its_slices_only(
    tmp_path: Path, name: str, rows: UnitRange | None, columns: UnitRange | None
) -> None:
    """Bytes of values, scales and zero points. Groups are read whole; of inputs in any order, all scales of a row."""
    save_layer(tmp_path, name)
    part = TensorSlice(WEIGHT, (OUTPUTS, INPUTS), rows=rows, columns=columns)
    with counting_reads() as count, Checkpoint(tmp_path) as checkpoint:
        weights = checkpoint.format_of(TensorSlice(WEIGHT, (OUTPUTS, INPUTS)))
        assert weights is not None
        count()  # orders are read once
        checkpoint.read_quantized(part)
        found = count()
    begin, end = part.column_range
    whole = UnitRange(begin // weights.group * weights.group, end) if weights.group else part.column_range
    tensors = {key.split(".")[-1]: each for key, each in load_file(tmp_path / "model.safetensors").items()}
    expected = 0
    for key, each in tensors.items():
        has_all_columns = name in ACT_ORDER and key not in ("qweight", "weight_packed")
        expected += _bytes_of(key, each, part.row_range, UnitRange(0, INPUTS) if has_all_columns else whole)
    assert 0 < found <= 1.05 * expected
    assert part.shape != (OUTPUTS, INPUTS) or found == expected


def _bytes_of(name: str, tensor: torch.Tensor, *wanted: UnitRange) -> int:
    """Bytes of what stands for so many rows and columns of the layer."""
    if name in ("g_idx", "weight_g_idx", "weight_shape", "input_scale", "input_global_scale"):
        return 0
    shape = tensor.shape[::-1] if name in ("qweight", "qzeros", "scales") else tensor.shape
    if tensor.numel() == 1:
        return tensor.nbytes
    touched = [
        -(-end * size // of) - begin * size // of
        for size, of, (begin, end) in zip(shape, (OUTPUTS, INPUTS), wanted, strict=True)
    ]
    return math.prod(touched) * tensor.itemsize


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows", {"weight_scale": torch.ones(OUTPUTS, 3)}, "weight_scale has shape"),
        ("rows", {"weight_scale": torch.full((OUTPUTS, 1), torch.nan)}, "not finite"),
        ("rows", {"weight_scale": torch.full((OUTPUTS, 1), 1000.0)}, "too large for float16"),
        (
            "rows",
            {"weight": torch.full((OUTPUTS, INPUTS), 127).to(torch.uint8).view(torch.float8_e4m3fn)},
            "no numbers",
        ),
        ("tensor", {"weight_scale": torch.ones(2)}, "weight_scale of shape"),
        ("nvfp4", {"weight_scale": torch.ones(OUTPUTS, 6)}, "weight_scale of F32, which must be F8_E4M3"),
        ("nvfp4", {"weight_packed": torch.zeros(OUTPUTS, 40, dtype=torch.uint8)}, "weight_packed has shape"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "not finite"),
    ],
)
def test_damaged_floats_are_named(tmp_path: Path, name: str, change: dict[str, torch.Tensor], message: str) -> None:
    written, config, _ = FLOATS[name]
    save_packed(tmp_path, written.tensors | change, config)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=message) as caught:
        checkpoint.read_quantized(_PART)
    assert LAYER in str(caught.value)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (torch.full((INPUTS,), 7, dtype=torch.int32), "groups that do not exist"),
        (torch.arange(INPUTS - 1, dtype=torch.int32) % 3, "an order of 95 inputs, config.json says 96"),
        (None, "no tensor"),
    ],
)
def test_damaged_orders_are_named(tmp_path: Path, order: torch.Tensor | None, message: str) -> None:
    written = act_order(OUTPUTS, INPUTS, group=32, symmetric=True, layout="gptq")
    tensors = {name: each for name, each in written.tensors.items() if order is not None or name != "scales"}
    config = gptq_config(4, 32, symmetric=True, desc_act=True)
    save_packed(tmp_path, tensors | ({} if order is None else {"g_idx": order}), config)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=message) as caught:
        checkpoint.read_quantized(_PART)
    assert LAYER in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        (wide_floats(OUTPUTS, INPUTS, rows=1, columns=0).tensors, "F8_E4M3"),
        (int_tensors(random_quantized(OUTPUTS, INPUTS, bits=8, group=0, symmetric=True), symmetric=True), "I8"),
    ],
)
def test_eight_bits_without_a_configuration_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], kind: str
) -> None:
    save_packed(tmp_path, tensors, {})
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=f"{kind}, and quantization_config"):
        checkpoint.read(_PART, torch.empty(OUTPUTS, INPUTS))


def test_a_configuration_by_its_earlier_name_is_read(tmp_path: Path) -> None:
    matrix = random_quantized(OUTPUTS, INPUTS, bits=8, group=0, symmetric=True)
    save_packed(tmp_path, int_tensors(matrix, symmetric=True), {})
    config = {"compression_config": compressed_config("int-quantized", 8, 0, symmetric=True)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.read_quantized(_PART)
    torch.testing.assert_close(found.dequantized(), matrix.numbers)


def test_several_groups_of_layers_have_their_own_formats(tmp_path: Path) -> None:
    """As attention in 8 bits beside experts in 4."""
    wide, narrow = wide_floats(OUTPUTS, INPUTS, rows=1, columns=0), nvfp4(OUTPUTS, INPUTS, modelopt=False)
    other = "model.layers.0.self_attn.o_proj"
    tensors = {f"{LAYER}.{name}": each for name, each in narrow.tensors.items()}
    tensors |= {f"{other}.{name}": each for name, each in wide.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = float_config("mixed-precision", 8)
    groups = {
        "group_0": (float_config("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16), ["re:.*mlp.*"]),
        "group_1": (float_config("float-quantized", 8, strategy="channel"), ["Linear"]),
    }
    config["config_groups"] = {
        name: given["config_groups"]["group_0"] | {"format": given["format"], "targets": targets}
        for name, (given, targets) in groups.items()
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with Checkpoint(tmp_path) as checkpoint:
        for stem, written in ((LAYER, narrow), (other, wide)):
            found = checkpoint.read_quantized(TensorSlice(f"{stem}.weight", (OUTPUTS, INPUTS)))
            torch.testing.assert_close(found.dequantized(), written.numbers, rtol=1e-6, atol=0)
