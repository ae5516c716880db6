"""Declares what a native library offers, and loads it only if it was built from the sources beside it."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import cffi

from hetero_worker.native.build import source_digest

_FIX: Final = "install a C compiler and run `make native` (in an image: python -m hetero_worker.native.build)"
_PREPROCESSOR: Final = re.compile(r"^\s*#.*$", re.MULTILINE)
_VOID_POINTER: Final = re.compile(r"\b(?:const )?void \*(?:const \*)?")


def declare(header: Path) -> Any:
    """Return a cffi.FFI with the declarations of a C header. Takes some milliseconds.

    Preprocessor lines are dropped, so limits must be enumerators. Void pointers become integers: tensors give
    addresses, and a call that converts none is 0.15 µs faster. Raises cffi.CDefError.
    """
    text = _PREPROCESSOR.sub("", header.read_text(encoding="utf-8")).replace("_Atomic ", "")
    ffi = cffi.FFI()
    ffi.cdef(_VOID_POINTER.sub("uintptr_t ", text))
    return ffi


def open_checked(ffi: Any, path: Path, *, subject: str, source: str, sources: Sequence[Path]) -> tuple[Any, str]:
    """Return the library's functions, or None and what is wrong with it and how to fix that. Never raises.

    Args:
        ffi: The declarations of the library's header.
        path: The library.
        subject: Begin of the sentence that says what is wrong, as "the native exchange was".
        source: Function that returns the digest of the sources that the library was built from.
        sources: Files that the library must have been built from.
    """
    if problem := _unusable(path, subject):
        return None, problem
    try:
        library = ffi.dlopen(str(path))
        built_from = ffi.string(getattr(library, source)()).decode()
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded ({error}): {_FIX}"
    if built_from != (expected := source_digest(sources)):
        return None, f"{path} is stale, built from sources {built_from} instead of {expected}: {_FIX}"
    return library, ""


def _unusable(path: Path, subject: str) -> str:
    if not path.exists():
        return f"{subject} not built: {_FIX}"
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != ctypes.sizeof(ctypes.c_uint64):
        return f"{subject} made for 64-bit little-endian machines"
    return ""


class SelfTelling(Protocol):
    """What every library of ours says of itself, in C."""

    abi: Any
    size: Any
    """Bytes of its structs, by their number."""
    source: Any


L = TypeVar("L", bound=SelfTelling)


def load_checked(
    path: Path,
    make: Callable[[Path], L],
    *,
    subject: str,
    abi: int,
    structs: Sequence[type[ctypes.Structure]],
    sources: Sequence[Path],
) -> tuple[L | None, str]:
    """The library, or what is wrong with it and how to mend that. Never raises.

    `make` raises OSError or AttributeError where it cannot; `subject` is what a sentence that says so begins with.
    """
    if problem := _unusable(path, subject):
        return None, problem
    try:
        library = make(path)
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded ({error}): {_FIX}"
    if reason := _mismatch(library, abi, structs, source_digest(sources)):
        return None, f"{path} is stale, {reason}: {_FIX}"
    return library, ""


def _mismatch(library: SelfTelling, abi: int, structs: Sequence[type[ctypes.Structure]], source: str) -> str:
    if (found := library.abi()) != abi:
        return f"of ABI {found} instead of {abi}"
    if any(library.size(which) != ctypes.sizeof(struct) for which, struct in enumerate(structs)):
        return "with structs of other sizes"
    if (built_from := library.source().decode()) != source:
        return f"built from sources {built_from} instead of {source}"
    return ""
