"""Kubernetes quantities of memory ("128Gi", "512M", "1073741824") as whole bytes.

Source: the Kubernetes API's `resource.Quantity` grammar, restricted to what makes a whole number of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from hetero_api.errors import QuantityError

_SUFFIXES: Final = {
    "": 1,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
PATTERN: Final = r"^([0-9]+(?:\.[0-9]+)?)(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
BINARY_UNITS: Final = ("Pi", "Ti", "Gi", "Mi", "Ki")
_REGEX: Final = re.compile(PATTERN)


def parse_bytes(text: str | int) -> int:
    """Bytes that a quantity names. Raises QuantityError when it names none, or a fraction of a byte."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise QuantityError(f"must be a quantity such as 16Gi, not {text!r}")
    match = _REGEX.match(str(text).strip())
    if match is None:
        raise QuantityError(f"must be a quantity such as 16Gi, not {text!r}")
    number = Decimal(match[1]) * _SUFFIXES[match[2] or ""]
    if number != int(number):
        raise QuantityError(f"{text!r} is not a whole number of bytes")
    return int(number)


def format_bytes(count: int, *, units: Sequence[str] = BINARY_UNITS) -> str:
    """Return the shortest exact quantity in one of the units, tried in order: 1536Mi, 2Gi, 17."""
    for suffix in units:
        if count and count % _SUFFIXES[suffix] == 0:
            return f"{count // _SUFFIXES[suffix]}{suffix}"
    return str(count)
