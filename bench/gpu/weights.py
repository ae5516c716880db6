"""Weights of a model's shape, made where they are to lie: nothing is read, nothing is written.

Random rather than constant: a product of constants takes a GPU less power, and so runs faster than a model's. Norms are
ones, so that activations neither vanish nor overflow over many layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

import torch

from bench.gpu.shapes import EMBEDDING_SCALE
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.probe.synthetic import SyntheticWeights

_SCALE: Final = 0.02
_EMBEDDING: Final = "embed_tokens.weight"
_SEED: Final = 7


class MadeWeights(SyntheticWeights):
    """A Checkpoint that has every tensor. The same device makes the same values each time it is opened."""

    def __init__(self, directory: Path) -> None:  # noqa: ARG002 - LoadRequest.open_weights gives it; there is none
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}

    def __enter__(self) -> Self:
        return self

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:
        """On a device each tensor is drawn; on the host, where that would take minutes, numbers go round."""
        if len(part.full_shape) == 1:
            into.fill_(1.0)
            return
        if into.device.type == "cpu":
            super().read(part, into)
        else:
            into.normal_(0.0, _SCALE, generator=self._drawing_on(into.device))
        if part.name.endswith(_EMBEDDING):
            into.mul_(EMBEDDING_SCALE / _SCALE)

    def _drawing_on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(_SEED)
        return self._generators[device]
