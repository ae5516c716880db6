"""Which shapes our attention kernels have. Here, and not beside the kernels, so that it can be asked without Triton."""

from __future__ import annotations

from typing import Final

_DIM_STEP: Final = 16
"""What tensor cores take of a product's inner dimension at a time."""
_MAX_DIM: Final = 256
_MAX_GROUP: Final = 128


def refusal(*, head_dim: int, group_size: int) -> str | None:
    """Why there is no kernel; None if there is one."""
    if head_dim % _DIM_STEP or not 0 < head_dim <= _MAX_DIM:
        return f"head_dim {head_dim} is no multiple of {_DIM_STEP} up to {_MAX_DIM}"
    if group_size > _MAX_GROUP:
        return f"{group_size} query heads share a KV head, more than {_MAX_GROUP}"
    return None
