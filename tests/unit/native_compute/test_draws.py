"""Native draws take what numpy's argmax takes, whoever of a team looks where, and make a step's inputs the next's.

Draws with noise are those of `sampling.shard.noisy_best` to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hetero_api.sharding import UnitRange
from hetero_worker.attention.base import AttentionBatch, DecodeRows
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.native.compute_library import choose_op, step_on_op
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.runners.recorded.sampling import MAX_STEPS, NativeSampling
from hetero_worker.sampling import noise
from hetero_worker.sampling.noise import COARSE, NoiseKey
from hetero_worker.sampling.request import SamplingRow, SequenceSampling
from hetero_worker.sampling.shard import MAX_IDS, native_best, noisy_best
from tests.support.examples import examples
from tests.support.native_compute import TEAMS, compute_library, computing_with, op_queue_of
from tests.support.sampling_reference import sampling_of

pytestmark = pytest.mark.unit

INF, NAN = float("inf"), float("nan")
FloatArray = npt.NDArray[np.float32]


def choose(op_queue: OpQueue, x: FloatArray, *, first: int = 0, shards: int = 1, shard: int = 0) -> FloatArray:
    """[shards, rows, 2]"""
    rows, columns = x.shape
    best = np.full((shards, rows, 2), 77, dtype=np.float32)
    op = choose_op(rows, columns, x.ctypes.data, first, shards, shard, best.ctypes.data)
    op.scratch = op_queue.scratch(op)
    op_queue.submit(op, x, best)
    return best


def assert_chosen(op_queues: dict[int, OpQueue], x: FloatArray) -> None:
    columns = x.argmax(axis=1)
    for size, op_queue in op_queues.items():
        ((scores, ids),) = choose(op_queue, x).transpose(0, 2, 1)
        assert ids.astype(np.int64).tolist() == columns.tolist(), size
        assert scores.tobytes() == x[np.arange(len(x)), columns].tobytes(), size


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 200, 1001])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_largest_is_chosen(isa: str, op_queues: dict[int, OpQueue], rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    assert_chosen(op_queues, rng.standard_normal((rows, columns), dtype=np.float32))
    assert_chosen(op_queues, rng.integers(-2, 3, (rows, columns)).astype(np.float32))


@pytest.mark.parametrize("columns", [1, 5, 16, 50, 131])
@pytest.mark.parametrize(
    "numbers",
    [[0.0], [-0.0, 0.0], [0.0, -0.0], [-INF], [-INF, INF], [INF, NAN], [NAN], [-INF, NAN, 3.0], [-1e-45, -0.0]],
)
def test_ties_and_what_is_no_number(
    isa: str, op_queues: dict[int, OpQueue], numbers: Sequence[float], columns: int
) -> None:
    rng = np.random.default_rng(columns)
    assert_chosen(op_queues, rng.choice(np.array(numbers, dtype=np.float32), (4, columns)))


@pytest.mark.parametrize("number", [NAN, INF, 5.0])
def test_the_first_of_equals_wins_wherever_it_is(isa: str, op_queues: dict[int, OpQueue], number: float) -> None:
    """In whichever lane, piece and member's share."""
    columns = 75
    x = np.zeros((columns, columns), dtype=np.float32)
    for first in range(columns):
        x[first, first::7] = number
    assert_chosen(op_queues, x)


@settings(max_examples=examples(150))
@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 90)), elements=st.floats(width=32))
)  # fmt: skip
def test_whatever_the_numbers_are(x: FloatArray) -> None:
    for isa in compute_library().isas:
        with computing_with(isa):
            assert_chosen({2: op_queue_of()}, x)


def assert_drawn(
    op_queues: dict[int, OpQueue],
    x: FloatArray,
    temperatures: Sequence[float],
    *,
    begin: int = 0,
    seed: int = 2**64 - 1,
) -> None:
    """One row a temperature."""
    rows = [draw(heat, seed=seed - row, position=row * row) for row, heat in enumerate(temperatures)]
    expected = noisy_best(torch.from_numpy(x), rows, begin)
    for size, op_queue in op_queues.items():
        best = native_best(op_queue, torch.from_numpy(x), rows, begin)
        np.testing.assert_array_equal(best, expected, err_msg=str(size))


