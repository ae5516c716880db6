"""Imports torch for ranks, with less memory at its peak.

The initialisers of torch's libraries run once, and go through much of their code. What is mapped of it is let go
(`file_pages.py`) before and after Python's part of the import, which takes as much memory again; it comes back page by
page, where it is used.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hetero_worker.platforms.file_pages import let_go_of_code

_LIBRARIES: Final = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL))
"""In the order and the way in which torch loads them."""


def import_torch() -> None:
    """Nothing is started by it. Without effect where torch is imported already."""
    if "torch" in sys.modules:
        return
    _load_libraries()
    let_go_of_code()
    importlib.import_module("torch")
    let_go_of_code()


def _load_libraries() -> None:
    """The large ones, before Python's part. One that cannot be loaded by itself is left to torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    for name, mode in _LIBRARIES:
        try:
            ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=mode)
        except OSError:
            return
