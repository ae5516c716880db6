"""Instruction sets and teams that the kernels are tested with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero_worker.native.op_queue import OpQueue
from tests.support.native_compute import TEAMS, compute_library, computing_with, op_queue_of

EMULATED = "amx_emulated"
"""Kernels for AVX2, and tiles in plain C: only products of matrices are others than those for AVX2."""
_BEST, *_OTHERS = [isa for isa in compute_library().isas if isa != EMULATED]


@pytest.fixture(params=[_BEST, *(pytest.param(isa, marks=pytest.mark.extended) for isa in _OTHERS)])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this processor; `make test` tries the best one, `make test-all` all of them."""
    with computing_with(request.param):
        yield request.param


@pytest.fixture(params=[_BEST, *(pytest.param(isa, marks=pytest.mark.extended) for isa in (*_OTHERS, EMULATED))])
def tile_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set for products of matrices, with the emulated one."""
    with computing_with(request.param):
        yield request.param


@pytest.fixture(scope="module")
def op_queues() -> dict[int, OpQueue]:
    """A queue for each size of team."""
    return {size: op_queue_of(size) for size in TEAMS}
