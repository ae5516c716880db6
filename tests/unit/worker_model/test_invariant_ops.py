"""Steps between linear layers that give a row the same bits in any batch, on host cores, and are what PlainOps does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import pytest
import torch

from hetero_api.errors import ModelError
from hetero_api.model_config import RopeConfig
from hetero_api.model_parts import Activation
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.backends.cpu import CpuBackend
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.kernels import availability
from hetero_worker.layers.fused_ops import PLAIN_OPS, HeadWeights
from hetero_worker.layers.invariant_ops import InvariantOps, by_row, each_alike, row_sums
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.rotary import RotaryTables, Rotation
from tests.support.native_compute import op_queue_of

pytestmark = pytest.mark.unit

OPS = InvariantOps()
HOST, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
EPS = 1e-6
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 6, 2, 24, 151
"""Tokens: their elements are more than one thread gets, and no multiple of three threads' parts."""
RowOp = Callable[[torch.Tensor], torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_rows_alone(op: RowOp, x: torch.Tensor) -> None:
    """Every row, by itself and in pieces of the batch, has the bits that it has among all."""
    whole = op(x.clone())
    assert torch.equal(torch.cat([op(row.clone()) for row in torch.split(x, 1)]), whole)
    for size in (2, 3, 65):
        assert torch.equal(torch.cat([op(rows.clone()) for rows in torch.split(x, size)]), whole)
    assert torch.equal(op(x.flip(0)), whole.flip(0))


def rotation(tokens: int, dtype: torch.dtype) -> Rotation:
    rope = RopeConfig(theta=10000.0)
    return RotaryTables([rope], head_dims=[HEAD_DIM], max_length=tokens, dtype=dtype).at(torch.arange(tokens))[0]


@pytest.fixture
def three_threads() -> Iterator[None]:
    """That share elements out so that some of torch's operators compute the same one in other ways."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@each_dtype
@pytest.mark.parametrize("width", [1, 33, 576])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x, delta = (randn(TOKENS, width, dtype=dtype, seed=seed) for seed in range(2))
    weight = randn(width, seed=2)
    assert_close(OPS.rms_norm(x, weight, EPS), PLAIN_OPS.rms_norm(x, weight, EPS))
    ours, plain = x.clone(), x.clone()
    assert_close(OPS.add_rms_norm(ours, delta, weight, EPS), PLAIN_OPS.add_rms_norm(plain, delta, weight, EPS))
    assert torch.equal(ours, plain)
    assert_rows_alone(lambda rows: OPS.rms_norm(rows, weight, EPS), x)


@each_dtype
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("columns", [7, 1000])
@pytest.mark.usefixtures("three_threads")
def test_gates(columns: int, activation: Activation, dtype: torch.dtype) -> None:
    gate_up = randn(TOKENS, 2 * columns, dtype=dtype)
    assert_close(OPS.gated(gate_up, activation), PLAIN_OPS.gated(gate_up, activation))
    assert_rows_alone(lambda rows: OPS.gated(rows, activation), gate_up)
    gates, up = gate_up.chunk(2, dim=1)
    assert torch.equal(OPS.gated(gates, activation, up), OPS.gated(gate_up, activation))


@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_that_are_wide_open_or_shut_are_no_special_case(activation: Activation) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert_close(OPS.gated(gate_up, activation), PLAIN_OPS.gated(gate_up, activation))


@each_dtype
@pytest.mark.parametrize("normed", [False, True])
def test_rotations(normed: bool, dtype: torch.dtype) -> None:
    qkv = randn(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=dtype)
    norms = HeadWeights(randn(HEADS + KV_HEADS, HEAD_DIM, seed=1), EPS) if normed else None
    angles = rotation(TOKENS, dtype)
    ours = OPS.rotate(qkv.clone(), angles, num_heads=HEADS, norms=norms)
    for actual, expected in zip(ours, PLAIN_OPS.rotate(qkv, angles, num_heads=HEADS, norms=norms), strict=True):
        assert_close(actual, expected)
    for token in range(TOKENS):
        one = Rotation(angles.cos[token : token + 1], angles.signed_sin[token : token + 1])
        alone = OPS.rotate(qkv[token : token + 1].clone(), one, num_heads=HEADS, norms=norms)
        assert all(torch.equal(part[0], whole[token]) for part, whole in zip(alone, ours, strict=True))


def test_keys_and_values_are_written_where_they_belong() -> None:
    qkv, angles = randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM), rotation(3, torch.float32)
    slots = torch.tensor([7, 4, 5])
    cache = LayerCache.allocate(
        num_blocks=2, block_size=4, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32
    )
    query = OPS.rotate_and_write(qkv, angles, num_heads=HEADS, norms=None, cache=cache, slots=slots)
    expected = OPS.rotate(qkv, angles, num_heads=HEADS, norms=None)
    assert torch.equal(query, expected.query)
    assert torch.equal(cache.keys[slots], expected.key)
    assert torch.equal(cache.values[slots], expected.value)


@pytest.mark.parametrize("columns", [9, 700])
def test_capped_logits(columns: int) -> None:
    logits = randn(TOKENS, columns)
    assert_close(OPS.capped(logits.clone(), 3.0), PLAIN_OPS.capped(logits.clone(), 3.0))
    assert_rows_alone(lambda rows: OPS.capped(rows, 3.0), logits)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 577])
def test_rows_are_added_up_whole(width: int) -> None:
    x = torch.arange(3 * width, dtype=torch.float64).view(3, width)
    before = x.clone()
    assert torch.equal(row_sums(x), x.sum(dim=1, keepdim=True))
    assert torch.equal(x, before)


def test_a_function_that_treats_elements_differently_is_taken_row_by_row() -> None:
    """Like a sigmoid of torch's, whose last elements are computed by another function than those in whole vectors."""

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1).clone()
        flat[-1] += 1e-3
        return flat.sigmoid().view(x.shape)

    x = randn(5, 9)
    assert each_alike(torch.exp) is torch.exp
    taken = each_alike(sigmoid)
    assert not torch.equal(taken(x), sigmoid(x))
    assert torch.equal(taken(x), by_row(sigmoid, x))
    assert_rows_alone(taken, x)


def test_host_tensors_get_torchs_operators_and_products_row_by_row() -> None:
    backend = TorchReference()
    assert backend.fused_ops(batch_invariant=True).name == "torch-invariant"
    assert backend.linear(torch.float32, batch_invariant=True).name == "torch-invariant (row by row)"


def test_the_native_kernel_is_kept_for_its_rows_are_independent() -> None:
    assert isinstance(CpuBackend(op_queue_of()).linear(torch.float32, batch_invariant=True), NativeLinear)


def test_a_cuda_device_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"triton is not installed.*turn engine.batchInvariant off"):
        CudaBackend(0, pool="p").fused_ops(batch_invariant=True)
    with pytest.raises(ModelError, match=r"triton is not installed.*turn engine.batchInvariant off"):
        CudaBackend(0, pool="p").linear(torch.float32, batch_invariant=True)
