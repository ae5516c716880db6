"""Errors of the contract.

HeteroError
├── ManifestError        a HeteroInference document is wrong; holds every problem, each with its path
├── QuantityError        text that is no Kubernetes quantity
├── ModelError           a model directory cannot be served
│   └── ModelReadError   its storage failed, and may not the next time
└── PlanError            a shard plan that cannot be made or is inconsistent
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PASSING: Final = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN,
        errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EREMOTEIO, errno.ENOLINK, errno.EAGAIN, errno.EMFILE, errno.ENFILE,
        errno.ENOMEM,
    }
)  # fmt: skip
"""What disks and network file systems say of a fault of their own, and a crowded host."""


class HeteroError(Exception):
    """Root of all errors that this project raises on purpose. The message is for a person."""


class QuantityError(HeteroError, ValueError):
    """Text is no Kubernetes quantity."""


class ModelError(HeteroError):
    """A model directory lacks something, is damaged, or holds a model that is not supported."""


class ModelReadError(ModelError):
    """Storage failed while a model was read: what is wrong may pass, unlike other errors of a model."""


def unreadable_model(path: Path, error: OSError) -> ModelError:
    """Return the error for a file of a model that cannot be read: a ModelReadError if trying again may help."""
    kind = ModelReadError if error.errno in _PASSING else ModelError
    return kind(f"{path}: cannot be read: {error.strerror or error}")


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
