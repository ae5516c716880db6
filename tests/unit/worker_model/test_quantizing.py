"""Weights that are quantised at load: as near as their format allows, alike in every slice, as large as is said."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from hetero_api.errors import ModelError
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import INT8, WeightFormat, int4
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix, QuantizedRows, quantize, stacked
from hetero_worker.checkpoints.store import TensorSlice

pytestmark = pytest.mark.unit

FORMATS: Final = (WeightFormat(8), INT8, WeightFormat(8, 32), int4(32), int4(64), int4(128))
CENTRED: Final = WeightFormat(4, 32)
OUTPUTS: Final = 40
INPUTS: Final = 288


def _weight(seed: int = 1, outputs: int = OUTPUTS, inputs: int = INPUTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-4, 2, outputs).unsqueeze(1)
    weight[0] = 0.0
    weight[1] = 0.25
    return weight


def _groups(weights: WeightFormat, inputs: int) -> list[slice]:
    size = weights.group or inputs
    return [slice(begin, min(begin + size, inputs)) for begin in range(0, inputs, size)]


@pytest.mark.parametrize("weights", FORMATS, ids=str)
def test_no_weight_is_further_off_than_half_a_step(weights: WeightFormat) -> None:
    weight = _weight()
    found = quantize(weight, weights)
    error = (found.dequantized() - weight).abs()
    for number, group in enumerate(_groups(weights, INPUTS)):
        # A scale is rounded up to float16, which makes a step larger by a part in 2^10, or by the least float16.
        part, scales = weight[:, group], found.scales[:, number]
        greatest, least = part.amax(1), part.amin(1)
        step = (greatest - least) / 15 if weights.bits == 4 else part.abs().amax(1) / 127
        slack = least.abs() * 2**-10 / 15 if weights.bits == 4 else 0.0
        assert (scales >= step * (1 - 1e-6)).all()
        assert (scales <= (step + slack) * (1 + 2**-9) + 2**-23).all()
        assert (error[:, group] <= scales.unsqueeze(1) / 2 * (1 + 1e-4) + 1e-7 * part.abs().amax()).all()


@pytest.mark.parametrize("weights", FORMATS, ids=str)
def test_values_and_scales_are_what_kernels_are_promised(weights: WeightFormat) -> None:
    found = quantize(_weight(), weights)
    assert found.values.dtype == (torch.int8 if weights.bits == 8 else torch.uint8)
    assert found.values.min() >= (-127 if weights.bits == 8 else 0)
    assert found.values.max() == (127 if weights.bits == 8 else 15)
    assert found.scales.shape == (OUTPUTS, weights.groups(INPUTS))
    assert torch.equal(found.scales, found.scales.half().float())
    assert (found.minima is not None) == weights.has_minimum
    if found.minima is not None:
        assert torch.equal(found.minima, found.minima.half().float())


def test_weights_that_were_in_the_format_come_back() -> None:
    """As of a checkpoint that was quantised once and widened; where rows are not too small for float16's bits."""
    weight = _weight()[20:]
    for weights in FORMATS:
        once = quantize(weight, weights)
        twice = quantize(once.dequantized(), weights)
        assert torch.equal(once.values, twice.values)
        assert torch.equal(once.scales, twice.scales)


@pytest.mark.parametrize("weights", FORMATS, ids=str)
def test_a_weight_is_the_same_number_whatever_slice_it_is_read_in(tmp_path: Path, weights: WeightFormat) -> None:
    save_file({"w": _weight().to(torch.bfloat16)}, tmp_path / "model.safetensors")
    unit = weights.group or 48
    with Checkpoint(tmp_path) as checkpoint:

        def numbers(rows: UnitRange | None, columns: UnitRange | None) -> torch.Tensor:
            part = TensorSlice("w", (OUTPUTS, INPUTS), rows=rows, columns=columns, quantize_to=weights)
            return checkpoint.read_quantized(part).dequantized()

        whole = numbers(None, None)
        cuts = [0, unit, 2 * unit, INPUTS]
        for columns in (*map(UnitRange, cuts, cuts[1:]), UnitRange(17, 50), UnitRange(257, INPUTS)):
            for rows in (None, UnitRange(7, 8), UnitRange(11, 40)):
                expected = whole[slice(*rows) if rows else slice(None), slice(*columns)]
                assert torch.equal(numbers(rows, columns), expected)


