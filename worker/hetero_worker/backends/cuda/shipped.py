"""Compiled kernels that an image brings along, as the first place where Triton looks.

`ahead` compiles them, and images name `ShippedKernels` in TRITON_CACHE_MANAGER. What is not among
them Triton compiles and keeps as ever, in the folder of TRITON_CACHE_DIR.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from triton.runtime.cache import FileCacheManager

SHIPPED: Final = Path(sys.prefix) / "share/hetero/kernels"
"""Folder of the image's kernels: a folder for each, as Triton makes it."""


class ShippedKernels(FileCacheManager):  # type: ignore[misc]
    """Triton's cache of one kernel's files."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by their names: the image's, or else those that were kept here."""
        folder = SHIPPED / self.key
        try:
            # Its own paths are those of the machine that compiled.
            group = json.loads((folder / f"__grp__{filename}").read_text(encoding="utf-8"))
        except OSError:
            kept: dict[str, str] | None = super().get_group(filename)
            return kept
        return {name: str(folder / name) for name in group["child_paths"]}
