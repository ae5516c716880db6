"""Loads the compute library and tells ctypes what is in it. What its operations do, see compute/compute.h.

A library is used only if it is of this ABI and was built from the very sources beside it; otherwise `load_compute` says
what is wrong and how to mend it, and nothing is guessed. The structs mirror those of compute.h, field for field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from hetero_worker.native.build import COMPUTE_LIBRARY, compute_sources
from hetero_worker.native.loading import load_checked

ABI: Final = 3


class Kind(IntEnum):
    """hc_kind."""

    PACK = 0
    LINEAR = 1
    EMBED = 2
    NORM = 3
    GATED = 4
    ROTATE = 5
    ATTEND = 6
    ATTEND_SPAN = 7
    ADD = 8
    PICK = 9
    CHOOSE = 10
    STEP_ON = 11
    CALL = 12


class Format(IntEnum):
    """hc_format."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    I4 = 4


FORMATS: Final = {torch.float32: Format.F32, torch.bfloat16: Format.BF16, torch.float16: Format.F16}
"""Of tensors; activations are float32 or bfloat16."""


class NativeActivation(IntEnum):
    """hc_activation."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2


class Weight(ctypes.Structure):
    """hc_weight."""

    _fields_ = (
        ("format", c_uint64),
        ("out_features", c_uint64),
        ("in_features", c_uint64),
        ("group", c_uint64),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("minima", c_void_p),
    )


class Op(ctypes.Structure):
    """hc_op."""

    _fields_ = (("kind", c_uint64), ("rows", c_uint64))


class PackOp(ctypes.Structure):
    """hc_pack_op."""

    _fields_ = (
        ("op", Op),
        ("weight", c_void_p),
        ("values", c_void_p),
        ("stride", c_uint64),
        ("scales", c_void_p),
        ("minima", c_void_p),
    )


class LinearOp(ctypes.Structure):
    """hc_linear_op."""

    _fields_ = (
        ("op", Op),
        ("weight", c_void_p),
        ("type", c_uint64),
        ("y_type", c_uint64),
        ("x", c_void_p),
        ("x_stride", c_uint64),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_uint64),
        ("scratch", c_void_p),
    )


class EmbedOp(ctypes.Structure):
    """hc_embed_op."""

    _fields_ = (
        ("op", Op),
        ("table", c_void_p),
        ("type", c_uint64),
        ("ids", c_void_p),
        ("first", c_int64),
        ("scale", c_double),
        ("y", c_void_p),
    )


class NormOp(ctypes.Structure):
    """hc_norm_op."""

    _fields_ = (
        ("op", Op),
        ("type", c_uint64),
        ("weight_type", c_uint64),
        ("width", c_uint64),
        ("x", c_void_p),
        ("delta", c_void_p),
        ("weight", c_void_p),
        ("eps", c_double),
        ("y", c_void_p),
    )


class GatedOp(ctypes.Structure):
    """hc_gated_op."""

    _fields_ = (
        ("op", Op),
        ("type", c_uint64),
        ("activation", c_uint64),
        ("columns", c_uint64),
        ("gate_up", c_void_p),
        ("y", c_void_p),
    )


class RotateOp(ctypes.Structure):
    """hc_rotate_op."""

    _fields_ = (
        ("op", Op),
        ("type", c_uint64),
        ("norm_type", c_uint64),
        ("heads", c_uint64),
        ("kv_heads", c_uint64),
        ("head_dim", c_uint64),
        ("qkv", c_void_p),
        ("cos", c_void_p),
        ("signed_sin", c_void_p),
        ("positions", c_void_p),
        ("norm_weights", c_void_p),
        ("eps", c_double),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("slots", c_void_p),
    )


class Cache(ctypes.Structure):
    """hc_cache."""

    _fields_ = (
        ("type", c_uint64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_size", c_uint64),
        ("kv_heads", c_uint64),
        ("heads", c_uint64),
        ("head_dim", c_uint64),
        ("scale", c_double),
        ("window", c_uint64),
        ("soft_cap", c_double),
    )


class AttendOp(ctypes.Structure):
    """hc_attend_op."""

    _fields_ = (
        ("op", Op),
        ("cache", Cache),
        ("query", c_void_p),
        ("query_stride", c_uint64),
        ("lengths", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_uint64),
        ("out", c_void_p),
        ("scratch", c_void_p),
        ("longest", c_uint64),
    )


class AttendSpanOp(ctypes.Structure):
    """hc_attend_span_op."""

    _fields_ = (
        ("op", Op),
        ("cache", Cache),
        ("query", c_void_p),
        ("query_stride", c_uint64),
        ("num_computed", c_uint64),
        ("table", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
    )


class AddOp(ctypes.Structure):
    """hc_add_op."""

    _fields_ = (
        ("op", Op),
        ("type", c_uint64),
        ("width", c_uint64),
        ("x", c_void_p),
        ("deltas", c_void_p),
        ("num_deltas", c_uint64),
    )


class PickOp(ctypes.Structure):
    """hc_pick_op."""

    _fields_ = (("op", Op), ("row_bytes", c_uint64), ("x", c_void_p), ("index", c_void_p), ("y", c_void_p))


class ChooseOp(ctypes.Structure):
    """hc_choose_op."""

    _fields_ = (
        ("op", Op),
        ("columns", c_uint64),
        ("x", c_void_p),
        ("first", c_uint64),
        ("shards", c_uint64),
        ("shard", c_uint64),
        ("best", c_void_p),
        ("scratch", c_void_p),
    )


class StepOnOp(ctypes.Structure):
    """hc_step_on_op."""

    _fields_ = (
        ("op", Op),
        ("shards", c_uint64),
        ("best", c_void_p),
        ("inputs", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("lengths", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_uint64),
        ("block_size", c_uint64),
        ("steps", c_void_p),
        ("tokens", c_void_p),
        ("scores", c_void_p),
    )


class CallOp(ctypes.Structure):
    """hc_call_op."""

    _fields_ = (("op", Op), ("function", c_void_p), ("first", c_void_p), ("second", c_void_p), ("third", c_void_p))


_STRUCTS: Final[tuple[type[ctypes.Structure], ...]] = (
    PackOp, LinearOp, EmbedOp, NormOp, GatedOp, RotateOp, AttendOp, AttendSpanOp, AddOp, PickOp, ChooseOp, StepOnOp,
    CallOp, Weight,
)  # fmt: skip
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "hc_abi": (c_uint64, ()),
    "hc_source": (c_char_p, ()),
    "hc_size": (c_uint64, (c_uint64,)),
    "hc_isa": (c_char_p, (c_uint64,)),
    "hc_use": (c_int, (c_char_p,)),
    "hc_in_use": (c_char_p, ()),
    "hc_team_new": (c_void_p, (c_uint64, c_void_p, c_uint64)),
    "hc_team_free": (None, (c_void_p,)),
    "hc_team_size": (c_uint64, (c_void_p,)),
    "hc_packed_bytes": (c_uint64, (c_void_p, c_uint64)),
    "hc_scratch_bytes": (c_uint64, (c_void_p, c_uint64)),
    "hc_run": (c_uint64, (c_void_p, c_void_p, c_uint64, c_uint64, c_void_p)),
}


class ComputeLibrary:
    """The functions of compute.h as attributes; calls let go of Python's lock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be loaded, AttributeError when it lacks a function."""
        self.path = path
        loaded = ctypes.CDLL(str(path), use_errno=True)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        self.abi: Any = loaded.hc_abi
        self.source: Any = loaded.hc_source
        self.size: Any = loaded.hc_size
        self.isa: Any = loaded.hc_isa
        self.use: Any = loaded.hc_use
        self.in_use: Any = loaded.hc_in_use
        self.team_new: Any = loaded.hc_team_new
        self.team_free: Any = loaded.hc_team_free
        self.team_size: Any = loaded.hc_team_size
        self.packed_bytes: Any = loaded.hc_packed_bytes
        self.scratch_bytes: Any = loaded.hc_scratch_bytes
        self.run: Any = loaded.hc_run

    @property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets that this processor has kernels for, best first."""
        names: list[str] = []
        while (name := self.isa(len(names))) is not None:
            names.append(name.decode())
        return tuple(names)


@dataclass(frozen=True, slots=True)
class LoadedCompute:
    """The library, or why there is none."""

    library: ComputeLibrary | None
    reason: str = ""
    """What is wrong and how to mend it; empty if nothing is."""


@cache
def load_compute(path: Path = COMPUTE_LIBRARY) -> LoadedCompute:
    """Load the library, once a process. Never raises: a rank can do without, and is slower."""
    sources = compute_sources()
    return LoadedCompute(
        *load_checked(
            path, ComputeLibrary, subject="the native kernels were", abi=ABI, structs=_STRUCTS, sources=sources
        )
    )
