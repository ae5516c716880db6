"""Launches of Triton's kernels where there is no GPU: collected, and compiled for any.

Triton asks a hook before it compiles a kernel for arguments of a new kind. Ours notes what it was to compile, and
declines: then nothing is compiled, and nothing runs. Arguments need a shape, a type and strides only, so that torch's
meta tensors do, which take no memory. What is compiled has the same key in Triton's cache as on a GPU.

For processes that use no GPU: Triton's driver is replaced for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

_THREADS_PER_WARP = 32
_NUMBERS = count()


class _AbsentTarget:
    """Answers to what Triton asks its driver before it launches a kernel, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._number = next(_NUMBERS)

    def get_current_device(self) -> int:
        """Return a number of its own, by which Triton keeps kernels."""
        return self._number

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        """Return the default stream's handle."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what kernels are compiled for."""
        return GPUTarget("cuda", self._capability, _THREADS_PER_WARP)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, and all that its machine code depends on."""

    kernel: Any
    """Triton's function."""
    capability: int
    """Compute capability of the GPU, e.g. 90."""
    specialization: str
    """Arguments' types, alignments and constants, and options, as Triton writes them."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    def compile(self) -> Any:
        """Return Triton's compiled kernel, from its cache if it is there; raises what the compiler raises."""
        triton.runtime.driver.set_active(_AbsentTarget(self.capability))
        return self.kernel.preload(self.specialization)


@contextmanager
def collected(capability: int) -> Iterator[list[Launch]]:
    """Collect the launches of this context, in order, as they would be made on a GPU; none of them is made."""
    launches: list[Launch] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # names of Triton's
        launches.append(Launch(fn.jit_function, capability, compile["specialization_data"]))
        return True

    triton.runtime.driver.set_active(_AbsentTarget(capability))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        yield launches
