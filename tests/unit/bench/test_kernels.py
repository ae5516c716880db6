"""The table of kernels: what bounds them, and how a model's layers add up."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import MODELS, Kernel, Times, least_seconds, step_seconds, table
from bench.limits import Limits
from bench.shapes import SHAPES, tensors

pytestmark = pytest.mark.unit

LIMITS = Limits(threads=2, read_bytes_per_s=10e9, fp32_flops=1e12, bf16_flops=1e11, int8_ops=4e12)


def kernel(bits: float, arithmetic: str) -> Kernel:
    return Kernel(bits, arithmetic, lambda _shape: lambda x: x)


def test_few_rows_are_bound_by_reading_and_many_by_operations() -> None:
    shapes = {(1000, 1000): 10, (2000, 1000): 5}
    numbers = 20_000_000
    assert least_seconds(kernel(16, "float32"), shapes, 1, LIMITS) == pytest.approx(numbers * 2 / 10e9)
    assert least_seconds(kernel(8, "int8"), shapes, 1, LIMITS) == pytest.approx(numbers / 10e9)
    assert least_seconds(kernel(16, "float32"), shapes, 512, LIMITS) == pytest.approx(2 * numbers * 512 / 1e12)
    assert least_seconds(kernel(8, "int8"), shapes, 512, LIMITS) == pytest.approx(2 * numbers * 512 / 4e12)


def test_a_steps_time_is_that_of_all_its_layers() -> None:
    measured: dict[tuple[int, int], Times] = {
        (8, 4): {"a": {1: 1.0, 2: 2.0}, "b": {1: 0.5, 2: 0.25}},
        (4, 4): {"a": {1: 3.0, 2: 4.0}, "b": {1: 0.0, 2: 1.0}},
    }
    assert step_seconds({(8, 4): 10, (4, 4): 1}, measured) == {"a": {1: 13.0, 2: 24.0}, "b": {1: 5.0, 2: 3.5}}


def test_the_table_tells_milliseconds_and_shares() -> None:
    head, first = table({"a": {1: 0.0125, 512: 0.5}}, {"a": {1: 0.8, 512: 0.25}}).splitlines()
    assert head.split()[-2:] == ["1", "512"]
    assert first.split() == ["a", "12.50", "(", "80%)", "500.00", "(", "25%)"]


@pytest.mark.parametrize("name", [name for name in SHAPES if name in MODELS])
def test_shapes_are_those_of_the_made_models(name: str) -> None:
    """All matrices of the model, whether fused or not; the embedding is the head."""
    numbers = sum(torch.Size(tensor.shape).numel() for tensor in tensors(SHAPES[name]) if len(tensor.shape) == 2)
    assert sum(outputs * inputs * count for (outputs, inputs), count in MODELS[name].shapes.items()) == numbers
