"""Memory that attention's indices, scores and gathered rows are kept in from step to step.

Buffers grow with the longest sequences and do not shrink until all are released, so a steady step takes no memory;
they grow by an eighth more than is needed, so that a sequence that gets longer makes them grow once in many steps.
A workspace serves one step at a time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final

import torch

_SPARE: Final = 8
_SMALLEST: Final = 4096


class Workspace:
    """Named buffers. What a buffer holds from before is of no meaning, but finite: new memory is zeros."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._sections: dict[Hashable, Workspace] = {}

    def section(self, name: Hashable) -> Workspace:
        """Buffers that share no memory with those of other sections."""
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = Workspace()
        return section

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in the buffer of that name and type: it overwrites what was taken there before."""
        count = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            self._buffers.pop((name, dtype), None)
            buffer = torch.zeros(max(_SMALLEST, count + count // _SPARE), dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:count].view(shape)

    def counting(self, count: int) -> torch.Tensor:
        """int32 0, 1, …, count - 1."""
        known = self._buffers.get(("counting", torch.int32))
        if known is None or known.numel() < count:
            known = torch.arange(max(_SMALLEST, count + count // _SPARE), dtype=torch.int32)
            self._buffers["counting", torch.int32] = known
        return known[:count]
