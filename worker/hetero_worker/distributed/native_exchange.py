"""Loads the native exchange: rounds and links through shared memory, in C.

`native_exchange.h` is the only declaration of its functions, structs and limits; cffi reads it. `native_exchange.c`
explains how it works. `native/build.py` compiles it with any C11 compiler, for every version of Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hetero_worker.native.build import EXCHANGE_HEADER, EXCHANGE_LIBRARY, EXCHANGE_SOURCE
from hetero_worker.native.loading import Loaded, declare, open_checked

ffi: Final = declare(EXCHANGE_HEADER)
_LIMITS: Final[dict[str, int]] = ffi.typeof("enum hx_limits").relements
MAX_SEATS: Final = _LIMITS["HX_MAX_SEATS"]
"""Largest number of ranks in a group or subgroup."""
LINE_BYTES: Final = _LIMITS["HX_LINE_BYTES"]
LINK_DEPTH: Final = _LIMITS["HX_LINK_DEPTH"]
"""Messages that a link holds: its source may be this far ahead of a receiver."""
WAITING: Final[int] = ffi.typeof("enum hx_result").relements["HX_WAITING"]


def load(path: Path = EXCHANGE_LIBRARY) -> Loaded:
    """Load the library. Never raises: ranks can exchange without it. Takes some milliseconds the first time."""
    sources = (EXCHANGE_HEADER, EXCHANGE_SOURCE)
    return open_checked(ffi, path, subject="the native exchange was", source="hx_source", sources=sources)
