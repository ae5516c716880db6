"""Weights of a model's shape without the model: for timing, which does not depend on their values.

They are small random numbers, so that nothing overflows, no number is denormal and a router spreads its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch

from hetero_api.model_parts import ExpertsConfig
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.checkpoints.store import TensorSlice
from hetero_worker.layers.fused_ops import PLAIN_OPS, FusedOps
from hetero_worker.layers.linear_kernels import FLOAT_TYPES
from hetero_worker.layers.moe import Router
from hetero_worker.layers.norm import RmsNorm

_NUMBERS: Final = 1 << 20
_SCALE: Final = 0.02
_SEED: Final = 20


class SyntheticWeights(Checkpoint):
    """Has every tensor that it is asked for, quantised where that is asked for. Reads no file."""

    def __init__(self, *, floats: str = "") -> None:
        """`floats`: the type that the others are stored in, as config.json writes it; "": whatever is wanted."""
        super().__init__(Path("synthetic weights"))
        self._stored_in = FLOAT_TYPES.get(floats)
        self._generator = torch.Generator().manual_seed(_SEED)
        self._numbers = torch.empty(_NUMBERS).normal_(0.0, _SCALE, generator=self._generator)
        self._kinds: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def has(self, tensor: str) -> bool:  # noqa: ARG002 - nothing is there unless it is read
        """Return False, since no tensor is there that is not asked for."""
        return False

    def left_out(self) -> tuple[str, ...]:
        """Return nothing, since no file has any other part."""
        return ()

    def read(self, part: TensorSlice, into: torch.Tensor) -> None:  # noqa: ARG002 - whatever the tensor, it is here
        """Fill `into` with the numbers, over and over where it is longer."""
        numbers = self._of_kind(into)
        flat = into.view(-1)
        for begin in range(0, len(flat), _NUMBERS):
            piece = flat[begin : begin + _NUMBERS]
            piece.copy_(numbers[: len(piece)])

    def dtype_of(self, part: TensorSlice) -> torch.dtype | None:
        """Return the type that floats are stored in; None where that is open."""
        return None if part.quantize_to is not None else self._stored_in

    def read_quantized(self, part: TensorSlice) -> QuantizedMatrix:
        """Random values, in whatever format is asked for."""
        weights = self.format_of(part)
        if weights is None:
            raise RuntimeError(f"{part.name} is floats and is to stay so")
        outputs, inputs = part.shape
        kind, least, end = (torch.int8, -127, 128) if weights.bits == 8 else (torch.uint8, 0, 16)
        if weights.is_wide:  # the others are negative ones, and one that is no number
            least, end = 0, 127
        values = torch.randint(least, end, (outputs, inputs), dtype=kind, generator=self._generator)
        scales = torch.full((outputs, weights.groups(inputs)), _SCALE / end)
        scales = scales.half().float()
        return QuantizedMatrix(weights, values, scales, -scales if weights.has_minimum else None)

    def _of_kind(self, like: torch.Tensor) -> torch.Tensor:
        kind = like.dtype, like.device
        if kind not in self._kinds:
            self._kinds[kind] = self._numbers.to(device=like.device, dtype=like.dtype)
        return self._kinds[kind]


class EvenRouter(Router):
    """Router for a rank that has the experts [0, own), with tokens spread as evenly as they are on average.

    A few rows choose a few experts, and a rank has some of these or none, by chance, so times of a real router's
    choices say little about the mean. This router does a real one's arithmetic, but its choices follow from numbers
    alone: of the rank's experts as many are chosen as can be expected, and by as many rows. The rest of the rounding
    goes into the units that the time is stated for.
    """

    def __init__(
        self,
        experts: ExpertsConfig,
        block: str,
        hidden_size: int,
        norm: RmsNorm,
        *,
        own: int,
        ops: FusedOps = PLAIN_OPS,
    ) -> None:
        super().__init__(experts, block, hidden_size, norm, ops=ops)
        self._shape = experts
        self._own = own
        self._choices: dict[int, torch.Tensor] = {}

    def __call__(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Even choices, with a real router's weights."""
        _, weights = super().__call__(hidden, slots)
        rows = len(hidden)
        if rows not in self._choices:
            self._choices[rows] = even_choices(self._shape, own=self._own, rows=rows).to(hidden.device)
        return self._choices[rows], weights


def even_choices(experts: ExpertsConfig, *, own: int, rows: int) -> torch.Tensor:
    """int64 [rows, chosen]: as many of the experts [0, own) as `active_experts` says, by their part of all choices.

    A row may choose an expert twice: it takes the time of two rows.
    """
    choices, others = rows * experts.per_token, experts.number - own
    active = active_experts(experts, own=own, rows=rows)
    inside = max(active, round(choices * own / experts.number)) if others else choices
    at = np.arange(choices)  # and not torch's: whoever records a step would miss that
    outside = own + at % others if others else at
    return torch.from_numpy(np.where(at < inside, at % active, outside).reshape(rows, experts.per_token))


def active_experts(experts: ExpertsConfig, *, own: int, rows: int) -> int:
    """How many of `own` experts the rows choose on average; a whole number, at least one."""
    return min(max(1, round(own * _share(experts, rows))), rows * experts.per_token, own)


def even_units(experts: ExpertsConfig, *, own: int, rows: int) -> float:
    """Experts that a rank has of which so many are chosen on average."""
    return active_experts(experts, own=own, rows=rows) / _share(experts, rows)


def _share(experts: ExpertsConfig, rows: int) -> float:
    """Part of all experts that rows choose, each on its own."""
    return 1.0 - (1.0 - experts.per_token / experts.number) ** rows
