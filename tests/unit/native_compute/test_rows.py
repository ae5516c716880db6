"""The native row kernels compute what PlainOps does, by every instruction set, and give a row bits of its own.

Results of bfloat16 are the exact ones rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.model_config import RopeConfig
from hetero_api.model_parts import Activation
from hetero_worker.attention.kv_cache import LayerCache, as_cached
from hetero_worker.backends.cpu import CpuBackend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.layers.fused_ops import PLAIN_OPS, HeadWeights
from hetero_worker.layers.invariant_ops import InvariantOps
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.layers.norm import ResidualStream
from hetero_worker.layers.rotary import RotaryTables, Rotation
from hetero_worker.native.compute_library import F32, GELU, gated_op
from hetero_worker.native.op_queue import Arena, OpQueue
from tests.support.native_compute import TEAMS, compute_library, computing_with, op_queue_of

pytestmark = pytest.mark.unit

HOST = torch.device("cpu")
EPS = 1e-6
WIDTHS = (1, 7, 16, 33, 64, 200, 576, 1000)
SHAPES = [(1, 1, 1, 8), (3, 6, 2, 20), (5, 14, 2, 64), (2, 3, 3, 96), (7, 28, 4, 16), (4, 5, 1, 72), (1, 9, 3, 256)]
"""Tokens, query heads, KV heads, head_dim."""
TYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6}
RowOp = Callable[[torch.Tensor], torch.Tensor]
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@pytest.fixture(params=TEAMS)
def op_queue(request: pytest.FixtureRequest, isa: str) -> OpQueue:
    return op_queue_of(request.param)


@pytest.fixture
def ops(op_queue: OpQueue) -> NativeOps:
    return NativeOps(op_queue)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCES[actual.dtype], atol=1e-6)


def assert_rows_alone(make_op: Callable[[NativeOps], RowOp], x: torch.Tensor) -> None:
    """A row has the same bits by itself, among others, and with any number of threads."""
    whole = make_op(NativeOps(op_queue_of(1)))(x.clone())
    for team in TEAMS:
        op = make_op(NativeOps(op_queue_of(team)))
        assert torch.equal(op(x.clone()), whole)
        assert torch.equal(torch.cat([op(row.clone()) for row in torch.split(x, 1)]), whole)
        assert torch.equal(op(x.flip(0)), whole.flip(0))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("dtype", "weight_type"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_norms(ops: NativeOps, rows: int, width: int, dtype: torch.dtype, weight_type: torch.dtype) -> None:
    x, delta = randn(rows, width, dtype=dtype), randn(rows, width, seed=1, dtype=dtype)
    weight = randn(width, seed=2, dtype=weight_type)
    assert_close(ops.rms_norm(x, weight, EPS), PLAIN_OPS.rms_norm(x.double(), weight.double(), EPS))
    ours = x.clone()
    normed = ops.add_rms_norm(ours, delta, weight, EPS)
    assert torch.equal(ours, x + delta)
    assert_close(normed, PLAIN_OPS.rms_norm(ours.double(), weight.double(), EPS))
    assert torch.equal(normed, ops.rms_norm(ours, weight, EPS))


@each_type
@pytest.mark.parametrize("width", [33, 576])
def test_a_norms_rows_are_alone(isa: str, width: int, dtype: torch.dtype) -> None:
    weight, x = randn(width, seed=1, dtype=dtype), randn(7, width, dtype=dtype)
    assert_rows_alone(lambda ops: lambda x: ops.rms_norm(x, weight, EPS), x)
    assert_rows_alone(lambda ops: lambda x: ops.add_rms_norm(x, x.flip(1).contiguous(), weight, EPS), x)


def test_a_norm_of_large_numbers_is_no_worse_than_torchs(ops: NativeOps) -> None:
    x, weight = 1e15 * randn(3, 4096), randn(4096, seed=1)
    assert_close(ops.rms_norm(x, weight, EPS), PLAIN_OPS.rms_norm(x.double(), weight.double(), EPS))


@each_type
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates(ops: NativeOps, activation: Activation, columns: int, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * columns, dtype=dtype)
    assert_close(ops.gated(gate_up, activation), PLAIN_OPS.gated(gate_up.double(), activation))


@each_type
@pytest.mark.parametrize("columns", WIDTHS)
def test_gates_of_what_lies_elsewhere(ops: NativeOps, columns: int, dtype: torch.dtype) -> None:
    gates, wide = randn(3, columns, dtype=dtype), randn(3, 3 * columns, seed=1, dtype=dtype)
    up = wide[:, columns : 2 * columns]
    together = torch.cat([gates, up], dim=1)
    assert torch.equal(ops.gated(gates, "gelu_tanh", up), ops.gated(together, "gelu_tanh"))
    with pytest.raises(ValueError, match=r"rows of torch.* side by side"):
        ops.gated(gates, "gelu_tanh", randn(columns + 1, 3, dtype=dtype).T[:, :columns])


@each_type
@pytest.mark.parametrize("width", WIDTHS)
def test_two_stand_side_by_side_and_are_taken_apart(ops: NativeOps, width: int, dtype: torch.dtype) -> None:
    first, second = randn(3, width, dtype=dtype), randn(3, width, seed=1, dtype=dtype)
    for pair in ((first, second), (first, None), (None, second)):
        joined = ops.beside(*pair)
        assert torch.equal(joined, PLAIN_OPS.beside(*pair))
        assert all(map(torch.equal, ops.halves(joined), PLAIN_OPS.halves(joined)))
    with pytest.raises(ValueError, match="one of two tensors"):
        ops.beside(None, None)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_far_from_zero(ops: NativeOps, activation: Activation) -> None:
    gates = torch.tensor([[-1e30, -500.0, -104.0, -88.5, -87.2, -20.0, -0.0, 0.0, 1e-30, 20.0, 88.5, 500.0, 1e30]])
    out = ops.gated(torch.cat([gates, torch.ones_like(gates)], dim=1), activation)
    torch.testing.assert_close(out, PLAIN_OPS.gated(torch.cat([gates, torch.ones_like(gates)], dim=1), activation))


@each_type
def test_what_is_no_number_stays_so(ops: NativeOps, dtype: torch.dtype) -> None:
    nothing = torch.tensor([[float("nan")] * 20 + [1.0] * 20], dtype=dtype)
    for activation in get_args(Activation):
        assert ops.gated(nothing, activation).isnan().all()


@each_type
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("gates_type", TYPES, ids=str)
def test_gates_of_columns_and_of_rows(
    ops: NativeOps, columns: int, gates_type: torch.dtype, dtype: torch.dtype
) -> None:
    x = randn(3, columns, dtype=dtype)
    for width in (columns, 1):
        gates, ours = 4 * randn(3, width, seed=1, dtype=gates_type), x.clone()
        assert ops.opened(ours, gates) is ours
        assert_close(ours, PLAIN_OPS.opened(x.double(), gates.double()))


@each_type
@pytest.mark.parametrize("width", WIDTHS)
def test_products_with_a_row_of_weights(ops: NativeOps, width: int, dtype: torch.dtype) -> None:
    x, weight = randn(3, width, dtype=dtype), randn(1, width, seed=1)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(ops.row_products(x, weight).double(), exact, rtol=2e-6, atol=1e-4)


@each_type
def test_rows_of_gates_and_products_are_alone(isa: str, dtype: torch.dtype) -> None:
    weight = randn(1, 331, seed=1)
    assert_rows_alone(lambda ops: lambda x: ops.row_products(x, weight), randn(5, 331, dtype=dtype))
    assert_rows_alone(lambda ops: lambda x: ops.opened(x, x.flip(1).contiguous()), randn(5, 331, dtype=dtype))
    assert_rows_alone(lambda ops: lambda x: ops.opened(x, x.float()[:, :1] - 1), randn(5, 331, dtype=dtype))


@each_type
@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_gates_rows_are_alone(isa: str, activation: Activation, dtype: torch.dtype) -> None:
    assert_rows_alone(lambda ops: lambda x: ops.gated(x, activation), randn(5, 2 * 331, dtype=dtype))


@pytest.mark.usefixtures("isa")
def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """To nearest, ties to even; infinities, NaN of any bits, and numbers too small to be normal stay what they are."""
    ops, generator = NativeOps(op_queue_of(1)), torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 1 << 15), generator=generator).to(torch.int16)
    x, delta = bits.view(torch.bfloat16)
    ours, expected = x.clone().unsqueeze(0), (x.float() + delta.float()).bfloat16()
    ops.add(ours, delta.clone().unsqueeze(0))
    numbers = ~expected.isnan()
    assert torch.equal(ours[0].isnan(), ~numbers)
    assert torch.equal(ours[0][numbers].view(torch.int16), expected[numbers].view(torch.int16))
    zeros = torch.zeros_like(ours)
    ops.add(zeros, x.unsqueeze(0))
    assert torch.equal(zeros[0].isnan(), x.isnan())


def test_the_exact_gelu(op_queue: OpQueue) -> None:
    """No model that is supported has it yet: the kernel is asked as it is."""
    gates = torch.linspace(-9, 9, 10_001)
    gate_up = torch.cat([gates, torch.ones_like(gates)])
    out = torch.empty_like(gates)
    op_queue.submit(gated_op(1, F32, GELU, len(gates), gate_up.data_ptr(), out.data_ptr()))
    assert (out.double() - torch.nn.functional.gelu(gates.double())).abs().max() < 1e-6


@given(
    st.integers(0, 9),
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from(TEAMS),
    st.sampled_from(compute_library().isas),
    st.sampled_from(TYPES),
)
def test_additions_and_picks(rows: int, width: int, terms: int, team: int, name: str, dtype: torch.dtype) -> None:
    with computing_with(name):
        ops, x = NativeOps(op_queue_of(team)), randn(rows + 1, width, dtype=dtype)
        deltas = [randn(rows + 1, width, seed=1 + term, dtype=dtype) for term in range(terms)]
        index = torch.randint(rows + 1, (2 * rows,), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(ops.pick(x, index), x[index])
        ours, plain = x.clone(), x.clone()
        ops.add(ours, *deltas)
        PLAIN_OPS.add(plain, *deltas)
        assert torch.equal(ours, plain)
        ops.add(ours, *deltas, factor=0.37)
        assert torch.equal(ours, (sum_of(plain, *deltas) * 0.37).to(dtype))


def sum_of(first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Added from left to right in float32."""
    total = first.float()
    for other in others:
        total = total + other.float()
    return total


