"""Tensors of tests that run wherever new tensors lie: on the host, or on a GPU (`kernels_on_gpu`)."""

from __future__ import annotations

import torch


def seeded(seed: int) -> torch.Generator:
    """A generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory of a cache."""
    return torch.zeros(shape, dtype=dtype)
