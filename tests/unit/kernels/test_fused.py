"""Fused steps by Triton's kernels equal those by torch's operators, and give a row the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from hetero_api.model_config import RopeConfig
from hetero_api.model_parts import Activation
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.kernels.trial import run_one
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps, HeadWeights
from hetero_worker.layers.rotary import RotaryTables, Rotation
from hetero_worker.layers.triton_ops import TritonOps
from tests.support.seeded import seeded, zeros

pytestmark = pytest.mark.unit

OPS = TritonOps()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative, and absolute for what is near 1: torch rounds bfloat16 after each operator, a kernel once."""
DTYPES = tuple(TOLERANCE)
EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_a_kernel_runs_here() -> None:
    run_one(torch.get_default_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 80, 128])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_norm_is_torchs(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    assert_close(OPS.rms_norm(x, weight, EPS), PLAIN_OPS.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("eps", [1e-6, 10.0])
def test_a_norm_with_a_wider_weight_gives_the_streams_type(eps: float) -> None:
    """Weights with an offset, of 1 here, are kept in float32."""
    x, weight = randn(2, 33, dtype=torch.bfloat16), 1 + randn(33, seed=1) / 1000
    normed = OPS.rms_norm(x, weight, eps)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, PLAIN_OPS.rms_norm(x, weight, eps), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 128])
@pytest.mark.parametrize("rows", [1, 3])
def test_adding_and_norming_are_torchs(rows: int, width: int, dtype: torch.dtype) -> None:
    residual, delta = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype, seed=1)
    weight, expected = randn(width, seed=2), residual.clone()
    normed = OPS.add_rms_norm(residual, delta, weight, EPS)
    expected_normed = PLAIN_OPS.add_rms_norm(expected, delta, weight, EPS)
    ulps = 1 if dtype == torch.bfloat16 else 0  # which the interpreter, other than a GPU, rounds towards zero
    torch.testing.assert_close(residual, expected, rtol=ulps * torch.finfo(dtype).eps, atol=0)
    assert_close(normed, expected_normed)