class Heads:
    """One step's projections of random content, at positions that are in no order."""

    def __init__(
        self, shape: tuple[int, int, int, int], *, with_norms: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        tokens, self.num_heads, kv_heads, head_dim = shape
        self.dtype = dtype
        self.qkv = randn(tokens, self.num_heads + 2 * kv_heads, head_dim, dtype=dtype)
        table = RotaryTables([RopeConfig(100.0)], head_dims=[head_dim], max_length=64, dtype=dtype)
        self.rotation = table.at(torch.arange(tokens) * 29 % 64)[0]
        weight = randn(self.num_heads + kv_heads, head_dim, seed=1, dtype=dtype)
        self.norms = HeadWeights(weight, EPS) if with_norms else None
        self.slots = torch.randperm(20, generator=torch.Generator().manual_seed(2))[:tokens] + 4
        self.kv_shape = (24, kv_heads, head_dim)

    @property
    def exact_rotation(self) -> Rotation:
        """The rotation in float64, of the same tables."""
        rotation = self.rotation
        return Rotation(rotation.cos_table.double(), rotation.signed_sin_table.double(), rotation.positions)

    @property
    def exact_norms(self) -> HeadWeights | None:
        return None if self.norms is None else HeadWeights(self.norms.weight.double(), self.norms.eps)

    def written_by(self, ops: NativeOps, cached: torch.dtype | None = None) -> tuple[torch.Tensor, LayerCache]:
        """The queries, and the cache, of type `cached`, with keys and values in it."""
        keys, values = torch.zeros(2, *self.kv_shape, dtype=cached or self.dtype)
        cache = LayerCache(keys, values, 4)
        query = ops.rotate_and_write(
            self.qkv.clone(), self.rotation, num_heads=self.num_heads, norms=self.norms, cache=cache, slots=self.slots
        )
        return query, cache


with_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
with_norms = pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "head norms"])


