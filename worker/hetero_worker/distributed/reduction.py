"""The one way in which partial results are added, shared by every exchange.

Terms are added in the order given (ascending rank), in fp32, and rounded once at the end to the output's
type. Whoever carries the bytes, the result is then the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

SUMMABLE: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


def sum_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """`out` becomes terms[0] + terms[1] + … (left to right, fp32). One term is copied as it is.

    All are of one shape and type. `out` may be one of the terms when there are at most two.
    """
    if len(terms) == 1:
        out.copy_(terms[0])
    elif out.dtype == torch.float32:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
    else:
        total = terms[0].float()
        for term in terms[1:]:
            total.add_(term)
        out.copy_(total)


def check_summable(tensor: torch.Tensor) -> None:
    """Raise TypeError unless sums of the tensor's type are defined here."""
    if tensor.dtype not in SUMMABLE:
        names = ", ".join(sorted(str(dtype) for dtype in SUMMABLE))
        raise TypeError(f"all_reduce adds {names}; it was given {tensor.dtype}")
