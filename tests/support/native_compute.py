"""The compute library for tests, and op_queues of teams."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_worker.native.compute_library import AddOp, ComputeLibrary, Format, Kind, Op, load_compute
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam


def compute_library() -> ComputeLibrary:
    """As it was built for the tests, which need it."""
    loaded = load_compute()
    assert loaded.library is not None, loaded.reason
    return loaded.library


def op_queue_of(size: int = 2) -> OpQueue:
    """With a team of so many threads."""
    return OpQueue(NativeTeam(compute_library(), size))


def add_op(x: torch.Tensor, delta: torch.Tensor) -> AddOp:
    """x += delta, both float32 [rows, width]; whoever runs it keeps these."""
    terms = (ctypes.c_void_p * 1)(delta.data_ptr())
    op = AddOp(Op(Kind.ADD, len(x)), Format.F32, x.shape[1], x.data_ptr(), ctypes.cast(terms, ctypes.c_void_p))
    op.num_deltas = 1
    return op


@contextmanager
def computing_with(isa: str) -> Iterator[None]:
    """Have all teams compute with this instruction set's kernels."""
    library = compute_library()
    before = library.in_use()
    assert library.use(isa.encode()) == 0, f"this processor has no {isa}"
    try:
        yield
    finally:
        library.use(before)
