"""Kubernetes quantities of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.errors import QuantityError
from hetero_api.quantity import format_bytes, parse_bytes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), (17, 17), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 * 2**29), ("128Gi", 2**37), ("2T", 2 * 10**12)],
)
def test_quantities_are_whole_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1GiB", "1 Gi", "0.3", "1e3", "five", True])
def test_what_is_no_quantity_is_refused(text: str | int) -> None:
    with pytest.raises(QuantityError):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_formatting_is_exact(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count