@each_type
@with_shapes
@with_norms
def test_rotated_heads_lie_where_they_were_made(
    ops: NativeOps, shape: tuple[int, int, int, int], dtype: torch.dtype, *, with_norms: bool
) -> None:
    heads = Heads(shape, with_norms=with_norms, dtype=dtype)
    exact = {"num_heads": heads.num_heads, "norms": heads.exact_norms}
    expected = PLAIN_OPS.rotate(heads.qkv.double(), heads.exact_rotation, **exact)  # type: ignore[arg-type]
    rotated = ops.rotate(heads.qkv, heads.rotation, num_heads=heads.num_heads, norms=heads.norms)
    assert_close(rotated.query, expected.query)
    assert_close(rotated.key, expected.key)
    assert torch.equal(rotated.value, expected.value)
    assert rotated.query.data_ptr() == heads.qkv.data_ptr()


@each_type
@with_shapes
@with_norms
def test_keys_and_values_are_written(
    ops: NativeOps, shape: tuple[int, int, int, int], dtype: torch.dtype, *, with_norms: bool
) -> None:
    heads = Heads(shape, with_norms=with_norms, dtype=dtype)
    rotated = ops.rotate(heads.qkv.clone(), heads.rotation, num_heads=heads.num_heads, norms=heads.norms)
    query, cache = heads.written_by(ops)
    assert torch.equal(query, rotated.query)
    assert torch.equal(cache.keys[heads.slots], rotated.key)
    assert torch.equal(cache.values[heads.slots], rotated.value)
    untouched = torch.ones(24, dtype=torch.bool).index_fill_(0, heads.slots, value=False)
    assert not cache.keys[untouched].any()
    assert not cache.values[untouched].any()