def test_large_matrices_are_quantised_in_pieces_that_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": _weight()}, tmp_path / "model.safetensors")
    part = TensorSlice("w", (OUTPUTS, INPUTS), columns=UnitRange(32, 288), quantize_to=WeightFormat(8))
    with Checkpoint(tmp_path) as checkpoint:
        whole = checkpoint.read_quantized(part)
        monkeypatch.setattr("hetero_worker.checkpoints.conversion._QUANTIZED_AT_ONCE", 3 * INPUTS)
        pieces = checkpoint.read_quantized(part)
    assert torch.equal(whole.values, pieces.values)
    assert torch.equal(whole.scales, pieces.scales)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("weights", [INT8, int4()], ids=str)
def test_weights_that_no_scale_holds_are_told(tmp_path: Path, wrong: float, weights: WeightFormat) -> None:
    weight = _weight()
    weight[5, 7] = wrong
    save_file({"w": weight}, tmp_path / "model.safetensors")
    part = TensorSlice("w", (OUTPUTS, INPUTS), quantize_to=weights)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match="tensor w: weights are not finite, or"):
        checkpoint.read_quantized(part)


def _packed_bytes(matrix: QuantizedMatrix) -> int:
    """Of the plainest packing: padded rows of values, and 16-bit numbers."""
    weights = matrix.format
    values = weights.padded(matrix.shape[1]) * weights.bits // 8 * matrix.shape[0]
    numbers = matrix.scales.half().nbytes + (0 if matrix.minima is None else matrix.minima.half().nbytes)
    return values + numbers


@pytest.mark.parametrize("weights", FORMATS, ids=str)
@pytest.mark.parametrize("inputs", [32, 96, 288, 40])
def test_bytes_are_those_of_the_packed_tensors(weights: WeightFormat, inputs: int) -> None:
    matrix = quantize(_weight(inputs=inputs), weights)
    assert weights.matrix_bytes(OUTPUTS, inputs) == _packed_bytes(matrix) == matrix.num_bytes


@pytest.mark.parametrize("weights", [*FORMATS, WeightFormat(4, 32)], ids=str)
@pytest.mark.parametrize("inputs", [96, 41])
def test_rows_at_rest_are_the_matrix_and_as_large_as_is_said(weights: WeightFormat, inputs: int) -> None:
    matrix = quantize(_weight(inputs=inputs), int4(32) if weights == WeightFormat(4, 32) else weights)
    matrix = QuantizedMatrix(weights, matrix.values, matrix.scales, matrix.minima if weights.has_minimum else None)
    rows = QuantizedRows.of(matrix, torch.bfloat16)
    numbers = torch.tensor([3, 0, 39, 3])
    assert torch.equal(rows.rows(numbers), matrix.dequantized()[numbers].to(torch.bfloat16))
    assert torch.equal(rows.matrix().dequantized(), matrix.dequantized())
    assert sum(part.nbytes for part in rows.tensors) <= weights.matrix_bytes(*matrix.shape)
    if weights.padded(inputs) == inputs and inputs % 2 == 0:
        assert sum(part.nbytes for part in rows.tensors) == weights.matrix_bytes(*matrix.shape)


@pytest.mark.parametrize("weights", [*FORMATS, CENTRED], ids=str)
@pytest.mark.parametrize("other", [*FORMATS, CENTRED], ids=str)
def test_stacked_matrices_are_the_same_numbers_in_a_format_that_holds_both(
    weights: WeightFormat, other: WeightFormat
) -> None:
    parts = [_in(each, seed) for seed, each in enumerate((weights, other))]
    found = stacked(parts)
    assert found.format == weights.joined(other)
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.allclose(found.dequantized(), expected, rtol=1e-5, atol=1e-5)
    assert found.scales.shape == (2 * OUTPUTS, found.format.groups(INPUTS))


def _in(weights: WeightFormat, seed: int) -> QuantizedMatrix:
    if weights != CENTRED:
        return quantize(_weight(seed), weights)
    matrix = quantize(_weight(seed), int4(CENTRED.group))
    return QuantizedMatrix(CENTRED, matrix.values, matrix.scales)
