"""Native draws take what numpy's argmax takes, whoever of a team looks where, and make a step's inputs the next's."""

from __future__ import annotations

from collections.abc import Sequence

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
from tests.support.examples import examples
from tests.support.native_compute import TEAMS, compute_library, computing_with, op_queue_of

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
    draws.restart(MAX_STEPS)
    with pytest.raises(RuntimeError, match="0 steps have drawn, not 1"):
        draws.of_steps(1, 4)
    with pytest.raises(ValueError, match=f"draws of {MAX_STEPS} steps are kept, not of {MAX_STEPS + 1}"):
        draws.restart(MAX_STEPS + 1)


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
