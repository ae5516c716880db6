"""Ways to compute x · Wᵀ + b on a host, and which of them this machine and torch build have.

A kernel packs a weight once, at load time, and then multiplies with it. Packing may copy: the caller lets the
unpacked weight go. Ops outside torch's public API are probed before they are offered; a build that lacks one
just has a candidate less.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol, runtime_checkable

import torch
from torch.nn import functional as F

from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.issuing import Issuer

logger = logging.getLogger(__name__)

_PACKING_ROWS: Final = 32
"""Rows that oneDNN and MKL are told to expect; packing for 32 also serves 1 and 512 well."""


class PackedWeight(Protocol):
    """A weight [out, in] in some kernel's layout."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor:
        """x [rows, in] → [rows, out], contiguous."""
        ...


class LinearKernel(Protocol):
    """One way to multiply."""

    @property
    def name(self) -> str: ...

    @property
    def copies_weight(self) -> bool:
        """Whether packing leaves the given weight free to go."""
        ...

    def pack(self, weight: torch.Tensor) -> PackedWeight: ...


@runtime_checkable
class TeamKernel(Protocol):
    """A LinearKernel with threads of its own, which torch's setting says nothing to."""

    def single_threaded(self) -> LinearKernel:
        """The same by the calling thread alone."""
        ...


class PlainKernel:
    """torch.nn.functional.linear."""

    name = "torch"
    copies_weight = False

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return lambda x, bias: F.linear(x, weight, bias)


class OnednnKernel:
    """oneDNN inner product on a weight reordered to the layout that oneDNN asks for."""

    name = "onednn-packed"
    copies_weight = True

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise.default

        def run(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = multiply(x, packed, bias, "none", [], "")
            return result

        return run


class MklKernel:
    """MKL's packed sgemm (x86, fp32)."""

    name = "mkl-packed"
    copies_weight = True

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKING_ROWS)
        # The op wants the plain weight too, only for its shape as long as the row count equals the hint.
        shape = weight.new_zeros(1, 1).expand(weight.shape)
        multiply = torch.ops.mkl._mkl_linear.default

        def run(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = multiply(x, packed, shape, bias, x.shape[0])
            return result

        return run


_CANDIDATES: Final[dict[torch.dtype, tuple[LinearKernel, ...]]] = {
    torch.float32: (PlainKernel(), OnednnKernel(), MklKernel()),
    torch.bfloat16: (PlainKernel(), OnednnKernel()),
}


def available_kernels(dtype: torch.dtype, issuer: Issuer | None = None) -> tuple[LinearKernel, ...]:
    """Kernels that work for the dtype here, in order of preference on a tie. The plain one always does.

    With an issuer the native one comes first: the others want weights as wide as the dtype, where it takes them as they
    are stored.
    """
    native = () if issuer is None else (NativeLinear(issuer, dtype),)
    return tuple(kernel for kernel in (*native, *_CANDIDATES[dtype]) if works(kernel, dtype))


def works(kernel: LinearKernel, dtype: torch.dtype) -> bool:
    """Whether the kernel runs on this build and multiplies rightly."""
    weight = torch.arange(15, dtype=torch.float32).view(3, 5).to(dtype)
    x = torch.ones(2, 5, dtype=dtype)
    try:
        with torch.inference_mode():
            result = kernel.pack(weight)(x, None)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("linear kernel %s is not available for %s: %s", kernel.name, dtype, error)
        return False
    return torch.allclose(result.float(), F.linear(x, weight).float(), rtol=1e-2)
