"""Weights of a model's shape without the model: for timing, which does not depend on their values.

They are small random numbers, so that nothing overflows, no number is denormal and a router spreads its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from hetero_worker.memory.loader import Checkpoint, TensorSlice

_NUMBERS: Final = 1 << 20
_SCALE: Final = 0.02
_SEED: Final = 20


class SyntheticWeights(Checkpoint):
    """Has every tensor that it is asked for. Reads no file."""

    def __init__(self) -> None:
        super().__init__(Path("synthetic weights"))
        generator = torch.Generator().manual_seed(_SEED)
        self._numbers = torch.empty(_NUMBERS).normal_(0.0, _SCALE, generator=generator)
        self._kinds: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:  # noqa: ARG002 - whatever the tensor, it is here
        """Fill `into` with the numbers, over and over where it is longer."""
        numbers = self._of_kind(into)
        flat = into.view(-1)
        for begin in range(0, len(flat), _NUMBERS):
            piece = flat[begin : begin + _NUMBERS]
            piece.copy_(numbers[: len(piece)])

    def _of_kind(self, like: torch.Tensor) -> torch.Tensor:
        kind = like.dtype, like.device
        if kind not in self._kinds:
            self._kinds[kind] = self._numbers.to(device=like.device, dtype=like.dtype)
        return self._kinds[kind]
