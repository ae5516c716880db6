"""How far a long work has come, as the model store, ranks and displays tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Amount:
    """`done` of `total` of a long work, in `unit` ("B" for bytes, else a noun in the plural)."""

    work: str
    done: int
    total: int
    unit: str = "B"
