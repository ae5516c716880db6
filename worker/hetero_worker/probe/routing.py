"""Tokens that spread over experts as evenly as they do on average.

A few rows choose a few experts, and a rank has some of these or none, by chance: times of a real router's choices tell
little of the mean. So the router that is timed does its arithmetic, but what it says follows from numbers alone: of the
rank's experts as many are chosen as can be expected, and by as many rows. What is left of rounding goes into the units
that the time is said to be of.
"""

from __future__ import annotations

import torch

from hetero_api.model_parts import ExpertsConfig
from hetero_worker.layers.moe import Router
from hetero_worker.layers.norm import RmsNorm


class EvenRouter(Router):
    """For a rank that has the experts [0, own)."""

    def __init__(self, experts: ExpertsConfig, name: str, hidden_size: int, norm: RmsNorm, *, own: int) -> None:
        super().__init__(experts, name, hidden_size, norm)
        self._shape = experts
        self._own = own
        self._choices: dict[int, torch.Tensor] = {}

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Even choices, with a real router's weights."""
        _, weights = super().__call__(hidden)
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
    at = torch.arange(choices)
    outside = own + at % others if others else at
    return torch.where(at < inside, at % active, outside).view(rows, experts.per_token)


def active_experts(experts: ExpertsConfig, *, own: int, rows: int) -> int:
    """How many of `own` experts the rows choose on average; a whole number, at least one."""
    return min(max(1, round(own * _share(experts, rows))), rows * experts.per_token, own)


def even_units(experts: ExpertsConfig, *, own: int, rows: int) -> float:
    """Experts that a rank has of which so many are chosen on average."""
    return active_experts(experts, own=own, rows=rows) / _share(experts, rows)


def _share(experts: ExpertsConfig, rows: int) -> float:
    """Part of all experts that rows choose, each on its own."""
    return 1.0 - (1.0 - experts.per_token / experts.number) ** rows
