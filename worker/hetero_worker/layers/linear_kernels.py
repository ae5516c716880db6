"""Kernels that compute x · Wᵀ + b for a rank's linear layers, and the one that a host rank uses.

A kernel packs a weight once, at load time, and then multiplies with it. Packing may copy: the caller then drops the
unpacked weight. The CPU has one way: the native kernel wherever its library is built, torch otherwise. Nothing is
timed at start, so every rank of a group and every start of it computes the same way.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.issuing import Issuer


class PackedWeight(Protocol):
    """A weight [out, in] in some kernel's layout."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """Return x · Wᵀ + b: x [rows, in] → [rows, out], contiguous."""
        ...


class LinearKernel(Protocol):
    """One way to multiply."""

    @property
    def name(self) -> str:
        """Name that `Loaded.kernels` reports."""
        ...

    @property
    def copies_weight(self) -> bool:
        """True if packing copies, so that the caller can drop the given weight."""
        ...

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a weight [out, in]."""
        ...


class PlainKernel:
    """LinearKernel by torch.nn.functional.linear: the reference, and what a machine without a compiler gets."""

    name = "torch"
    copies_weight = False

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a product with the weight [out, in] as it is."""
        return lambda x, bias: F.linear(x, weight, bias)


class RowKernel:
    """LinearKernel by torch, one row at a time: slow, and a row's bits never depend on the rows beside it."""

    name = "torch-invariant (row by row)"
    copies_weight = False

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a product with the weight [out, in] as it is."""

        def multiply(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = x.new_empty(len(x), len(weight))
            for row, result in zip(x, out, strict=True):
                result.copy_(F.linear(row, weight, bias))
            return out

        return multiply


def host_kernel(dtype: torch.dtype, issuer: Issuer | None) -> LinearKernel:
    """Return the kernel of a rank on host cores for inputs of `dtype`. No issuer: the native library is missing."""
    return PlainKernel() if issuer is None else NativeLinear(issuer, dtype)