def draw(
    temperature: float, *, seed: int, position: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRow:
    return SamplingRow(temperature, top_k, top_p, min_p, seed, position)


def assert_left(op_queues: dict[int, OpQueue], x: FloatArray, rows: Sequence[SamplingRow]) -> None:
    """Draws with filters are those of all columns in their order, decided in float64."""
    logits = torch.from_numpy(x)
    expected = noisy_best(logits, rows, 0)[:, 1].tolist()
    for size, op_queue in op_queues.items():
        best = native_best(op_queue, logits, rows, 0)
        assert best[:, 1].tolist() == expected, size
        for row, (score, column) in zip(rows, best.tolist(), strict=True):
            alone = np.full_like(x[:1], -INF)
            alone[0, int(column)] = x[rows.index(row), int(column)]
            assert score == noisy_best(torch.from_numpy(alone), [row], 0)[0, 0]


def cycled(numbers: Sequence[float], count: int) -> list[float]:
    return [numbers[i % len(numbers)] for i in range(count)]


@pytest.mark.parametrize("begin", [0, 1, 7, 8, 63, 64, 100_003])
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 63, 64, 65, 200, 1001])
def test_draws_with_noise(isa: str, op_queues: dict[int, OpQueue], columns: int, begin: int) -> None:
    rng = np.random.default_rng(columns)
    for spread in (0.0, 0.1, 4.0, 30.0):
        x = rng.standard_normal((5, columns), dtype=np.float32) * np.float32(spread)
        assert_drawn(op_queues, x, [1.0, 0.0, 0.3, 2.0, 0.9], begin=begin)


@pytest.mark.parametrize("rows", [1, 2, 8, 33, 64])
def test_a_row_is_drawn_alike_in_any_batch(isa: str, op_queues: dict[int, OpQueue], rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, 517), dtype=np.float32)
    assert_drawn(op_queues, x, cycled([0.7, 1.0, 0.0, 1.5, 0.2], rows), begin=64)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e4, 1e30])
def test_temperatures_tiny_and_large(isa: str, op_queues: dict[int, OpQueue], temperature: float) -> None:
    """Of a tiny one noise is lost in the rounding of scores: equal logits tie, and the first wins."""
    rng = np.random.default_rng(5)
    levels = rng.integers(-2, 3, (4, 300)).astype(np.float32) * np.float32(1e6)
    for x in (levels, rng.standard_normal((4, 300), dtype=np.float32)):
        assert_drawn(op_queues, x, [temperature] * 4)


@pytest.mark.parametrize("columns", [1, 50, 131, 400])
@pytest.mark.parametrize(
    "numbers", [[-INF], [-INF, INF], [INF, NAN], [NAN], [-INF, NAN, 3.0], [3e38, -3e38], [-INF, 2.0]]
)
def test_draws_from_what_is_no_number(
    isa: str, op_queues: dict[int, OpQueue], numbers: Sequence[float], columns: int
) -> None:
    rng = np.random.default_rng(columns)
    assert_drawn(op_queues, rng.choice(np.array(numbers, dtype=np.float32), (4, columns)), [1.0, 0.1, 5.0, 0.0])
    sparse = rng.standard_normal((4, columns), dtype=np.float32)
    sparse[:, columns // 2] = numbers[0]
    assert_drawn(op_queues, sparse, [1.0, 0.1, 5.0, 0.0])


def test_logits_of_which_each_may_be_the_best(isa: str, op_queues: dict[int, OpQueue]) -> None:
    """They rise, so that no noise is skipped, and fall."""
    rising = np.linspace(-40, 40, 3000, dtype=np.float32)
    assert_drawn(op_queues, np.stack([rising, rising[::-1], rising * 0]), [0.1, 1.0, 3.0], begin=5)


def test_coarse_words_have_fractions(isa: str, op_queues: dict[int, OpQueue]) -> None:
    """One in 2^24 is coarse, and beats nearly all others: such a column is drawn, with a score of all its bits."""
    columns, found = 100_000, 0
    for position in range(2000):
        words = noise._draw_words(NoiseKey(9, position), 0, columns)
        if words.min() < COARSE:
            x, rows = np.zeros((1, columns), dtype=np.float32), [draw(1.0, seed=9, position=position)]
            expected = noisy_best(torch.from_numpy(x), rows, 0)
            assert words[int(expected[0, 1])] < COARSE
            for op_queue in op_queues.values():
                np.testing.assert_array_equal(native_best(op_queue, torch.from_numpy(x), rows, 0), expected)
            found += 1
            if found == 3:
                return
    pytest.fail("no word was coarse")


@settings(max_examples=examples(150))
@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 150)), elements=st.floats(width=32)),
    st.floats(1e-5, 1e5), st.integers(0, 200), st.integers(3, 2**64 - 1),
)  # fmt: skip
def test_draws_from_whatever_the_numbers_are(x: FloatArray, temperature: float, begin: int, seed: int) -> None:
    for isa in compute_library().isas:
        with computing_with(isa):
            assert_drawn({2: op_queue_of()}, x, [temperature] * len(x), begin=begin, seed=seed)


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 60}, {"top_p": 0.01}, {"top_p": 0.53}, {"top_p": 0.97}, {"min_p": 0.03},
    {"min_p": 1.0}, {"top_k": 20, "top_p": 0.83}, {"top_k": 300, "top_p": 0.61, "min_p": 0.001},
    {"top_p": 0.87, "min_p": 0.02}, {"top_k": 3000}, {"top_k": 100_000, "top_p": 0.999}, {},
]  # fmt: skip


