"""The kernel's list format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.cpu_list import format_cpu_list, parse_cpu_list

pytestmark = pytest.mark.unit


@given(st.sets(st.integers(0, 300)))
def test_cpu_list_survives_formatting_and_parsing(numbers: set[int]) -> None:
    assert set(parse_cpu_list(format_cpu_list(numbers))) == numbers


@pytest.mark.parametrize(
    ("text", "numbers"), [("", ()), ("\n", ()), ("3", (3,)), ("0-2,8\n", (0, 1, 2, 8)), ("5,1-2,2", (1, 2, 5))]
)
def test_cpu_list_is_read_as_the_kernel_writes_it(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-3", "3-1", "1;2", "0x1"])
def test_cpu_list_refuses_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="no number or range"):
        parse_cpu_list(text)
