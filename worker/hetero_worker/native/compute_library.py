"""Loads the compute library: the kernels of host ranks, in C.

`compute/compute.h` is the only declaration of its functions, operations and enumerators, and says what each does; cffi
reads it. Pointers are integers here, since tensors and arrays give addresses. An operation is made by a function that
takes the number of rows and then the struct's fields in the header's order; fields that are left out are 0.

The library is used only if it was built from the sources beside it. Otherwise `load_compute` says what is wrong and how
to fix it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from hetero_api.model_parts import Activation
from hetero_worker.native.build import COMPUTE_HEADER, COMPUTE_LIBRARY, compute_sources
from hetero_worker.native.loading import Loaded, declare, open_checked

_ADDRESSED: Final = (
    "void", "float", "double", "int32_t", "uint32_t", "int64_t", "uint64_t", "hc_op", "hc_weight", "hc_expert",
    "hc_factors", "hc_linear_op",
)  # fmt: skip
ffi: Final = declare(COMPUTE_HEADER, addressed=_ADDRESSED)
_KINDS: Final[Mapping[str, int]] = ffi.typeof("enum hc_kind").relements
_FORMATS: Final[Mapping[str, int]] = ffi.typeof("enum hc_format").relements
_SCORES: Final[Mapping[str, int]] = ffi.typeof("enum hc_score").relements
_ACTIVATIONS: Final[Mapping[str, int]] = ffi.typeof("enum hc_activation").relements
F32: Final = _FORMATS["HC_F32"]
BF16: Final = _FORMATS["HC_BF16"]
F16: Final = _FORMATS["HC_F16"]
I8: Final = _FORMATS["HC_I8"]
I4: Final = _FORMATS["HC_I4"]
F8: Final = _FORMATS["HC_F8"]
F4: Final = _FORMATS["HC_F4"]
FORMATS: Final = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
"""Formats of tensors. Activations are float32 or bfloat16."""
SILU: Final = _ACTIVATIONS["HC_SILU"]
GELU_TANH: Final = _ACTIVATIONS["HC_GELU_TANH"]
GELU: Final = _ACTIVATIONS["HC_GELU"]
CLAMPED_SWIGLU: Final = _ACTIVATIONS["HC_CLAMPED_SWIGLU"]
ACTIVATIONS: Final[Mapping[Activation, int]] = {
    "silu": SILU, "gelu_tanh": GELU_TANH, "clamped_swiglu": CLAMPED_SWIGLU,
}  # fmt: skip
"""Activations of a model's MLPs."""
SOFTMAX: Final = _SCORES["HC_SOFTMAX"]
SIGMOID: Final = _SCORES["HC_SIGMOID"]


def _op_maker(name: str) -> Callable[..., Any]:
    """Return a function (rows, *fields) that makes an hc_<name>_op, which the caller keeps alive."""
    pointer, kind = ffi.typeof(f"hc_{name}_op *"), _KINDS[f"HC_{name.upper()}"]

    def make(rows: int, *fields: object) -> Any:
        return ffi.new(pointer, ((kind, rows), *fields))

    return make


pack_op: Final = _op_maker("pack")
linear_op: Final = _op_maker("linear")
embed_op: Final = _op_maker("embed")
norm_op: Final = _op_maker("norm")
gated_op: Final = _op_maker("gated")
squares_op: Final = _op_maker("squares")
latent_op: Final = _op_maker("latent")
heads_op: Final = _op_maker("heads")
delta_op: Final = _op_maker("delta")
open_op: Final = _op_maker("open")
products_op: Final = _op_maker("products")
rotate_op: Final = _op_maker("rotate")
attend_op: Final = _op_maker("attend")
attend_span_op: Final = _op_maker("attend_span")
add_op: Final = _op_maker("add")
pick_op: Final = _op_maker("pick")
choose_op: Final = _op_maker("choose")
step_on_op: Final = _op_maker("step_on")
route_op: Final = _op_maker("route")
experts_op: Final = _op_maker("experts")
low_rank_op: Final = _op_maker("low_rank")
_new_call: Final = _op_maker("call")
_FUNCTION: Final = ffi.typeof("int (*)(uintptr_t, uintptr_t, uintptr_t)")


def call_op(function: int, *arguments: int) -> Any:
    """Make a CALL of the C function at an address, with up to three words as arguments."""
    return _new_call(1, ffi.cast(_FUNCTION, function), *arguments)


class ComputeLibrary:
    """A loaded library. Calls of its functions release Python's lock."""

    def __init__(self, functions: Any) -> None:
        """`functions`: those of compute.h, as attributes."""
        self.functions = functions

    @property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets that this processor has kernels for, best first."""
        names: list[str] = []
        while name := self.functions.hc_isa(len(names)):
            names.append(ffi.string(name).decode())
        return tuple(names)

    @property
    def isa(self) -> str:
        """The instruction set whose kernels all teams use."""
        return str(ffi.string(self.functions.hc_in_use()).decode())

    def use(self, isa: str) -> None:
        """Use another instruction set's kernels in all teams, none of which may be at work. Raises ValueError."""
        if self.functions.hc_use(isa.encode()):
            raise ValueError(f"isa {isa!r}: this processor has kernels for {', '.join(self.isas)}")

    @property
    def source(self) -> str:
        """Digest of the sources that the library was built from."""
        return str(ffi.string(self.functions.hc_source()).decode())


@cache
def load_compute(path: Path = COMPUTE_LIBRARY) -> Loaded:
    """Load the library as a ComputeLibrary, once a process. Never raises: a rank can compute without it, slower."""
    sources = compute_sources()
    loaded = open_checked(ffi, path, subject="the native kernels were", source="hc_source", sources=sources)
    return loaded if loaded.library is None else Loaded(ComputeLibrary(loaded.library))