@pytest.mark.parametrize("columns", [1, 5, 16, 100, 255, 256, 257, 1000, 5003, 40_000])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_draws_with_filters(isa: str, op_queues: dict[int, OpQueue], columns: int, spread: float) -> None:
    """Flat rows leave more columns than are listed."""
    x = np.random.default_rng(columns).standard_normal((len(FILTERS), columns), dtype=np.float32) * np.float32(spread)
    heats = cycled([0.3, 1.0, 1.7], len(FILTERS))
    rows = [
        draw(heat, seed=i, position=columns, **its) for i, (heat, its) in enumerate(zip(heats, FILTERS, strict=True))
    ]
    assert_left(op_queues, x, rows)


@pytest.mark.parametrize("columns", [9, 300, 9000])
@pytest.mark.parametrize("numbers", [[1.0], [-INF, 2.0], [0.0, -0.0], [-1.0, -1.0, -1.0, 7.0], [-3e38, 3e37]])
def test_equal_numbers_are_left_in_the_order_of_their_columns(
    isa: str, op_queues: dict[int, OpQueue], numbers: Sequence[float], columns: int
) -> None:
    rng = np.random.default_rng(columns)
    x = rng.choice(np.array(numbers, dtype=np.float32), (len(FILTERS), columns))
    x[:, 0] = numbers[-1]
    assert_left(op_queues, x, [draw(1.3, seed=i, position=4, **its) for i, its in enumerate(FILTERS)])


@pytest.mark.parametrize(("numbers", "score"), [([INF, 1.0], INF), ([NAN, INF], NAN), ([-INF], -INF)])
def test_nothing_is_drawn_from_what_is_no_number(
    isa: str, op_queues: dict[int, OpQueue], numbers: Sequence[float], score: float
) -> None:
    x = np.resize(np.array(numbers, dtype=np.float32), (2, 700))
    rows = [draw(1.0, seed=1, position=1, top_k=5), draw(1.0, seed=2, position=1, top_p=0.5)]
    for op_queue in op_queues.values():
        np.testing.assert_array_equal(native_best(op_queue, torch.from_numpy(x), rows, 0)[:, 0], [score] * 2)


