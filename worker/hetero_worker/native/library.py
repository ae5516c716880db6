"""Loads the native library and tells ctypes what is in it.

A library is used only if it is of this ABI and was built from the very sources beside it; otherwise `load` says what
is wrong and how to mend it, and nothing is guessed. The structs mirror those of exchange.h, field for field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_worker.native.build import HEADER, LIBRARY, SOURCE
from hetero_worker.native.loading import load_checked

ABI: Final = 1
MAX_SEATS: Final = 64
"""Ranks of a group or subgroup, at most."""
LINE_BYTES: Final = 128
LINK_DEPTH: Final = 8
"""Messages that a link holds: so far may its source be ahead of a receiver."""
DONE, WAITING, ENDED = 0, 1, 2
_Seats = c_uint64 * MAX_SEATS


class RankState(ctypes.Structure):
    """hx_rank."""

    _fields_ = (
        ("memory", c_void_p),
        ("rank", c_uint64),
        ("world_size", c_uint64),
        ("area_bytes", c_uint64),
        ("spin_ns", c_uint64),
        ("yield_ns", c_uint64),
        ("nap_ns", c_uint64),
        ("closed", c_uint64),
        ("published_bytes", c_uint64),
        ("rounds", c_uint64),
        ("messages", c_uint64),
    )


class GroupState(ctypes.Structure):
    """hx_group."""

    _fields_ = (
        ("rank", c_void_p),
        ("size", c_uint64),
        ("own", c_uint64),
        ("ranks", _Seats),
        ("counters", _Seats),
        ("areas", c_uint64 * 2 * MAX_SEATS),
        ("round", c_uint64),
        ("settled", c_uint64),
        ("offset", c_uint64),
        ("published", c_uint64),
        ("late", c_uint64),
    )


class Route(ctypes.Structure):
    """hx_route."""

    _fields_ = (("bytes", c_uint64), ("dtype", c_uint64), ("contributors", c_uint64))


class Gathering(ctypes.Structure):
    """hx_gathering."""

    _fields_ = (("bytes", _Seats), ("longest", c_uint64))


class LinkState(ctypes.Structure):
    """hx_link."""

    _fields_ = (
        ("rank", c_void_p),
        ("source", c_uint64),
        ("size", c_uint64),
        ("own", c_uint64),
        ("receivers", _Seats),
        ("sent", c_uint64),
        ("taken", _Seats),
        ("areas", c_uint64 * LINK_DEPTH),
        ("number", c_uint64),
        ("offset", c_uint64),
        ("late", c_uint64),
    )


_STRUCTS: Final = (RankState, GroupState, Route, Gathering, LinkState)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "hx_abi": (c_uint64, ()),
    "hx_source": (c_char_p, ()),
    "hx_size": (c_uint64, (c_uint64,)),
    "hx_share": (c_int, (c_void_p, c_void_p, c_void_p)),
    "hx_gather": (c_int, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "hx_send": (c_int, (c_void_p, c_void_p, c_uint64)),
    "hx_receive": (c_int, (c_void_p, c_void_p, c_uint64)),
    "hx_free": (c_int, (c_void_p, c_uint64)),
    "hx_arrived": (c_int, (c_void_p, c_uint64)),
    "hx_pass": (c_int, (c_void_p, c_uint64)),
    "hx_end": (None, (c_void_p, c_uint64)),
    "hx_sum": (None, (c_uint64, c_void_p, c_void_p, c_uint64, c_uint64)),
}


class NativeLibrary:
    """The functions of exchange.h as attributes; calls let go of Python's lock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when it cannot be loaded, AttributeError when it lacks a function."""
        self.path = path
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        self.abi: Any = loaded.hx_abi
        self.source: Any = loaded.hx_source
        self.size: Any = loaded.hx_size
        self.share: Any = loaded.hx_share
        self.gather: Any = loaded.hx_gather
        self.send: Any = loaded.hx_send
        self.receive: Any = loaded.hx_receive
        self.free: Any = loaded.hx_free
        self.arrived: Any = loaded.hx_arrived
        self.pass_on: Any = loaded.hx_pass
        self.end: Any = loaded.hx_end
        self.sum: Any = loaded.hx_sum


@dataclass(frozen=True, slots=True)
class Loaded:
    """The library, or why there is none."""

    library: NativeLibrary | None
    reason: str = ""
    """What is wrong and how to mend it; empty if nothing is."""


def load(path: Path = LIBRARY) -> Loaded:
    """Load the library. Never raises: a rank can do without. Some milliseconds the first time."""
    return Loaded(
        *load_checked(
            path, NativeLibrary, subject="the native exchange was", abi=ABI, structs=_STRUCTS, sources=(HEADER, SOURCE)
        )
    )
