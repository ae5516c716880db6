"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.sampling_paths import PATHS, path, sampled_by


@pytest.fixture(scope="module", params=PATHS)
def both_paths(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draws on the host, natively too, on a device, and in a group of both kinds of ranks."""
    with sampled_by(path(request.param), request.module):
        yield
