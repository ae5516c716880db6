"""Experts in the packed layout of host cores, as ranks of one host share them.

A rank on host cores packs its experts into an arena: memory that another process may map (a memfd, so it goes with the
last process that maps it, however that ends, and counts against nobody's /dev/shm). The rank writes each page first, so
the pages lie on its NUMA node. A GPU rank maps the arena, copies a layer's experts to its device as they lie there, and
multiplies with that copy: no weight is kept twice.

`native/compute/packing.h` says where a packed matrix's numbers lie, which depends on no instruction set. `PanelWeight`
says the same here.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import torch

PANEL_ROWS: Final = 32
"""Output rows of a panel: HC_PANEL."""
_ALIGNMENT: Final = 64
"""Bytes: of packed memory."""
_EXPERT_SLACK: Final = 256 * 1024
"""Bytes by which an expert may take more than its numbers do: panels and rows are filled up."""


class PanelFormat(NamedTuple):
    """A packed format: one of `enum hc_format`."""

    bits: int
    is_float: bool
    lane: int
    """Elements of a row that lie side by side, bytes of formats of 8 or fewer bits; the rows of a panel follow."""
    unit: int
    """Inputs that a row is filled up to a multiple of."""
    dtype: torch.dtype
    """Type of stored elements."""


FORMATS: Final = (
    PanelFormat(32, True, 1, 1, torch.float32),
    PanelFormat(16, True, 2, 32, torch.bfloat16),
    PanelFormat(16, True, 1, 1, torch.float16),
    PanelFormat(8, False, 4, 4, torch.uint8),
    PanelFormat(4, False, 4, 8, torch.uint8),
    PanelFormat(8, True, 1, 1, torch.uint8),
    PanelFormat(4, True, 4, 8, torch.uint8),
)
"""By their numbers in `enum hc_format`."""


class Place(NamedTuple):
    """First bytes of a packed matrix's parts, behind the arena's begin; 0 where there are none."""

    values: int
    scales: int
    minima: int


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """Everything but the place of a packed matrix [out, in]."""

    number: int
    """Of its format."""
    outputs: int
    inputs: int
    group: int
    """Inputs that share a scale; 0: all of a row."""
    has_minima: bool

    @property
    def format(self) -> PanelFormat:
        """Format of its values."""
        return FORMATS[self.number]

    @property
    def panels(self) -> int:
        """Number of panels."""
        return -(-self.outputs // PANEL_ROWS)

    @property
    def stored_inputs(self) -> int:
        """Inputs of a row as they are stored."""
        return -(-self.inputs // self.format.unit) * self.format.unit

    @property
    def panel_size(self) -> int:
        """Elements of a panel, bytes of formats of 8 or fewer bits."""
        return self.stored_inputs * PANEL_ROWS // (2 if self.format.bits == 4 else 1)

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return -(-self.inputs // self.group) if self.group else 1


@dataclass(frozen=True, slots=True)
class PanelLayer:
    """Experts of a layer that one rank holds: bytes [begin, end) of its arena."""

    begin: int
    end: int
    gate_up: PanelWeight
    down: PanelWeight
    places: Mapping[int, tuple[Place, Place]]
    """Of both matrices, by the experts' numbers."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied to have the layer's experts."""
        return self.end - self.begin

    def moved(self, begin: int) -> PanelLayer:
        """Return the layer where it begins at another byte."""
        by = begin - self.begin
        places = {number: (_moved(one, by), _moved(other, by)) for number, (one, other) in self.places.items()}
        return replace(self, begin=begin, end=self.end + by, places=places)

    def renamed(self, leaving: int, arriving: int) -> PanelLayer:
        """Return the layer with an expert in the place of another."""
        places = dict(self.places)
        places[arriving] = places.pop(leaving)
        return replace(self, places=places)

    def to_json(self) -> list[Any]:
        """Return what `from_json` takes."""
        kinds = [
            [kind.number, kind.outputs, kind.inputs, kind.group, kind.has_minima] for kind in (self.gate_up, self.down)
        ]
        return [self.begin, self.end, kinds, [[number, *pair] for number, pair in self.places.items()]]

    @classmethod
    def from_json(cls, told: list[Any]) -> Self:
        """Return the layer that another rank has told of."""
        begin, end, kinds, places = told
        gate_up, down = (PanelWeight(*kind) for kind in kinds)
        return cls(begin, end, gate_up, down, {n: (Place(*first), Place(*second)) for n, first, second in places})


def _moved(place: Place, by: int) -> Place:
    return Place(*(part + by for part in place))


class ExpertArena:
    """Memory of a rank's experts that ranks of its host may map."""

    def __init__(self, num_experts: int, expert_bytes: int) -> None:
        """Reserve addresses for so many experts; memory is taken as they are written. Raises OSError."""
        self.fd: Final = os.memfd_create("hetero-experts", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        reserved = -(-num_experts * (2 * expert_bytes + _EXPERT_SLACK) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, reserved)
        self._memory = mapped(self.fd, reserved)
        self.num_bytes = 0
        """Bytes that are taken."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._memory.data_ptr()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return so many bytes, uint8, behind those before. Raises MemoryError if more are asked for than reserved."""
        begin = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
        if begin + num_bytes > len(self._memory):
            raise MemoryError(f"experts take more than the {len(self._memory)} bytes that were reserved for them")
        self.num_bytes = begin + num_bytes
        return self._memory[begin : self.num_bytes]

    def begin_part(self) -> int:
        """Return where what is allocated from now on begins, at a page."""
        self.num_bytes = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self.num_bytes

    def trim(self) -> None:
        """Give up what is reserved and not taken; nothing can be allocated behind that."""
        self._memory = self._memory[: self.num_bytes]
        os.ftruncate(self.fd, self.num_bytes)


def mapped(fd: int, num_bytes: int) -> torch.Tensor:
    """Return shared memory of a file, uint8, which stays mapped for as long as the tensor lives. Raises OSError."""
    memory = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