@settings(max_examples=examples(150))
@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 600)), elements=st.floats(-20, 20, width=32)),
    st.floats(0.05, 5.0), st.integers(0, 700), st.sampled_from([1.0, 0.1234, 0.7654, 0.98765]),
    st.sampled_from([0.0, 0.0377]), st.integers(3, 2**64 - 1),
)  # fmt: skip
def test_filters_of_whatever_the_numbers_are(
    x: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    rows = [
        draw(temperature, seed=seed - row, position=row, top_k=top_k, top_p=top_p, min_p=min_p) for row in range(len(x))
    ]
    for isa in compute_library().isas:
        with computing_with(isa):
            assert_left({2: op_queue_of()}, x, rows)


def test_ids_that_float32_does_not_have_are_drawn_by_torch(op_queues: dict[int, OpQueue]) -> None:
    x = np.random.default_rng(1).standard_normal((3, 40), dtype=np.float32)
    for begin in (MAX_IDS - 40, MAX_IDS - 39, MAX_IDS + 1):
        assert_drawn(op_queues, x, [1.0, 0.0, 2.0], begin=begin)


def test_a_shard_tells_ids_of_the_whole_and_leaves_zeros_for_the_others(
    isa: str, op_queues: dict[int, OpQueue]
) -> None:
    x = np.array([[1, 3, 2], [9, 8, 7]], dtype=np.float32)
    for op_queue in op_queues.values():
        best = choose(op_queue, x, first=(1 << 24) - 4, shards=3, shard=1)
        assert best.tolist() == [[[0, 0]] * 2, [[3, (1 << 24) - 3], [9, (1 << 24) - 4]], [[0, 0]] * 2]


def inputs(lengths: Sequence[int], *, block_size: int, blocks: int, draws: Sequence[int]) -> DecoderInput:
    """Rows of sequences so long, with tables of ids by row and place."""
    rows = len(lengths)
    tables = np.arange(1, 1 + rows * blocks, dtype=np.int32).reshape(rows, blocks)
    decode = DecodeRows(np.array(lengths, dtype=np.int32), tables)
    positions = torch.tensor(lengths) - 1
    mapping = torch.full((rows,), -1)
    return DecoderInput(torch.full((rows,), -1), positions, AttentionBatch(mapping, decode, ()), torch.tensor(draws))


@pytest.mark.parametrize("size", TEAMS)
def test_inputs_become_those_of_the_next_step(isa: str, op_queues: dict[int, OpQueue], size: int) -> None:
    """A draw's token goes to the row that it is of, over the edges of blocks, and to the end of the tables."""
    step = inputs([12, 7, 4, 1], block_size=4, blocks=3, draws=[2, 0, 3, 1])
    draws = NativeSampling(op_queues[size], most_rows=4, block_size=4)
    logits = torch.zeros(4, 9)
    rows = torch.arange(4)
    for number in range(1, 4):
        logits.zero_()
        drawn = (rows + 2 * number) % 9
        logits[rows, drawn] = 1.0 + number
        draws.submit(step, logits, head_ranges=[UnitRange(0, 9)], exchange=LocalExchange())
        assert step.token_ids[torch.tensor([2, 0, 3, 1])].tolist() == drawn.tolist()
        lengths = [12 + number, 7 + number, 4 + number, 1 + number]
        assert step.attention.decode.lengths.tolist() == lengths
        assert step.positions.tolist() == [length - 1 for length in lengths]
        tables = step.attention.decode.block_tables
        expected = [
            int(tables[row, at // 4]) * 4 + at % 4 if at < 12 else at % 4
            for row, at in enumerate(length - 1 for length in lengths)
        ]
        assert step.attention.slot_mapping.tolist() == expected
        token_ids, scores = draws.of_steps(number, 4)
        assert token_ids[-1].tolist() == drawn.tolist()
        assert scores.tolist() == [[2.0 + i] * 4 for i in range(number)]
    draws.restart([], MAX_STEPS)
    with pytest.raises(RuntimeError, match="0 steps have drawn, not 1"):
        draws.of_steps(1, 4)
    with pytest.raises(ValueError, match=f"draws of {MAX_STEPS} steps are kept, not of {MAX_STEPS + 1}"):
        draws.restart([], MAX_STEPS + 1)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}])
