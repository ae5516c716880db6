"""Whether a native library that was built is the one that this code was written for."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from hetero_worker.native.build import source_digest

_FIX: Final = "install a C compiler and say `make native` (in an image: python -m hetero_worker.native.build)"


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
    if not path.exists():
        return None, f"{subject} not built: {_FIX}"
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != ctypes.sizeof(ctypes.c_uint64):
        return None, f"{subject} made for 64-bit little-endian machines"
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
