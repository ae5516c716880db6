"""Products by tiles: exact as float32's, the same bits emulated, and numbers at the edges of their range."""

from __future__ import annotations

import pytest
import torch

from hetero_worker.layers.native_linear import NativeLinear
from tests.support.native_compute import compute_library, computing_with, op_queue_of, randn

pytestmark = pytest.mark.unit

EMULATED = "amx_emulated"
ISAS = compute_library().isas
needs_emulation = pytest.mark.skipif(EMULATED not in ISAS, reason="tiles are emulated on x86-64 with AVX2")
ODD = (0.0, -0.0, 1e-39, -3e-42, 2.0**-126, 2.0**-133, 1e-30, 3.3e38, -3.4028234e38, torch.inf, -torch.inf, torch.nan)
"""Zeros, subnormal numbers, the smallest normal one, the largest, and what is no number."""


def product(isa: str, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with computing_with(isa):
        return NativeLinear(op_queue_of(2), dtype).pack(weight)(x.to(dtype), None)


def odd(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Random numbers of many magnitudes, some of which are at the edges."""
    x = randn(rows, columns, seed=seed) * 10.0 ** (6 * randn(rows, columns, seed=seed + 1))
    generator = torch.Generator().manual_seed(seed)
    for number in ODD:
        row, column = (int(torch.randint(size, (), generator=generator)) for size in (rows, columns))
        x[row, column] = number
    return x


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(1, 40, 33), (5, 16, 64), (16, 33, 100), (50, 70, 257)]
)
def test_the_processors_tiles_give_the_bits_of_the_emulated_ones(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    for seed in range(4):
        x, weight = odd(rows, in_features, seed=seed), odd(out_features, in_features, seed=seed + 9).bfloat16()
        real, emulated = product("amx", x, weight, dtype), product(EMULATED, x, weight, dtype)
        assert torch.equal(real.isnan(), emulated.isnan())
        assert torch.equal(real.nan_to_num(), emulated.nan_to_num())


@needs_emulation
@pytest.mark.parametrize("in_features", [31, 576, 4096])
def test_three_terms_are_more_exact_than_sums_of_float32_in_order(in_features: int) -> None:
    x, weight = randn(20, in_features), randn(48, in_features, seed=1).bfloat16()
    exact, in_order = x.double() @ weight.double().T, torch.zeros(20, 48)
    for column in range(in_features):
        in_order = torch.addcmul(in_order, x[:, column, None], weight[None, :, column].float())
    by_terms = (product(EMULATED, x, weight).double() - exact).abs().max()
    assert 0 < by_terms < (in_order.double() - exact).abs().max()


@needs_emulation
def test_every_bit_of_a_number_is_multiplied() -> None:
    """A weight of 1 gives back all 24 bits of x."""
    x = torch.tensor(
        [[1.0 + 2.0**-23], [-(2.0 - 2.0**-23)], [16777215.0], [2.0**-100 * (1 + 2.0**-23)], [3.4028234e38]]
    )
    assert torch.equal(product(EMULATED, x, torch.ones(1, 1).bfloat16()), x)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_stays_in_its_row(isa: str) -> None:
    x = torch.ones(5, 40)
    x[1, 7], x[2, 9], x[3, 39] = torch.nan, torch.inf, -torch.inf
    x[4, 0] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)  # a NaN whose upper half is infinity's
    y = product(isa, x, torch.ones(20, 40).bfloat16())
    assert torch.equal(y[0], torch.full((20,), 40.0))
    assert y[1].isnan().all()
    assert torch.equal(y[2], torch.full((20,), torch.inf))
    assert torch.equal(y[3], torch.full((20,), -torch.inf))
    assert y[4].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_subnormal_numbers_count_at_most_as_themselves(isa: str) -> None:
    """Tiles take them for 0; no set makes more of them."""
    x, weight = torch.full((3, 64), 1e-39), torch.ones(4, 64).bfloat16()
    y = product(isa, x, weight)
    assert ((y >= 0) & (y <= 6.5e-38)).all()
