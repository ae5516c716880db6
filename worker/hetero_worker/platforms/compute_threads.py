"""Starts the threads that torch computes with, while the calling thread is at home on the rank's cores.

OpenMP starts its threads at the first piece of work that is large enough, and they keep the affinity that the caller
has at that moment. A rank leaves its cores for a while when it forms groups (`numa.threads_started_on`), and on a rank
that has all its measurements from its predecessor that may be the first piece of work.
"""

from __future__ import annotations

from typing import Final

import torch

_GRAIN: Final = 32768
"""Elements that torch gives a thread at least: at::internal::GRAIN_SIZE."""


def start_compute_threads(num_threads: int) -> None:
    """Use that many, the calling thread included, from now on. Costs some hundred microseconds."""
    torch.set_num_threads(num_threads)
    torch.empty(2 * _GRAIN * num_threads, dtype=torch.uint8).fill_(0)
