"""MappedFile: a file's bytes as a tensor, whose pages can be let go once they have been copied.

What a process has read of a mapping counts as its memory, page by page. A rank reads each weight once: kept until the
end of the load, the pages would be as much again as the weights.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch


class MappedFile:
    """The mapping goes with the last tensor that lies in it. Nobody writes to them."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ValueError for a file that is empty."""
        with path.open("rb") as file:
            # Copy on write, because torch wants memory that may be written to.
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def let_go(self) -> None:
        """Give back the pages that were read. Tensors stay what they are: whoever reads on, reads from the file."""
        self._mapped.madvise(mmap.MADV_DONTNEED)
