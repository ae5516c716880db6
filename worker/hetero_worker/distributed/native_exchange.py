"""Loads the native exchange: rounds and links through shared memory and over TCP, in C.

`native_exchange.h` is the only declaration of its functions, structs and limits; cffi reads it. `native_exchange.c` and
`native_tcp.c` explain how it works. `native/build.py` compiles it with any C11 compiler, for every version of Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hetero_worker.native.build import EXCHANGE_HEADER, EXCHANGE_LIBRARY, exchange_sources
from hetero_worker.native.loading import Loaded, declare, open_checked

ffi: Final = declare(EXCHANGE_HEADER)
_LIMITS: Final[dict[str, int]] = ffi.typeof("enum hx_limits").relements
MAX_SEATS: Final = _LIMITS["HX_MAX_SEATS"]
"""Largest number of ranks in a group or subgroup."""
LINE_BYTES: Final = _LIMITS["HX_LINE_BYTES"]
LINK_DEPTH: Final = _LIMITS["HX_LINK_DEPTH"]
"""Messages that a link holds: its source may be this far ahead of a receiver."""
MAX_LANES: Final = _LIMITS["HX_MAX_LANES"]
"""Most connections over TCP of a pair of ranks in a group."""
WAITING: Final[int] = ffi.typeof("enum hx_result").relements["HX_WAITING"]
_ENDS: Final[dict[str, int]] = ffi.typeof("enum hx_end").relements
ABORTED: Final = _ENDS["HX_ABORTED"]
"""End word of an exchange that was aborted."""
FIRST_LOST: Final = _ENDS["HX_FIRST_LOST"]
"""The end word is this plus a rank's number when that rank was lost."""


def load(path: Path = EXCHANGE_LIBRARY) -> Loaded:
    """Load the library. Never raises: ranks can exchange without it. Takes some milliseconds the first time."""
    sources = exchange_sources()
    return open_checked(ffi, path, subject="the native exchange was", source="hx_source", sources=sources)
