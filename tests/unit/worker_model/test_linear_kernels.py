"""Every kernel multiplies as F.linear does, and a host rank uses the native one wherever its library is built."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hetero_worker.backends.cpu import CpuBackend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel, RowKernel
from hetero_worker.layers.native_linear import NativeLinear
from tests.support.native_compute import op_queue_of

pytestmark = pytest.mark.unit

DTYPES = (torch.float32, torch.bfloat16)
KERNELS: list[tuple[torch.dtype, LinearKernel]] = [
    (dtype, kernel) for dtype in DTYPES for kernel in (PlainKernel(), RowKernel(), NativeLinear(op_queue_of(), dtype))
]


@pytest.mark.parametrize(("dtype", "kernel"), KERNELS, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (70, 33), (64, 576), (7, 50)])
@pytest.mark.parametrize("rows", [0, 1, 5, 8, 33])
def test_kernel_equals_plain_linear(
    dtype: torch.dtype, kernel: LinearKernel, out_features: int, in_features: int, rows: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    packed = kernel.pack(weight.clone())
    with torch.inference_mode():
        for given in (None, bias):
            expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
            result = packed(x, given)
            assert result.shape == (rows, out_features)
            assert result.dtype == dtype
            tolerance = 1e-4 if dtype == torch.float32 else 0.05
            assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)


def test_a_packed_weight_does_not_need_the_unpacked_one() -> None:
    for kernel in (PlainKernel(), RowKernel(), NativeLinear(op_queue_of())):
        weight = torch.ones(4, 6)
        packed = kernel.pack(weight)
        if kernel.copies_weight:
            weight.zero_()
        assert torch.equal(packed(torch.ones(2, 6), None), torch.full((2, 4), 6.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_host_rank_uses_the_native_kernel_wherever_its_library_is_built(dtype: torch.dtype) -> None:
    """A timed choice once took another one, seven times slower, because its samples stayed in cache."""
    assert CpuBackend(op_queue_of()).linear(dtype, batch_invariant=False).name.startswith("native (")
    assert TorchReference().linear(dtype, batch_invariant=False).name == "torch"


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_by_row_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = RowKernel().pack(torch.randn(70, 333).to(dtype))
    x, bias = torch.randn(40, 333).to(dtype), torch.randn(70).to(dtype)
    together = packed(x, bias)
    for rows in (1, 7, 39):
        assert torch.equal(packed(x[:rows], bias), together[:rows])
        assert torch.equal(packed(x[-rows:], bias), together[-rows:])
