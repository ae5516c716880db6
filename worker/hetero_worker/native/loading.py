"""Declares what a native library offers, and loads it only if it was built from the sources beside it."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cffi

from hetero_worker.native.build import source_digest

_FIX: Final = "install a C compiler and run `make native` (in an image: python -m hetero_worker.native.build)"
_WORDS: Final = cffi.FFI()
_DROPPED: Final = re.compile(r"^\s*#.*$|\b_Atomic |\bHC_API ", re.MULTILINE)


def declare(header: Path, *, addressed: Sequence[str] = ("void",)) -> Any:
    """Return a cffi.FFI with the declarations of a C header. Takes some milliseconds.

    Preprocessor lines and macros of visibility are dropped, so limits must be enumerators. Pointers to `addressed`
    types become integers: tensors give addresses, and a call that converts none is 0.15 µs faster. Raises
    cffi.CDefError.
    """
    text = _DROPPED.sub("", header.read_text(encoding="utf-8"))
    ffi = cffi.FFI()
    ffi.cdef(re.sub(rf"\b(?:const )?(?:{'|'.join(addressed)}) \*(?:const \*)?", "uintptr_t ", text))
    return ffi


@dataclass(frozen=True, slots=True)
class Loaded:
    """A library, or the reason why there is none."""

    library: Any
    """Functions of its header as attributes; None without a library. Calls release Python's lock."""
    reason: str = ""
    """Problem and its fix; empty if there is none."""


def address_of(pointer: Any) -> int:
    """Return the address that a cffi pointer, array or function holds."""
    return int(_WORDS.cast("uintptr_t", pointer))


def open_checked(ffi: Any, path: Path, *, subject: str, source: str, sources: Sequence[Path]) -> Loaded:
    """Return the library's functions, or what is wrong with it and how to fix that. Never raises.

    Args:
        ffi: The declarations of the library's header.
        path: The library.
        subject: Begin of the sentence that says what is wrong, as "the native exchange was".
        source: Function that returns the digest of the sources that the library was built from.
        sources: Files that the library must have been built from.
    """
    if problem := _unusable(path, subject):
        return Loaded(None, problem)
    try:
        library = ffi.dlopen(str(path))
        built_from = ffi.string(getattr(library, source)()).decode()
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path} cannot be loaded ({error}): {_FIX}")
    if built_from != (expected := source_digest(sources)):
        return Loaded(None, f"{path} is stale, built from sources {built_from} instead of {expected}: {_FIX}")
    return Loaded(library)


def _unusable(path: Path, subject: str) -> str:
    if not path.exists():
        return f"{subject} not built: {_FIX}"
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != ctypes.sizeof(ctypes.c_uint64):
        return f"{subject} made for 64-bit little-endian machines"
    return ""
