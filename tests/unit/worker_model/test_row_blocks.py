"""Linear layers in blocks: a row has the same bits whatever rows are with it, and what is not so is found out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from hetero_worker.layers.linear_kernels import LinearKernel, PackedWeight, available_kernels
from hetero_worker.layers.row_blocks import BLOCK_SIZES, BlockKernel, agreeing_sizes, cut

pytestmark = pytest.mark.unit

KERNELS = [(dtype, kernel) for dtype in (torch.float32, torch.bfloat16) for kernel in available_kernels(dtype)]
each_kernel = pytest.mark.parametrize(
    ("dtype", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", str(value))
)
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x and a weight to x · Wᵀ."""


class _Played:
    """A library that multiplies as it is told to."""

    name = "played"
    copies_weight = False

    def __init__(self, multiply: Multiply) -> None:
        self.calls: list[int] = []
        self._multiply = multiply

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        def run(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            assert bias is None
            self.calls.append(len(x))
            return self._multiply(x, weight)

        return run


def forwards(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Terms one after another."""
    total = x.new_zeros(len(x), len(weight))
    for column in range(x.shape[1]):
        total += x[:, column, None] * weight[:, column]
    return total


def backwards(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return forwards(x.flip(1), weight.flip(1))


def by_size(*, backwards_up_to: int) -> Multiply:
    return lambda x, weight: (backwards if len(x) <= backwards_up_to else forwards)(x, weight)


def backwards_at_the_edge(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Tiles of six rows; those that are left over go another way."""
    whole = len(x) // 6 * 6
    return torch.cat([forwards(x[:whole], weight), backwards(x[whole:], weight)])


def by_neighbours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (forwards if len(x) == 1 or torch.equal(x[0], x[-1]) else backwards)(x, weight)


@pytest.mark.parametrize(
    ("multiply", "expected"),
    [
        (forwards, BLOCK_SIZES),
        (by_size(backwards_up_to=1), BLOCK_SIZES[1:]),
        (by_size(backwards_up_to=3), BLOCK_SIZES[2:]),
        (by_size(backwards_up_to=32), BLOCK_SIZES[:-1]),
        (by_size(backwards_up_to=4), BLOCK_SIZES[3:]),
        (backwards_at_the_edge, (1, 2, 4)),
        (by_neighbours, (1,)),
    ],
)
def test_blocks_are_of_the_sizes_that_agree(multiply: Multiply, expected: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert agreeing_sizes(_Played(multiply), (5, 24), dtype) == expected


def test_one_element_that_goes_another_way_is_found() -> None:
    def odd(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = forwards(x, weight)
        result[1::2, 0] = backwards(x[1::2], weight[:1])[:, 0]
        return result

    for in_features in range(16, 80, 2):
        assert agreeing_sizes(_Played(odd), (7, in_features), torch.float32) == (1,)


def test_one_term_that_is_added_at_another_place_shows_in_bfloat16() -> None:
    """float32 sums that are rounded to bfloat16 hide it, but for one number in thousands."""

    def first_last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide, wide_weight = x.float(), weight.float()
        turned = torch.arange(x.shape[1]).roll(-1 if len(x) == 1 else 0)
        return forwards(wide[:, turned], wide_weight[:, turned]).to(x.dtype)

    assert agreeing_sizes(_Played(first_last), (16, 64), torch.bfloat16) == BLOCK_SIZES[1:]


@pytest.mark.parametrize(
    ("rows", "sizes", "expected"),
    [
        (0, (1, 4), []),
        (1, (4, 16), [(0, 4)]),
        (5, (4, 16), [(0, 16)]),
        (16, (4, 16), [(0, 16)]),
        (17, (4, 16), [(0, 16), (16, 4)]),
        (3, (1,), [(0, 1), (1, 1), (2, 1)]),
    ],
)
def test_rows_are_cut_into_few_blocks(rows: int, sizes: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    assert list(cut(rows, sizes)) == expected


def test_only_blocks_that_agree_are_computed() -> None:
    library = _Played(by_size(backwards_up_to=3))
    kernel = BlockKernel(library, torch.float32)
    kernel.prove([(5, 24)])
    packed = kernel.pack(torch.randn(5, 24))
    library.calls.clear()
    assert packed(torch.randn(67, 24), None).shape == (67, 5)
    assert library.calls == [64, 4]


def test_a_shape_is_tried_once_and_before_its_weights_come_if_it_is_asked_for() -> None:
    library = _Played(forwards)
    kernel = BlockKernel(library, torch.float32)
    kernel.prove([(5, 24), (7, 2)])
    tried = len(library.calls)
    assert tried
    for _ in range(3):
        kernel.pack(torch.randn(5, 24))
    assert len(library.calls) == tried
    kernel.pack(torch.randn(6, 24))
    assert len(library.calls) > tried


def test_the_report_tells_shapes_that_are_computed_row_by_row() -> None:
    kernel = BlockKernel(_Played(by_neighbours), torch.float32)
    assert kernel.name == "played-invariant"
    kernel.prove([(5, 24), (7, 25)])
    assert kernel.name == "played-invariant (row by row: 5x24, 7x25)"


@each_kernel
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (70, 33), (64, 576), (7, 50)])
def test_blocks_multiply_as_linear_does(
    dtype: torch.dtype, kernel: LinearKernel, out_features: int, in_features: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((out_features, in_features), (out_features,), (33, in_features))
    )
    packed = BlockKernel(kernel, dtype).pack(weight.clone())
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for rows in (0, 1, 5, 33):
        for given in (None, bias):
            expected = F.linear(x[:rows].double(), weight.double(), None if given is None else given.double())
            result = packed(x[:rows], given)
            assert result.dtype == dtype
            assert result.is_contiguous()
            assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


@each_kernel
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (70, 33), (7, 50)])
def test_a_row_has_the_same_bits_wherever_it_is(
    dtype: torch.dtype, kernel: LinearKernel, out_features: int, in_features: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, in_features, generator=generator).to(dtype) for n in (out_features, 140))
    packed = BlockKernel(kernel, dtype).pack(weight.clone())
    alone = torch.cat([packed(row, None) for row in torch.split(x, 1)])
    for rows in (2, 3, 7, 31, 64, 129, 140):
        assert torch.equal(packed(x[:rows], None), alone[:rows])
        assert torch.equal(packed(x[-rows:], None), alone[-rows:])
    assert torch.equal(packed(x.flip(0), None), alone.flip(0))
