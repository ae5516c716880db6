"""Registry of checkpoint formats.

To add a format, write a module with a `WeightStore` and a function that returns it for a model directory, or None if
the directory is of another format, and list the function here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from hetero_worker.checkpoints.gguf_store import open_gguf
from hetero_worker.checkpoints.packed_safetensors import open_packed_safetensors
from hetero_worker.checkpoints.safetensors_store import open_safetensors
from hetero_worker.checkpoints.store import WeightStore

_SPECIAL: Final[tuple[Callable[[Path], WeightStore | None], ...]] = (open_gguf, open_packed_safetensors)
"""Formats other than plain safetensors, in the order in which they are tried."""


def open_store(directory: Path) -> WeightStore:
    """Open the weights of a model directory. Raises ModelError."""
    for open_special in _SPECIAL:
        if (store := open_special(directory)) is not None:
            return store
    return open_safetensors(directory)
