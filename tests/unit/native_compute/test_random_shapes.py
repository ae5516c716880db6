"""The kernels at shapes that nobody chose: products, experts in splits, attention, tables of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_api.weight_format import WeightFormat
from hetero_worker.attention.base import AttentionRule
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_queue import OpQueue
from tests.support.examples import examples
from tests.support.native_compute import TEAMS, compute_library, computing_with, op_queue_of, randn
from tests.support.whole_number_linear import FORMATS, exact_linear, random_matrix
from tests.unit.native_compute.test_attention import CACHED, attended, case_of
from tests.unit.native_compute.test_experts import ACTIVATIONS, EVERY, NUMBER, Layer, assert_close, routed

pytestmark = pytest.mark.unit

QUEUES: dict[int, OpQueue] = {}
isas = st.sampled_from(compute_library().isas)
teams = st.sampled_from(TEAMS)
floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
results = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 300))
"""Small ones often: most tails are there."""


def queue(team: int) -> OpQueue:
    """Made once: a team is threads."""
    return QUEUES.setdefault(team, op_queue_of(team))


@settings(max_examples=examples(60))
@given(isas, teams, floats, st.integers(1, 80), SIZES, SIZES, st.booleans())
def test_products_of_floats(
    isa: str, team: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int, biased: bool
) -> None:
    weight, bias, x = randn(outputs, inputs).to(dtype), randn(outputs, seed=1), randn(rows, inputs, seed=2)
    with computing_with(isa):
        y = NativeLinear(queue(team)).pack(weight)(x, bias if biased else None)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6 * inputs)


@settings(max_examples=examples(60))
@given(isas, teams, st.sampled_from(FORMATS), results, st.integers(1, 80), SIZES, SIZES)
def test_products_of_whole_numbers(
    isa: str, team: int, weights: WeightFormat, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    matrix, x = random_matrix(weights, outputs, inputs), randn(rows, inputs, seed=2, dtype=dtype)
    with computing_with(isa):
        y = NativeLinear(queue(team), dtype).pack_quantized(matrix)(x, None)
    expected = exact_linear(x.float(), matrix, None)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=1e-5 * float(expected.abs().max()))


@settings(max_examples=examples(40))
@given(
    isas, teams, st.sampled_from(EVERY), st.sampled_from(EVERY), st.sampled_from(ACTIVATIONS), st.booleans(),
    st.integers(0, 30), st.integers(1, 90), st.integers(1, 60), st.integers(1, 80), st.sets(st.integers(0, NUMBER - 1)),
)  # fmt: skip
def test_experts_in_splits(
    isa: str, team: int, gate_up: object, down: object, activation: object, biased: bool,
    shared: int, hidden: int, width: int, rows: int, held: set[int],
) -> None:  # fmt: skip
    with computing_with(isa):
        layer = Layer(
            team=team, gate_up=[gate_up], down=down, activation=activation, biased=biased,  # type: ignore[list-item, arg-type]
            shared=shared, hidden=hidden, width=width,
        )  # fmt: skip
        own = {number: layer.mlps[number] for number in held}
        layer.experts.hold(own)
        x, (chosen, shares) = randn(rows, hidden), routed(rows)
        assert_close(layer.experts(x, chosen, shares), layer.expected(x, chosen, shares, own))


@settings(max_examples=examples(40))
@given(
    isas, teams, st.sampled_from([*CACHED, (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]),
    st.tuples(st.integers(1, 33).map(lambda n: 4 * n), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40)),
    st.lists(st.integers(1, 400), max_size=5), st.sampled_from([None, 1, 7, 129, 300]),
)  # fmt: skip
def test_attention(
    isa: str, team: int, types: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int, int],
    decode: list[int], window: int | None,
) -> None:  # fmt: skip
    case = case_of(shape, decode=sorted(decode, reverse=True), dtype=types[0], cache_dtype=types[1])
    rule = AttentionRule(0.2, window=window)
    with computing_with(isa):
        out = attended(queue(team), case, rule)
    tolerance = 2**-8 + 1e-5 if types[0] == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), case.expected(rule), rtol=tolerance, atol=1e-5)


@settings(max_examples=examples(40))
@given(isas, teams, st.sampled_from(EVERY), SIZES, SIZES, st.lists(st.integers(-5, 310), min_size=1, max_size=20))
def test_rows_of_tables(isa: str, team: int, stored: object, rows: int, width: int, ids: list[int]) -> None:
    kernel, chosen = NativeLinear(queue(team)), torch.tensor(ids)
    with computing_with(isa):
        if isinstance(stored, WeightFormat):
            matrix = random_matrix(stored, rows, width)
            packed, table = kernel.pack_quantized(matrix), matrix.dequantized()
        else:
            table = randn(rows, width, dtype=stored)  # type: ignore[arg-type]
            packed, table = kernel.pack(table), table.float()
        found = packed.embed(chosen)
    is_ours = (chosen >= 0) & (chosen < rows)
    torch.testing.assert_close(found[is_ours], table[chosen[is_ours]], rtol=1e-6, atol=1e-7)
    assert not found[~is_ours].any()


@settings(max_examples=examples(40))
@given(isas, teams, results, st.integers(1, 20), SIZES)
def test_norms_of_rows(isa: str, team: int, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = randn(rows, width, dtype=dtype), randn(width, seed=1, dtype=dtype)
    with computing_with(isa):
        y = NativeOps(queue(team)).rms_norm(x, weight, 1e-6)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=1e-6)