def test_draws_with_noise_go_on_with_their_positions(
    isa: str, op_queues: dict[int, OpQueue], filters: dict[str, Any]
) -> None:
    """Each draw has its seed and temperature, and the position behind the row that it is of."""
    lengths, order, columns = [12, 7, 4], [2, 0, 1], 300
    samplings = [
        sampling_of(temperature=0.0, seed=1), sampling_of(temperature=0.8, seed=2**64 - 1),
        sampling_of(temperature=2.0, seed=0, **filters),
    ]  # fmt: skip
    sequences = [SequenceSampling(sampling, [0] * lengths[row]) for sampling, row in zip(samplings, order, strict=True)]
    step = inputs(lengths, block_size=4, blocks=9, draws=order)
    draws = NativeSampling(op_queues[2], most_rows=3, block_size=4)
    draws.restart([sequence.draw() for sequence in sequences], 4)
    for number in range(4):
        logits = torch.randn(3, columns, generator=torch.Generator().manual_seed(number))
        rows = [sequence.draw() for sequence in sequences]
        expected = native_best(op_queues[1], logits, rows, 0) if filters else noisy_best(logits, rows, 0)
        draws.submit(step, logits, head_ranges=[UnitRange(0, columns)], exchange=LocalExchange())
        told = draws.of_steps(number + 1, 3)
        assert told.token_ids[-1].tolist() == expected[:, 1].tolist()
        assert told.scores[-1].tolist() == expected[:, 0].tolist()
        for sequence, token in zip(sequences, told.token_ids[-1].tolist(), strict=True):
            sequence.append(token)


def test_as_many_steps_are_kept_as_there_may_be(op_queues: dict[int, OpQueue]) -> None:
    step = inputs([3, 2], block_size=8, blocks=9, draws=[0, 1])
    draws = NativeSampling(op_queues[2], most_rows=2, block_size=8)
    rng = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(MAX_STEPS):
        logits = torch.randn(2, 40, generator=rng)
        draws.submit(step, logits, head_ranges=[UnitRange(0, 40)], exchange=LocalExchange())
        drawn.append(logits.argmax(dim=1).tolist())
    assert draws.of_steps(MAX_STEPS, 2).token_ids.tolist() == drawn


@pytest.mark.parametrize(
    ("bests", "expected"),
    [
        ([(1.0, 4), (2.0, 8)], 8),
        ([(2.0, 4), (2.0, 8)], 4),
        ([(0.0, 4), (0.0, 8), (0.0, 9)], 4),
        ([(-INF, 4), (-3.0, 8)], 8),
        ([(INF, 4), (NAN, 8), (NAN, 9)], 8),
        ([(NAN, 4), (INF, 8), (1.0, 9)], 4),
    ],
)
def test_shards_are_decided_in_their_order(
    isa: str, op_queues: dict[int, OpQueue], bests: Sequence[tuple[float, int]], expected: int
) -> None:
    best = np.array(bests, dtype=np.float32).reshape(-1, 1, 2)
    numbers, tables, lengths = np.zeros(5, dtype=np.int64), np.zeros((1, 1), dtype=np.int32), np.zeros(1, np.int32)
    tokens, scores, steps = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.uint64)
    op = step_on_op(1, len(bests), best.ctypes.data, numbers[:1].ctypes.data)
    op.token_ids, op.positions, op.slot_mapping = (numbers[i : i + 1].ctypes.data for i in (1, 2, 3))
    op.lengths, op.tables, op.table_stride, op.block_size = lengths.ctypes.data, tables.ctypes.data, 1, 4
    op.steps, op.tokens, op.scores = steps.ctypes.data, tokens.ctypes.data, scores.ctypes.data
    op_queues[2].submit(op)
    assert (tokens[0], numbers[1], int(steps[0])) == (expected, expected, 1)
    assert scores.tobytes() == np.float32({token: score for score, token in bests}[expected]).tobytes()


def test_logits_of_another_kind_are_refused(op_queues: dict[int, OpQueue]) -> None:
    step = inputs([3, 2], block_size=8, blocks=2, draws=[0, 1])
    draws = NativeSampling(op_queues[1], most_rows=2, block_size=8)
    with pytest.raises(ValueError, match="a rank with 9 vocabulary rows has made none"):
        draws.submit(step, None, head_ranges=[UnitRange(0, 9)], exchange=LocalExchange())
    for logits in (torch.zeros(2, 9, dtype=torch.bfloat16), torch.zeros(9, 2).T, torch.zeros(2, 8)):
        with pytest.raises(ValueError, match="contiguous float32 logits"):
            draws.submit(step, logits, head_ranges=[UnitRange(0, 9)], exchange=LocalExchange())
