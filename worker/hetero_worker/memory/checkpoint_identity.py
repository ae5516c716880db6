"""What tells one state of a model directory from all others, without reading its weights.

Of each file that weights are read from: name, inode, size, and when it was last written and last changed in any way.
Nobody can set the last of these, so a file that was written to, replaced or renamed is another, even where its size and
date of writing are what they were. A copy is another too. Clocks tick some times in a hundredth of a second: a state
that is younger than that could still change within its tick, so it has no identity yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hetero_api.model_config import CONFIG_FILE

_SUFFIXES: Final = (".safetensors", ".gguf", ".safetensors.index.json")
_TICK_NS: Final = 2_000_000_000
"""Two seconds: there are file systems that count in these."""

ClockNs = Callable[[], int]
"""Nanoseconds since 1970."""


def checkpoint_files(directory: Path) -> list[Path]:
    """What a model's weights and their meaning are read from, by name. Raises OSError."""
    return sorted(path for path in directory.iterdir() if path.name == CONFIG_FILE or path.name.endswith(_SUFFIXES))


def checkpoint_identity(directory: Path, *, clock_ns: ClockNs = time.time_ns) -> str | None:
    """None while it may still be written to, and where it cannot be known."""
    try:
        found = [(path.name, path.stat()) for path in checkpoint_files(directory)]
    except OSError:
        return None
    youngest = max((max(stat.st_mtime_ns, stat.st_ctime_ns) for _, stat in found), default=0)
    if not found or youngest + _TICK_NS > clock_ns():
        return None
    return repr([(name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found])
