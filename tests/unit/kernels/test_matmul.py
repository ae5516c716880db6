"""Our matrix product is torch's, and gives a row the same bits however many rows there are and wherever it is."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hetero_api.model_parts import ExpertsConfig, Routing
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.kernels.expert_choice import RouterWeights
from hetero_worker.kernels.expert_choice import router_logits as plain_logits
from hetero_worker.kernels.matmul import MatmulTile, linear
from hetero_worker.kernels.routing import router_logits
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.triton.linear import DeviceKernel, TritonKernel
from hetero_worker.layers.triton_ops import InvariantTritonOps, TritonOps
from tests.support.seeded import seeded

pytestmark = pytest.mark.unit

CUDA = torch.device("cuda", 0)
EPS = 1e-6
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


@each_dtype
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [(0, 5, 7), (1, 1, 1), (1, 50, 7), (3, 33, 64), (65, 40, 129), (130, 31, 70)],
)
def test_it_is_torchs_linear(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, in_features, dtype=dtype), randn(out_features, in_features, dtype=dtype, seed=1)
    for bias in (None, randn(out_features, dtype=dtype, seed=2)):
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        got = linear(x, weight, bias)
        assert got.dtype == dtype
        assert got.is_contiguous()
        # Sums in float32, rounded once.
        torch.testing.assert_close(got.double(), expected.to(dtype).double(), rtol=1e-2, atol=2e-5)


@each_dtype
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_at_any_place(dtype: torch.dtype) -> None:
    x, weight, bias = randn(70, 45, dtype=dtype), randn(37, 45, dtype=dtype, seed=1), randn(37, dtype=dtype, seed=2)
    whole = linear(x, weight, bias)
    for rows in range(1, 71):
        assert torch.equal(linear(x[:rows], weight, bias), whole[:rows]), f"{rows} rows"
    for row in range(0, 70, 3):
        assert torch.equal(linear(x[row : row + 1], weight, bias)[0], whole[row]), f"row {row} alone"
    assert torch.equal(linear(x.flip(0), weight, bias), whole.flip(0))


@pytest.mark.parametrize("rows", [1, 9])
def test_rows_apart_from_each_other_and_at_odd_addresses_are_taken_as_they_are(rows: int) -> None:
    weight, wide = randn(6, 5, seed=1), randn(rows, 12)
    for x in (wide[:, 3:8], wide[:, ::2][:, :5], randn(rows * 5 + 1)[1:].view(rows, 5)):
        before = x.clone()
        assert torch.equal(linear(x, weight, None), linear(before, weight, None))
        assert torch.equal(x, before)


def test_tiles_follow_from_the_weight_alone_and_keep_a_large_gpu_busy() -> None:
    assert [MatmulTile.of(columns, 2).columns for columns in (151_936, 24_576, 12_288, 6144, 576)] == [
        128, 128, 64, 32, 32,
    ]  # fmt: skip
    assert [MatmulTile.of(columns, 4).columns for columns in (151_936, 8192, 6144)] == [64, 64, 32]


def router_of(width: int, num_experts: int, dtype: torch.dtype) -> RouterWeights:
    experts = ExpertsConfig(num_experts, 1, 8, layers=(0,), routing=Routing("sigmoid"))
    return RouterWeights(experts, randn(num_experts, width, seed=1, dtype=dtype), randn(width, seed=2), EPS)


@each_dtype
@pytest.mark.parametrize(("width", "num_experts"), [(1, 1), (70, 5), (600, 40)])
def test_a_routers_logits_are_the_plain_ones_to_the_last_bit(width: int, num_experts: int, dtype: torch.dtype) -> None:
    hidden, router = randn(9, width, dtype=dtype), router_of(width, num_experts, dtype)
    whole = router_logits(hidden, router)
    assert torch.equal(whole, plain_logits(hidden, router))
    for ops in (TritonOps(), InvariantTritonOps()):
        for found, expected in zip(ops.route(hidden, router), PLAIN_OPS.route(hidden, router), strict=True):
            assert torch.equal(found, expected)
    for row in range(9):
        assert torch.equal(router_logits(hidden[row : row + 1], router)[0], whole[row])
    assert router_logits(hidden[:0], router).shape == (0, num_experts)


def test_a_router_takes_rows_apart_from_each_other() -> None:
    wide, router = randn(3, 20), router_of(16, 4, torch.float32)
    rows = wide[:, 2:18]
    assert torch.equal(router_logits(rows, router), router_logits(rows.clone(), router))


def test_ops_of_a_device_give_capped_logits_by_the_row() -> None:
    ops, logits = InvariantTritonOps(), randn(9, 13)
    assert ops.name == "triton-invariant"
    torch.testing.assert_close(ops.capped(logits.clone(), 2.0), PLAIN_OPS.capped(logits.clone(), 2.0))


def test_a_cuda_device_computes_with_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "_triton_problem", None)
    backend = CudaBackend(0, pool="test")
    assert backend.fused_ops(batch_invariant=True).name == "triton-invariant"
    kernel = backend.linear(torch.float32, batch_invariant=True)
    assert isinstance(kernel, TritonKernel)
    weight, x = randn(6, 5), randn(3, 5, seed=1)
    torch.testing.assert_close(kernel.pack(weight)(x, None), F.linear(x, weight))
    assert not kernel.copies_weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (5, 40), (1100, 33), (2600, 520), (4100, 1030)])
def test_one_row_is_multiplied_as_in_float64(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    x, weight = randn(1, in_features, dtype=dtype), randn(out_features, in_features, seed=1, dtype=dtype)
    bias = randn(out_features, seed=2, dtype=dtype)
    packed = DeviceKernel(x.device, dtype).pack(weight)
    exact = F.linear(x.double(), weight.double())
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(packed(x, bias).double(), exact + bias.double(), rtol=tolerance, atol=tolerance)
    logits = packed.logits(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
    several = randn(3, in_features, dtype=dtype)
    torch.testing.assert_close(packed(several, bias), F.linear(several, weight, bias))
