"""The kernels at shapes that nobody chose: every kind of operation, with tails, experts in splits, and all teams.

test_sanitizers.py runs this file again with a library that was built with sanitizers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_api.model_parts import Activation, Routing
from hetero_api.sharding import UnitRange
from hetero_api.weight_format import WeightFormat
from hetero_worker.attention.base import AttentionRule
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.fused_ops import PLAIN_OPS, LatentWrite
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.runners.recorded.sampling import NativeSampling
from tests.support.delta_rule import DeltaCase, decode_step, tokens_of
from tests.support.examples import examples
from tests.support.native_compute import TEAMS, compute_library, computing_with, op_queue_of, randn
from tests.support.whole_number_linear import FORMATS, exact_linear, random_matrix
from tests.unit.native_compute.test_attention import CACHED, attended, case_of
from tests.unit.native_compute.test_delta import Rule
from tests.unit.native_compute.test_delta import assert_close as assert_rule
from tests.unit.native_compute.test_draws import assert_chosen, assert_drawn, cycled
from tests.unit.native_compute.test_draws import inputs as decoding_inputs
from tests.unit.native_compute.test_experts import ACTIVATIONS, EVERY, NUMBER, Layer, assert_close, routed
from tests.unit.native_compute.test_latent import Step
from tests.unit.native_compute.test_route import router_of
from tests.unit.native_compute.test_rows import Heads

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


@settings(max_examples=examples(60))
@given(
    isas, teams, st.sampled_from(EVERY), results, st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]),
    st.booleans(), st.integers(0, 140), st.one_of(st.sampled_from([32, 64, 96, 128]), SIZES), SIZES,
)  # fmt: skip
def test_gated_products(
    isa: str, team: int, stored: object, dtype: torch.dtype, activation: Activation, biased: bool,
    rows: int, columns: int, inputs: int,
) -> None:  # fmt: skip
    """One operation has the bits of two."""
    x, bias = randn(rows, inputs, dtype=dtype), randn(2 * columns, seed=1, dtype=dtype) if biased else None
    with computing_with(isa):
        kernel, ops = NativeLinear(queue(team), dtype), NativeOps(queue(team))
        if isinstance(stored, WeightFormat):
            weight = kernel.pack_quantized(random_matrix(stored, 2 * columns, inputs))
        else:
            weight = kernel.pack(randn(2 * columns, inputs, seed=2, dtype=stored))  # type: ignore[arg-type]
        together, apart = weight.gated(x, bias, activation, ops), ops.gated(weight(x, bias), activation)
    assert torch.equal(together, apart)


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


@settings(max_examples=examples(30))
@given(isas, teams, results, st.integers(1, 20), SIZES, st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]))
def test_gates_and_products_of_rows(
    isa: str, team: int, dtype: torch.dtype, rows: int, width: int, activation: Activation
) -> None:
    gate_up, gates, weight = randn(rows, 2 * width, dtype=dtype), randn(rows, width, seed=1), randn(width, seed=2)
    with computing_with(isa):
        ops = NativeOps(queue(team))
        gated, beside = ops.gated(gate_up, activation), ops.beside(None, gates)
        products = ops.row_products(gate_up[:, :width].contiguous(), weight)
        by_column, by_row = ops.opened(gates.clone(), gates), ops.opened(gates.clone(), gates[:, :1].contiguous())
        halves = ops.halves(gate_up)
    _close(gated, PLAIN_OPS.gated(gate_up.double(), activation), dtype)
    _close(products, gate_up[:, :width].double() @ weight.double()[:, None], torch.float32)
    _close(by_column, gates.double() * gates.double().sigmoid(), torch.float32)
    _close(by_row, gates.double() * gates[:, :1].double().sigmoid(), torch.float32)
    assert torch.equal(beside, torch.cat([torch.zeros_like(gates), gates], dim=1))
    assert all(map(torch.equal, halves, gate_up.chunk(2, dim=1)))


@settings(max_examples=examples(30))
@given(isas, teams, results, st.integers(1, 20), SIZES, st.integers(1, 4), st.data())
def test_sums_and_picks_of_rows(
    isa: str, team: int, dtype: torch.dtype, rows: int, width: int, terms: int, data: st.DataObject
) -> None:
    x, deltas = randn(rows, width, dtype=dtype), [randn(rows, width, seed=1 + i, dtype=dtype) for i in range(terms)]
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=30)))
    with computing_with(isa):
        ops, ours, plain = NativeOps(queue(team)), x.clone(), x.clone()
        assert torch.equal(ops.pick(x, index), x[index])
        ops.add(ours, *deltas)
    PLAIN_OPS.add(plain, *deltas)
    assert torch.equal(ours, plain)


@settings(max_examples=examples(30))
@given(
    isas, teams, results, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.tuples(st.integers(1, 19), st.integers(1, 6), st.integers(1, 4), st.integers(1, 80).map(lambda n: 2 * n)),
    st.booleans(),
)  # fmt: skip
def test_heads_rotated_and_cached(
    isa: str, team: int, dtype: torch.dtype, cached: torch.dtype, shape: tuple[int, int, int, int], with_norms: bool
) -> None:
    tokens, groups, kv_heads, head_dim = shape
    heads = Heads((tokens, groups * kv_heads, kv_heads, head_dim), with_norms=with_norms, dtype=dtype)
    exact = PLAIN_OPS.rotate(
        heads.qkv.double(), heads.exact_rotation, num_heads=heads.num_heads, norms=heads.exact_norms
    )
    with computing_with(isa):
        ops = NativeOps(queue(team))
        squares = ops.mean_squares(heads.qkv, num_heads=heads.num_heads, widths=(3, 5))
        query, cache = heads.written_by(ops, cached)
    wide = heads.qkv.double().square().sum(2)
    of_heads = wide[:, : heads.num_heads].sum(1) / 3, wide[:, heads.num_heads : heads.num_heads + kv_heads].sum(1) / 5
    _close(squares, torch.stack(of_heads, dim=1), torch.float32)
    _close(query, exact.query, dtype)
    torch.testing.assert_close(cache.keys[heads.slots].double(), exact.key, rtol=2**-7, atol=2e-2)
    untouched = sorted({*range(len(cache.keys))} - {*heads.slots.tolist()})
    assert not cache.keys[untouched].any()
    assert not cache.values[untouched].any()


@settings(max_examples=examples(30))
@given(
    isas, teams, results,
    st.tuples(
        st.integers(1, 19), st.integers(1, 5), st.integers(1, 90), st.integers(1, 30).map(lambda n: 2 * n), SIZES
    ),
)  # fmt: skip
def test_latent_keys_and_products_of_heads(
    isa: str, team: int, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    tokens, heads, nope, _, rank = shape
    step, weight = Step(shape, dtype), randn(heads, rank, nope, seed=5, dtype=dtype)
    keys, plain_keys = step.keys(dtype), step.keys(dtype)
    with computing_with(isa):
        out = NativeOps(queue(team)).rotate_latent(
            step.query, step.compressed, step.rotation, step.norm, LatentWrite(keys, step.slots)
        )
        NativeLinear(queue(team), dtype).pack_heads(weight)(step.query[:, :, :nope], out[:, :, :rank])
    plain = PLAIN_OPS.rotate_latent(
        step.query, step.compressed, step.rotation, step.norm, LatentWrite(plain_keys, step.slots)
    )
    torch.testing.assert_close(keys, plain_keys, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(out[:, :, rank:], plain[:, :, rank:], rtol=2**-6, atol=2e-2)
    expected = torch.einsum("rhi,hoi->rho", step.query[:, :, :nope].double(), weight.double())
    torch.testing.assert_close(out[:, :, :rank].double(), expected, rtol=2**-7, atol=1e-4)
    assert out.shape == (tokens, heads, rank + shape[3])


@settings(max_examples=examples(20))
@given(
    isas, teams, results, st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.builds(
        DeltaCase, st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 5),
        st.just(0.01),  # with less, a head whose output is almost nothing is mostly its rounding
    ),
)  # fmt: skip
def test_the_delta_rule(isa: str, team: int, dtype: torch.dtype, lengths: list[int], case: DeltaCase) -> None:
    """All but the last token of each sequence by itself, then the last ones together."""
    sequences = [case.inputs(seed, length, dtype) for seed, length in enumerate(lengths)]
    computed = [length - 1 for length in lengths]
    with computing_with(isa):
        rule = Rule(case, queue(team))
        for slot, (inputs, done) in enumerate(zip(sequences, computed, strict=True)):
            if done:
                rule.spans(inputs, [done], slot=slot)
        out = rule.step(tokens_of(sequences, computed), decode_step(computed, range(len(lengths))))
    assert_rule(out, torch.stack([case.by_definition(inputs)[-1] for inputs in sequences]))


@settings(max_examples=examples(30))
@given(
    isas, teams, floats, results, st.integers(1, 40), SIZES, st.integers(1, 8), st.integers(2, 20),
    st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.data(),
)  # fmt: skip
def test_choices_of_experts(
    isa: str, team: int, stored: torch.dtype, dtype: torch.dtype, rows: int, width: int, groups: int, size: int,
    score: str, corrected: bool, data: st.DataObject,
) -> None:  # fmt: skip
    kept = data.draw(st.integers(1, groups))
    per_token = data.draw(st.integers(1, kept * size))
    rule = Routing(score, corrected=corrected, groups=groups, kept_groups=kept)  # type: ignore[arg-type]
    router = router_of((width, groups * size, per_token), rule, stored, dtype)
    hidden = randn(rows, width, dtype=dtype)
    with computing_with(isa):
        found = NativeOps(queue(team)).route(hidden, router)
    assert all(map(torch.equal, found, PLAIN_OPS.route(hidden, router)))


@settings(max_examples=examples(30))
@given(isas, teams, st.integers(1, 20), SIZES, st.integers(1, 9), st.integers(1, 6), st.data())
def test_draws(
    isa: str, team: int, rows: int, columns: int, block_size: int, blocks: int, data: st.DataObject
) -> None:  # fmt: skip
    lengths = data.draw(st.lists(st.integers(1, block_size * blocks), min_size=rows, max_size=rows))
    order = data.draw(st.permutations(range(rows)))
    logits = randn(rows, columns)
    with computing_with(isa):
        assert_chosen({team: queue(team)}, logits.numpy())
        assert_drawn({team: queue(team)}, logits.numpy(), cycled([1.0, 0.0, 0.3], rows), begin=block_size)
        step = decoding_inputs(lengths, block_size=block_size, blocks=blocks, draws=order)
        draws = NativeSampling(queue(team), most_rows=rows, block_size=block_size)
        draws.submit(step, logits, head_ranges=[UnitRange(0, columns)], exchange=LocalExchange())
    assert step.token_ids[torch.tensor(order)].tolist() == logits.argmax(dim=1).tolist()
    assert step.attention.decode.lengths.tolist() == (np.array(lengths) + 1).tolist()


def _close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=1e-4)
