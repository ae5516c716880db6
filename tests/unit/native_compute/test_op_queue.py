"""Issuing and recording: what is recorded does the same again, in memory that is its own and is used anew."""

from __future__ import annotations

import ctypes
import gc
from ctypes import c_int, c_void_p

import numpy as np
import psutil
import pytest
import torch

from hetero_worker.native.compute_library import attend_op, pick_op
from hetero_worker.native.op_queue import ALIGNMENT, Arena, CommonArena, OpQueue
from tests.support.native_compute import add_of, call_of, op_queue_of

pytestmark = pytest.mark.unit

Function = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)


def add(op_queue: OpQueue, x: torch.Tensor, delta: torch.Tensor) -> None:
    op_queue.submit(add_of(x, delta))


def copied(op_queue: OpQueue, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x, in the queue's memory."""
    y = op_queue.empty(*x.shape)
    op_queue.submit(pick_op(len(x), x.shape[1] * x.itemsize, x.data_ptr(), index.data_ptr(), y.data_ptr()), x, index)
    return y


def test_what_is_recorded_is_done_and_can_be_done_again() -> None:
    op_queue, source, index = op_queue_of(), torch.zeros(3, 5), torch.arange(3)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        source.fill_(1)
        y = copied(op_queue, source, index)
        add(op_queue, y, y)
        assert torch.equal(y, torch.full((3, 5), 2.0))
    assert len(recorded.ops) == 2
    for value in (3.0, 4.0):
        source.fill_(value)
        op_queue.replay(recorded)
        assert torch.equal(y, torch.full((3, 5), 2 * value))


def test_memory_is_given_out_again_when_the_last_look_at_it_is_gone() -> None:
    arena = Arena()
    first = arena.empty((4, 4), torch.float32)
    address, part = first.data_ptr(), first[1:]
    assert address % ALIGNMENT == 0
    del first
    assert arena.empty((4, 4), torch.float32).data_ptr() != address
    del part
    assert arena.empty((16,), torch.float32).data_ptr() == address
    assert arena.num_bytes == 2 * 64


def test_a_recording_keeps_its_memory() -> None:
    op_queue, source, index = op_queue_of(), torch.ones(2, 600), torch.arange(2)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        y = copied(op_queue, source, index)
        address = y.data_ptr()
    del y
    gc.collect()
    crowd = [torch.zeros(2, 600) for _ in range(50)]
    op_queue.replay(recorded)
    assert all(not each.any() for each in crowd)
    assert list((ctypes.c_float * 1200).from_address(address)) == [1.0] * 1200


def test_pieces_of_one_arena_share_memory() -> None:
    op_queue, source, index = op_queue_of(), torch.ones(2, 8), torch.arange(2)
    arena = Arena()
    with op_queue.computing_in(arena):
        with op_queue.recording():
            copied(op_queue, source, index)
        with op_queue.recording() as second:
            y = copied(op_queue, source, index)
    assert arena.num_bytes == 64
    source.fill_(5)
    op_queue.replay(second)
    assert torch.equal(y, torch.full((2, 8), 5.0))


def test_calls_are_finished_by_python_where_they_do_not_give_0() -> None:
    op_queue, x = op_queue_of(), torch.ones(2, 2)
    finished: list[int] = []
    answers = [0]
    function = Function(lambda _first, _second, _third: answers[0])
    op = call_of(function)
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        add(op_queue, x, x)
        op_queue.call(op, finished.append, function)
        add(op_queue, x, x)
    assert (float(x[0, 0]), finished) == (4.0, [])
    answers[0] = 1
    op_queue.replay(recorded)
    assert (float(x[0, 0]), finished) == (16.0, [1])
    op_queue.call(op, finished.append)
    assert finished == [1, 1]


def test_recordings_that_follow_one_another_are_one() -> None:
    """Calls of both are finished as they would be by themselves."""
    op_queue, x = op_queue_of(), torch.ones(2, 3)
    finished: dict[str, list[int]] = {"first": [], "second": []}
    function = Function(lambda _first, _second, _third: 5)
    recordings = []
    for seen in finished.values():
        with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
            add(op_queue, x, x)
            op_queue.call(call_of(function), seen.append, function)
        recordings.append(recorded)
    first, second = recordings
    x.fill_(1)
    whole = first.followed_by(second)
    assert len(whole.table) == 4
    op_queue.replay(whole)
    assert x.tolist() == [[4.0] * 3] * 2
    assert finished == {"first": [5, 5], "second": [5, 5]}
    op_queue.replay(first)
    assert float(x[0, 0]) == 8.0
    assert finished == {"first": [5, 5, 5], "second": [5, 5]}


def test_what_a_finish_raises_ends_the_replay_there() -> None:
    op_queue, x = op_queue_of(), torch.ones(2, 2)
    answers = [0]
    function = Function(lambda _first, _second, _third: answers[0])
    op = call_of(function)

    def refuse(status: int) -> None:
        raise RuntimeError(f"ended with {status}")

    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        op_queue.call(op, refuse, function)
        add(op_queue, x, x)
    answers[0] = 2
    with pytest.raises(RuntimeError, match="ended with 2"):
        op_queue.replay(recorded)
    assert x[0, 0] == 2


def test_recordings_do_not_nest_and_need_an_arena() -> None:
    op_queue = op_queue_of()
    with pytest.raises(RuntimeError, match="arena"), op_queue.recording():
        pass
    with (
        op_queue.computing_in(Arena()),
        op_queue.recording(),
        pytest.raises(RuntimeError, match="one piece at a time"),
        op_queue.recording(),
    ):
        pass


def test_scratch_is_aligned_and_lasts_as_long_as_a_recording() -> None:
    op_queue = op_queue_of()
    cache = {"block_size": 16, "kv_heads": 2, "heads": 4, "head_dim": 64, "scale": 1.0}
    small, large = attend_op(1, cache), attend_op(64, cache)
    small.longest, large.longest = 16, 1_000_000
    with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
        first = op_queue.scratch(small)
        second = op_queue.scratch(large)
    assert first % ALIGNMENT == second % ALIGNMENT == 0
    assert first != second
    kept = [each for each in recorded.kept if isinstance(each, np.ndarray)]
    assert all(
        each.ctypes.data <= address < each.ctypes.data + len(each)
        for each, address in zip(kept, (first, second), strict=True)
    )


def test_scratch_of_more_and_more_rows_takes_no_memory_until_it_is_written_and_at_most_four_times_the_largest() -> None:
    op_queue = op_queue_of(16)
    cache = {"block_size": 16, "kv_heads": 8, "heads": 32, "head_dim": 128, "scale": 1.0}
    before, needed, recordings = psutil.Process().memory_info().rss, 0, []
    for rows in range(1, 65):
        op = attend_op(rows, cache)
        op.longest = 8192
        with op_queue.computing_in(Arena()), op_queue.recording() as recorded:
            op_queue.scratch(op)
        needed = max(needed, op_queue.team.scratch_bytes(op))
        recordings.append(recorded)
    kept = {id(each): len(each) for recorded in recordings for each in recorded.kept if isinstance(each, np.ndarray)}
    assert needed > 2**24
    assert sum(kept.values()) < 4 * needed
    assert psutil.Process().memory_info().rss - before < needed


def test_a_common_arena_gives_each_recording_the_same_memory() -> None:
    arena = CommonArena(3 * ALIGNMENT)
    for _ in range(2):
        arena.restart()
        small, large = arena.empty((2, 1), torch.float32), arena.empty((4, 8), torch.float32)
        assert small.data_ptr() % ALIGNMENT == 0
        assert large.data_ptr() == small.data_ptr() + ALIGNMENT
        with pytest.raises(MemoryError, match="a tensor of 4 bytes does not fit in the 0 that are left"):
            arena.empty((1,), torch.float32)
