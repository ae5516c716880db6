"""Latent attention's native operations compute what torch's do, by every instruction set, and each row by itself."""

from __future__ import annotations

import pytest
import torch

from hetero_api.model_config import RopeConfig
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, LatentNorm, LatentWrite
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.linear_kernels import HeadsByRow, PlainKernel
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.layers.rotary import RotaryTables, Rotation
from tests.support.native_compute import op_queue_of, randn

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("isa")]

EPS = 1e-6
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2**-8 + 3e-6}
SHAPES = [(1, 1, 3, 4, 5), (3, 5, 16, 8, 40), (17, 2, 128, 64, 512), (2, 7, 24, 18, 33)]
"""Tokens, heads, elements of a query head that are not rotated, elements that are, rank."""
each_type = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCES[actual.dtype], atol=2e-6)


class Step:
    """One step's projections, and where they go."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tokens, heads, nope, rope, self.rank = shape
        self.query = randn(tokens, heads, nope + rope, dtype=dtype)
        self.compressed = randn(tokens, self.rank + rope, seed=1, dtype=dtype)
        table = RotaryTables([RopeConfig(100.0)], head_dims=[rope], max_length=64, dtype=dtype)
        self.rotation = table.at(torch.arange(tokens) * 29 % 64)[0]
        self.norm = LatentNorm(randn(self.rank, seed=2, dtype=dtype), EPS)
        self.slots = torch.randperm(30, generator=torch.Generator().manual_seed(3))[:tokens]

    def keys(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(30, 1, self.compressed.shape[1], dtype=dtype)


@each_type
@each_shape
def test_what_is_cached_and_what_asks_for_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    step = Step(shape, dtype)
    exact = Rotation(step.rotation.cos_table.double(), step.rotation.signed_sin_table.double(), step.rotation.positions)
    expected_keys = step.keys(torch.float64)
    expected = PLAIN_OPS.rotate_latent(
        step.query.double(), step.compressed.double(), exact,
        LatentNorm(step.norm.weight.double(), EPS), LatentWrite(expected_keys, step.slots),
    )  # fmt: skip
    results = []
    every: list[FusedOps] = [NativeOps(op_queue_of(1)), NativeOps(op_queue_of(3)), InvariantOps()]
    for ops in every:
        keys = step.keys(dtype)
        out = ops.rotate_latent(step.query, step.compressed, step.rotation, step.norm, LatentWrite(keys, step.slots))
        close(out[:, :, step.rank :], expected[:, :, step.rank :])
        close(keys, expected_keys)
        results.append((out[:, :, step.rank :].clone(), keys))
    assert all(map(torch.equal, results[0], results[1]))


@each_type
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16], ids=str)
def test_keys_are_cached_in_the_caches_type(dtype: torch.dtype, cached: torch.dtype) -> None:
    step = Step(SHAPES[1], dtype)
    every: list[FusedOps] = [NativeOps(op_queue_of(2)), InvariantOps()]
    for ops in every:
        as_computed, narrow = step.keys(torch.float32), step.keys(cached)
        out = [
            ops.rotate_latent(step.query, step.compressed, step.rotation, step.norm, LatentWrite(keys, step.slots))
            for keys in (as_computed, narrow)
        ]
        assert torch.equal(out[0][:, :, step.rank :], out[1][:, :, step.rank :])
        torch.testing.assert_close(narrow.float(), as_computed, rtol=2**-8, atol=1e-6)
        wide = LatentNorm(step.norm.weight * 1e6, EPS)
        ops.rotate_latent(step.query, step.compressed, step.rotation, wide, LatentWrite(narrow, step.slots))
        assert not narrow.isinf().any()


@each_type
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "outputs", "inputs"), [(1, 1, 5, 3), (3, 5, 40, 16), (37, 3, 512, 128)])
def test_each_head_has_a_product_of_its_own(
    rows: int, heads: int, outputs: int, inputs: int, stored: torch.dtype, dtype: torch.dtype
) -> None:
    """Inputs and outputs lie among others; a row does not depend on the rows beside it."""
    weight = randn(heads, outputs, inputs, dtype=stored).to(dtype if stored != dtype == torch.bfloat16 else stored)
    x, room = randn(rows, heads, inputs + 9, seed=1, dtype=dtype), torch.zeros(rows, heads, outputs + 7, dtype=dtype)
    expected = torch.einsum("rhi,hoi->rho", x[:, :, :inputs].double(), weight.double())
    by_team = []
    for team in (1, 2, 3):
        product = NativeLinear(op_queue_of(team), dtype).pack_heads(weight)
        out = room.clone()
        product(x[:, :, :inputs], out[:, :, :outputs])
        assert not out[:, :, outputs:].any()
        torch.testing.assert_close(out[:, :, :outputs].double(), expected, rtol=TOLERANCES[dtype], atol=1e-4)
        alone = room.clone()
        for row in range(rows):
            product(x[row : row + 1, :, :inputs], alone[row : row + 1, :, :outputs])
        assert torch.equal(alone, out)
        by_team.append(out)
    assert torch.equal(by_team[0], by_team[1])
    assert torch.equal(by_team[0], by_team[2])


def test_torchs_products_are_the_same_row_by_row() -> None:
    weight, x = randn(3, 20, 8), randn(5, 3, 8, seed=1)
    out, by_row = torch.zeros(2, 5, 3, 20)
    PlainKernel().pack_heads(weight)(x, out)
    HeadsByRow(weight)(x, by_row)
    torch.testing.assert_close(out, by_row)


def test_other_types_are_refused() -> None:
    product = NativeLinear(op_queue_of(1)).pack_heads(randn(2, 4, 4))
    with pytest.raises(ValueError, match=r"contiguous rows of torch\.float32"):
        product(randn(1, 2, 4, dtype=torch.bfloat16), randn(1, 2, 4, dtype=torch.bfloat16))
