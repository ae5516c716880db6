"""AWQ, GPTQ and compressed-tensors checkpoints: read as the numbers that they mean, whole and in slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.store import TensorSlice
from tests.support.quantized_files import (
    LAYER,
    WEIGHT,
    Quantized,
    awq_config,
    awq_tensors,
    compressed_config,
    gptq_config,
    gptq_tensors,
    int_tensors,
    packed_int_tensors,
    random_quantized,
    save_packed,
)

pytestmark = pytest.mark.unit

OUTPUTS: Final = 48
INPUTS: Final = 96

Save = Callable[[Path, Quantized], None]


def _awq(group: int) -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        save_packed(directory, awq_tensors(matrix), awq_config(group))

    matrix = random_quantized(OUTPUTS, INPUTS, bits=4, group=group, symmetric=False)
    return save, matrix, WeightFormat(4, group, has_minimum=True)


def _gptq(bits: int, group: int, *, symmetric: bool, layout: str = "gptq") -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        tensors = gptq_tensors(matrix, bits, less_one=layout == "gptq")
        save_packed(directory, tensors, gptq_config(bits, group, symmetric=symmetric, checkpoint_format=layout))

    matrix = random_quantized(OUTPUTS, INPUTS, bits=bits, group=group, symmetric=symmetric)
    return save, matrix, WeightFormat(bits, group, has_minimum=not symmetric)


def _packed_ints(bits: int, group: int, *, symmetric: bool) -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        config = compressed_config("pack-quantized", bits, group, symmetric=symmetric)
        save_packed(directory, packed_int_tensors(matrix, bits, symmetric=symmetric), config)

    matrix = random_quantized(OUTPUTS, INPUTS, bits=bits, group=group, symmetric=symmetric)
    return save, matrix, WeightFormat(bits, group, has_minimum=not symmetric)


def _ints(group: int, *, symmetric: bool) -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        config = compressed_config("int-quantized", 8, group, symmetric=symmetric)
        save_packed(directory, int_tensors(matrix, symmetric=symmetric), config)

    matrix = random_quantized(OUTPUTS, INPUTS, bits=8, group=group, symmetric=symmetric)
    return save, matrix, WeightFormat(8, group, has_minimum=not symmetric)


CASES: Final = {
    "awq in groups": _awq(32),
    "awq in rows": _awq(0),
    "gptq": _gptq(4, 32, symmetric=True),
    "gptq with zero points": _gptq(4, 32, symmetric=False),
    "gptq with zero points as they are": _gptq(4, 32, symmetric=False, layout="gptq_v2"),
    "gptq of 8 bits": _gptq(8, 48, symmetric=True),
    "gptq of 8 bits with zero points": _gptq(8, 32, symmetric=False),
    "packed ints": _packed_ints(4, 32, symmetric=True),
    "packed ints with zero points": _packed_ints(4, 32, symmetric=False),
    "packed ints of 8 bits": _packed_ints(8, 32, symmetric=True),
    "packed ints in rows": _packed_ints(4, 0, symmetric=True),
    "ints in rows": _ints(0, symmetric=True),
    "ints in groups with zero points": _ints(32, symmetric=False),
}
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
        (gptq_config(4, 32, symmetric=True, desc_act=True), "desc_act True"),
        (gptq_config(2, 32, symmetric=True), "bits 2"),
        (gptq_config(4, 32, symmetric=True, dynamic={"-:.*q_proj": {}}), "dynamic"),
        (compressed_config("float-quantized", 8, 0, symmetric=True), "format 'float-quantized'"),
        (compressed_config("pack-quantized", 4, 32, symmetric=True, actorder="group"), "actorder 'group'"),
        (compressed_config("int-quantized", 8, 0, symmetric=True, type="float"), "type 'float'"),
        (compressed_config("int-quantized", 8, 0, symmetric=True) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache"),
        (compressed_config("int-quantized", 8, 0, symmetric=True) | {"config_groups": {}}, "config_groups"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    matrix = random_quantized(OUTPUTS, INPUTS, bits=4, group=32, symmetric=True)
    save_packed(tmp_path, gptq_tensors(matrix, 4), config)
    with pytest.raises(ModelError, match="quantization_config") as caught, Checkpoint(tmp_path):
        pass
    assert field in str(caught.value)
