"""The compute library for tests, and op_queues of teams."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from hetero_worker.native.compute_library import F32, ComputeLibrary, add_op, call_op, ffi, load_compute
from hetero_worker.native.loading import address_of
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam

ENV_SANITIZED: Final = "HETERO_TEST_SANITIZED_COMPUTE"
"""Path of a compute library built with sanitizers, in a process that has their runtime loaded."""
TEAMS: Final = (1, 2, 3)
"""Sizes of teams that share work in different ways."""
_KEPT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What operations point at."""


class ExactScratch(OpQueue):
    """Queue whose operations get just the scratch that they ask for, where a sanitizer watches what lies beside it."""

    def scratch(self, op: Any) -> int:
        needed = self.team.scratch_bytes(op)
        self._last = torch.empty(needed, dtype=torch.uint8)
        return self._last.data_ptr() if needed else 0


def compute_library() -> ComputeLibrary:
    """As it was built for the tests, which need it; or the one that ENV_SANITIZED names."""
    if sanitized := os.environ.get(ENV_SANITIZED):
        return _sanitized_library(sanitized)
    loaded = load_compute()
    library: ComputeLibrary | None = loaded.library
    assert library is not None, loaded.reason
    return library


@cache
def _sanitized_library(path: str) -> ComputeLibrary:
    return ComputeLibrary(ffi.dlopen(path))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same for a seed in any type but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def op_queue_of(size: int = 2) -> OpQueue:
    """With a team of so many threads."""
    queue = ExactScratch if os.environ.get(ENV_SANITIZED) else OpQueue
    return queue(NativeTeam(compute_library(), size))


def add_of(x: torch.Tensor, delta: torch.Tensor) -> Any:
    """x += delta, both float32 [rows, width]; whoever runs it keeps these."""
    terms = ffi.new("uintptr_t[]", [delta.data_ptr()])
    op = add_op(len(x), F32, x.shape[1], x.data_ptr(), address_of(terms), 1, 1.0)
    _KEPT[op] = terms
    return op


def call_of(function: Any, *arguments: int) -> Any:
    """Make a CALL of a ctypes function, which the caller keeps, with up to three arguments."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return call_op(address, *arguments)


@contextmanager
def computing_with(isa: str) -> Iterator[None]:
    """Have all teams compute with this instruction set's kernels."""
    library = compute_library()
    before = library.isa
    library.use(isa)
    try:
        yield
    finally:
        library.use(before)
