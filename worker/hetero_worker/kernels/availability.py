"""Reasons why the Triton kernels cannot be used, to be asked for before a kernel is chosen. Needs no Triton itself."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch

_DIM_STEP: Final = 16
"""Width of a tensor core's tile in a product's inner dimension."""
_MAX_DIM: Final = 512
_MAX_GROUP: Final = 128


def triton_problem(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on the GPU; None if they can.

    This compiles and runs one, which may take some seconds the first time.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    from hetero_worker.kernels.trial import run_one

    try:
        run_one(device)
    except Exception as error:  # noqa: BLE001 - host compiler, assembler and driver each have errors of their own
        return f"triton does not work here: {type(error).__name__}: {error}"
    return None


def attention_problem(*, head_dim: int, group_size: int, value_dim: int | None = None) -> str | None:
    """Return why the attention kernels do not support such heads; None if they do.

    `value_dim`, of latent attention: values are the first elements of keys.
    """
    if value_dim is not None:
        rest = head_dim - value_dim
        if value_dim % _DIM_STEP or rest % _DIM_STEP or not 0 < value_dim <= _MAX_DIM or not 0 < rest <= _MAX_DIM:
            return f"latent keys of {value_dim} and {rest} elements are no multiples of {_DIM_STEP} up to {_MAX_DIM}"
        return None
    if head_dim % _DIM_STEP or not 0 < head_dim <= _MAX_DIM:
        return f"head_dim {head_dim} is no multiple of {_DIM_STEP} up to {_MAX_DIM}"
    if group_size > _MAX_GROUP:
        return f"{group_size} query heads share a KV head, more than {_MAX_GROUP}"
    return None
