"""Instruction sets that the kernels are tested with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.native_compute import compute_library, computing_with

_BEST, *_OTHERS = compute_library().isas


@pytest.fixture(params=[_BEST, *(pytest.param(isa, marks=pytest.mark.extended) for isa in _OTHERS)])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this processor; `make test` tries the best one, `make test-all` all of them."""
    with computing_with(request.param):
        yield request.param