@each_type
@pytest.mark.parametrize("shape", SHAPES[-2:], ids=str)
@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keys_and_values_are_written_in_the_caches_type(
    ops: NativeOps, shape: tuple[int, int, int, int], dtype: torch.dtype, cached: torch.dtype
) -> None:
    heads = Heads(shape, with_norms=True, dtype=dtype)
    heads.qkv[0, -1, :5] = torch.tensor([1e-7, -3e-6, 65_519.0, 1e9, float("nan")])  # halves' limits
    as_computed, narrow = heads.written_by(ops)[1], heads.written_by(ops, cached)[1]
    keys, values = (as_cached(each, cached) for each in (as_computed.keys, as_computed.values))
    torch.testing.assert_close(narrow.keys, keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(narrow.values, values, rtol=0, atol=0, equal_nan=True)
    assert not narrow.values.isinf().any(), "a row would get NaN of tokens that it does not see"


@each_type
@with_shapes
def test_norms_over_all_heads_use_what_ranks_have_summed(
    ops: NativeOps, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """The other ranks' heads are twice as many."""
    heads = Heads(shape, with_norms=True, dtype=dtype)
    assert heads.norms is not None
    widths = 3 * heads.num_heads * shape[3], 3 * shape[2] * shape[3]
    own = ops.mean_squares(heads.qkv, num_heads=heads.num_heads, widths=widths)
    torch.testing.assert_close(
        own, PLAIN_OPS.mean_squares(heads.qkv.double(), num_heads=heads.num_heads, widths=widths)
    )
    invariant = InvariantOps().mean_squares(heads.qkv, num_heads=heads.num_heads, widths=widths)
    torch.testing.assert_close(invariant, own)
    mean_squares = own + 0.7
    exact = HeadWeights(heads.norms.weight.double(), EPS, mean_squares.double())
    expected = PLAIN_OPS.rotate(heads.qkv.double(), heads.exact_rotation, num_heads=heads.num_heads, norms=exact)
    norms = HeadWeights(heads.norms.weight, EPS, mean_squares)
    for each in (ops, InvariantOps()):
        rotated = each.rotate(heads.qkv.clone(), heads.rotation, num_heads=heads.num_heads, norms=norms)
        assert_close(rotated.query, expected.query)
        assert_close(rotated.key, expected.key)


@each_type
@with_shapes
def test_value_heads_may_be_normed_without_a_weight(
    ops: NativeOps, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads = Heads(shape, with_norms=True, dtype=dtype)
    assert heads.norms is not None
    values = heads.qkv[:, heads.num_heads + shape[2] :].double()
    expected = values * (values.square().mean(2, keepdim=True) + EPS).rsqrt()
    query, cache = heads.written_by(ops)
    heads.norms = heads.norms._replace(with_values=True)
    same_query, with_values = heads.written_by(ops)
    assert torch.equal(same_query, query)
    assert torch.equal(with_values.keys, cache.keys)
    assert_close(with_values.values[heads.slots], expected)
    for each in (PLAIN_OPS, InvariantOps()):
        rotated = each.rotate(heads.qkv.clone(), heads.rotation, num_heads=heads.num_heads, norms=heads.norms)
        assert_close(rotated.value, expected)


def test_a_rotations_rows_are_alone(isa: str) -> None:
    """All tokens are at one position, by tables that are the tokens' own."""
    norms = HeadWeights(randn(8, 20, seed=1), EPS)

    def rotated(ops: NativeOps, qkv: torch.Tensor) -> torch.Tensor:
        cos, sin = (randn(1, 1, 20, seed=seed).repeat(len(qkv), 1, 1) for seed in (2, 3))
        ops.rotate(qkv.view(len(qkv), 10, 20), Rotation(cos, sin), num_heads=6, norms=norms)
        return qkv

    assert_rows_alone(lambda ops: lambda qkv: rotated(ops, qkv), randn(5, 200))


def test_what_is_recorded_follows_its_inputs() -> None:
    """Positions, slots and rows to pick are read anew whenever the operations are made again."""
    op_queue, heads = op_queue_of(), Heads((3, 4, 2, 16), with_norms=True)
    ops, positions, slots = NativeOps(op_queue), torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    table = RotaryTables([RopeConfig(100.0)], head_dims=[16], max_length=64, dtype=torch.float32)
    cache = LayerCache(torch.zeros(heads.kv_shape), torch.zeros(heads.kv_shape), 4)
    source = heads.qkv.flatten(1)

    def step() -> torch.Tensor:
        qkv = ops.pick(source, torch.arange(3)).view(heads.qkv.shape)
        options = {"num_heads": 4, "norms": heads.norms, "cache": cache, "slots": slots}
        return ops.rotate_and_write(qkv, table.at(positions)[0], **options)  # type: ignore[arg-type]

    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        query = step()
    positions.copy_(torch.tensor([40, 3, 0]))
    slots.copy_(torch.tensor([9, 11, 10]))
    source.mul_(0.5)
    op_queue.replay(recorded)
    replayed, cached = query.clone(), cache.keys.clone()
    cache.keys.zero_()
    assert torch.equal(step(), replayed)
    assert torch.equal(cache.keys[9:12], cached[9:12])


def test_what_the_kernels_cannot_read_is_refused() -> None:
    ops = NativeOps(op_queue_of(1))
    with pytest.raises(ValueError, match=r"of torch\.float32, not one of torch\.bfloat16"):
        ops.add(randn(2, 8), randn(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="not contiguous"):
        ops.rms_norm(randn(2, 8)[:, :4], randn(4), EPS)


def test_what_there_are_no_kernels_for_is_anothers() -> None:
    logits = randn(3, 5)
    for others in (PLAIN_OPS, InvariantOps()):
        ops = NativeOps(op_queue_of(1), others=others)
        assert torch.equal(ops.capped(logits.clone(), 2.0), others.capped(logits.clone(), 2.0))


def test_host_cores_with_the_library_get_the_kernels(isa: str) -> None:
    assert CpuBackend(op_queue_of(1)).fused_ops(batch_invariant=False).name == f"native ({isa})"


def test_why_host_cores_have_none_is_told() -> None:
    assert TorchReference("not built").fused_ops(batch_invariant=False).name == "torch (not built)"


def test_a_residual_stream_settles_by_the_kernels() -> None:
    """So that what is recorded has the addition."""
    op_queue, hidden, delta = op_queue_of(), randn(3, 40), randn(3, 40, seed=1)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        stream = ResidualStream(hidden, NativeOps(op_queue))
        stream.add(delta)
        assert stream.settle() is hidden
    assert torch.equal(hidden, randn(3, 40) + delta)
    op_queue.replay(recorded)
    assert torch.equal(hidden, randn(3, 40) + delta + delta)