def test_rows_may_lie_apart() -> None:
    wide, weight = randn(4, 100), randn(40, seed=1)
    part = wide[:, 10:50]
    assert_close(OPS.rms_norm(part, weight, EPS), PLAIN_OPS.rms_norm(part, weight, EPS))
    before, around = part.clone(), wide.clone()
    normed = OPS.add_rms_norm(part, wide[:, 60:], weight, EPS)
    assert_close(normed, PLAIN_OPS.add_rms_norm(before, wide[:, 60:], weight, EPS))
    around[:, 10:50] = before
    assert torch.equal(wide, around)
    assert_close(OPS.gated(wide[:, :50], "silu"), PLAIN_OPS.gated(wide[:, :50], "silu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 50, 64, 1100])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_gate_is_torchs(activation: Activation, columns: int, dtype: torch.dtype) -> None:
    gate_up = 3 * randn(2, 2 * columns, dtype=dtype)
    assert_close(OPS.gated(gate_up, activation), PLAIN_OPS.gated(gate_up, activation))


@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_wide_open_gate_passes_and_a_shut_one_stops(activation: Activation) -> None:
    gate_up = torch.tensor([[60.0, -60.0, 0.0, 2.0, 2.0, 2.0]])
    wide_open = (2.0 + 1.0) * 7.0 if activation == "clamped_swiglu" else 120.0
    [out] = OPS.gated(gate_up, activation).tolist()
    assert out == [pytest.approx(wide_open, rel=1e-5), pytest.approx(0.0, abs=1e-20), 0.0]


class Heads:
    """One step's projections of random content, and all that turns them to what attention reads."""

    def __init__(
        self, *, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, with_norms: bool
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.qkv = randn(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        table = RotaryTables(
            [RopeConfig(100.0)], head_dims=[head_dim], max_length=64, dtype=dtype, device=torch.get_default_device()
        )
        self.rotation = table.at(torch.arange(tokens) * 3 % 64)[0]
        self.norms: HeadWeights | None = None
        if with_norms:
            self.norms = HeadWeights(randn(num_heads + num_kv_heads, head_dim, seed=1, dtype=dtype), EPS)
        self.cache = LayerCache.allocate(
            num_blocks=6, block_size=4, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, zeros=zeros
        )
        self.slots = torch.randperm(20, generator=seeded(2))[:tokens] + 4

    def empty_cache(self) -> LayerCache:
        return LayerCache(torch.zeros_like(self.cache.keys), torch.zeros_like(self.cache.values), 4)

    def written_by(self, ops: FusedOps, cache: LayerCache) -> torch.Tensor:
        """The queries; keys and values are in the cache."""
        return ops.rotate_and_write(
            self.qkv.clone(), self.rotation, num_heads=self.num_heads, norms=self.norms, cache=cache, slots=self.slots
        )


SHAPES = [(1, 1, 1, 8), (3, 6, 2, 20), (5, 14, 2, 64), (2, 3, 3, 96), (1, 28, 4, 16)]
with_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
with_norms = pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "head norms"])


def heads_of(shape: tuple[int, int, int, int], dtype: torch.dtype, *, with_norms: bool) -> Heads:
    tokens, num_heads, num_kv_heads, head_dim = shape
    return Heads(
        tokens=tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        with_norms=with_norms,
    )


@with_shapes
@with_norms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_and_values_are_written_where_torch_writes_them(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, with_norms: bool
) -> None:
    heads = heads_of(shape, dtype, with_norms=with_norms)
    caches = heads.empty_cache(), heads.empty_cache()
    assert_close(heads.written_by(OPS, caches[0]), heads.written_by(PLAIN_OPS, caches[1]))
    assert_close(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)
    untouched = torch.ones(24, dtype=torch.bool).index_fill_(0, heads.slots, value=False)
    assert not caches[0].keys[untouched].any()


def test_a_cache_of_float16_keeps_its_largest_number_for_larger_ones() -> None:
    heads = heads_of((2, 4, 2, 16), torch.float32, with_norms=False)
    heads.qkv[0] *= 1e6
    heads.qkv[1, -1, 0] = torch.nan
    caches = [LayerCache(torch.zeros(24, 2, 16).half(), torch.zeros(24, 2, 16).half(), 4) for _ in range(2)]
    for ops, cache in zip((OPS, PLAIN_OPS), caches, strict=True):
        heads.written_by(ops, cache)
        assert float(cache.keys.abs().max()) == 65504.0
        assert int(cache.values.isnan().sum()) == 1
        assert not cache.values.isinf().any()


def test_head_norms_of_a_wider_type_give_the_projections() -> None:
    heads = heads_of((2, 4, 2, 16), torch.bfloat16, with_norms=False)
    heads.norms = HeadWeights(1 + randn(6, 16) / 1000, 0.5)
    caches = heads.empty_cache(), heads.empty_cache()
    assert_close(heads.written_by(OPS, caches[0]), heads.written_by(PLAIN_OPS, caches[1]))
    assert_close(caches[0].keys, caches[1].keys)


@with_shapes
def test_norms_over_all_heads_are_torchs(shape: tuple[int, int, int, int]) -> None:
    heads = heads_of(shape, torch.float32, with_norms=True)
    assert heads.norms is not None
    mean_squares = randn(shape[0], 2, seed=5).square() + 0.1
    heads.norms = HeadWeights(heads.norms.weight, EPS, mean_squares)
    caches = heads.empty_cache(), heads.empty_cache()
    assert_close(heads.written_by(OPS, caches[0]), heads.written_by(PLAIN_OPS, caches[1]))
    assert_close(caches[0].keys, caches[1].keys)


def rotated_rows(qkv: torch.Tensor) -> torch.Tensor:
    """All tokens are at one position."""
    cos, sin = (randn(1, 1, 20, seed=seed).repeat(len(qkv), 1, 1) for seed in (2, 3))
    norms = HeadWeights(randn(8, 20, seed=1), EPS)
    keys, values = torch.zeros(2, len(qkv), 2, 20, dtype=qkv.dtype)
    query = OPS.rotate_and_write(
        qkv.view(len(qkv), 10, 20),
        Rotation(cos, sin),
        num_heads=6,
        norms=norms,
        cache=LayerCache(keys, values, 1),
        slots=torch.arange(len(qkv)),
    )
    return torch.cat([query, keys, values], dim=1)


def one_row_each(x: torch.Tensor) -> list[torch.Tensor]:
    return [row.unsqueeze(0) for row in x.clone()]


ROWWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda x: OPS.rms_norm(x, randn(200, seed=1), EPS),
    "add and norm": lambda x: OPS.add_rms_norm(x, x.flip(1), randn(200, seed=1), EPS),
    "silu": lambda x: OPS.gated(x, "silu"),
    "gelu": lambda x: OPS.gated(x, "gelu_tanh"),
    "clamped": lambda x: OPS.gated(x, "clamped_swiglu"),
    "rotate": rotated_rows,
}


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(name: str, dtype: torch.dtype) -> None:
    x = randn(7, 200, dtype=dtype)
    alone = torch.cat([ROWWISE[name](row) for row in one_row_each(x)])
    assert torch.equal(ROWWISE[name](x.clone()), alone)


def test_no_rows_are_no_work() -> None:
    none = torch.empty(0, 8)
    assert OPS.rms_norm(none, torch.ones(8), EPS).shape == (0, 8)
    assert OPS.add_rms_norm(none, none, torch.ones(8), EPS).shape == (0, 8)
    assert OPS.gated(none, "silu").shape == (0, 4)
    rotation = Rotation(torch.empty(0, 1, 2), torch.empty(0, 1, 2))
    cache, slots = LayerCache(torch.empty(0, 1, 2), torch.empty(0, 1, 2), 1), torch.empty(0, dtype=torch.int64)
    query = OPS.rotate_and_write(torch.empty(0, 4, 2), rotation, num_heads=2, norms=None, cache=cache, slots=slots)
    assert query.shape == (0, 2, 2)
