"""Errors of the contract.

HeteroError
├── ManifestError        a HeteroInference document is wrong; holds every problem, each with its path
├── QuantityError        text that is no Kubernetes quantity
├── ModelError           a model directory cannot be served
└── PlanError            a shard plan that cannot be made or is inconsistent
"""

from __future__ import annotations

from collections.abc import Sequence


class HeteroError(Exception):
    """Root of all errors that this project raises on purpose. The message is for a person."""


class QuantityError(HeteroError, ValueError):
    """Text is no Kubernetes quantity."""


class ModelError(HeteroError):
    """A model directory lacks something, is damaged, or holds a model that is not supported."""


class PlanError(HeteroError):
    """Shares, ranks and the model's units do not fit together."""


class ManifestError(HeteroError):
    """A manifest is wrong.

    `problems` holds one line a problem, `path: what is wrong and what to do`.
    """

    def __init__(self, problems: Sequence[str], *, source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        head = f"{source}: " if source else ""
        super().__init__(head + "; ".join(self.problems))
