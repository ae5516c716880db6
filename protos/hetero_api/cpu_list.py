"""The kernel's list format for CPUs and NUMA nodes: "0-3,8,10-11"."""

from __future__ import annotations

from collections.abc import Iterable


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Ascending, without repeats; () for blank text. Raises ValueError, which quotes the bad part."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part.strip():
            numbers.update(_parse_range(part.strip()))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Return the shortest list: (0, 1, 2, 8) → "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _parse_range(part: str) -> range:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise ValueError(f"{part!r} is no number or range of numbers such as 3 or 0-7")
    return range(int(first), int(last or first) + 1)
