"""Weights by which a model is dealt where somebody gives them: spec.placement.shares is one who does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Shares(Protocol):
    """One weight a rank, in rank order, for each kind; None or empty: computed."""

    @property
    def attention(self) -> Sequence[float] | None: ...

    @property
    def mlp(self) -> Sequence[float] | None: ...

    @property
    def vocabulary(self) -> Sequence[float] | None: ...


@dataclass(frozen=True, slots=True)
class GivenShares:
    """Implements Shares; by default all is computed."""

    attention: Sequence[float] | None = None
    mlp: Sequence[float] | None = None
    vocabulary: Sequence[float] | None = None
