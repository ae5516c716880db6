"""OpLibrary: whether a rank on host cores has native kernels, and the threads that they run on."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_worker.native.build import COMPUTE_LIBRARY
from hetero_worker.native.compute_library import load_compute
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpLibrary:
    """Of one rank."""

    op_queue: OpQueue | None
    reason: str = ""
    """Why there is none where there could be one; empty elsewhere."""
    home: int | None = None
    """CPU that the others of the team leave to the calling thread; None: all may run anywhere."""


NOT_FOR_DEVICES: Final = OpLibrary(None)
"""They are for host cores."""


def open_op_library(num_threads: int, *, path: Path = COMPUTE_LIBRARY) -> OpLibrary:
    """A team of so many threads on this process's cores, one a core where there are as many. Says so if it has none."""
    loaded = load_compute(path)
    if loaded.library is None:
        logger.warning("ranks on host cores compute with torch's kernels, which are slower: %s", loaded.reason)
        return OpLibrary(None, loaded.reason)
    cores = sorted(os.sched_getaffinity(0))
    home, others = (cores[0], cores[1:]) if len(cores) == num_threads else (None, None)
    try:
        team = NativeTeam(loaded.library, num_threads, cpus=others)
    except OSError as error:
        logger.warning("ranks on host cores compute with torch's kernels, which are slower: %s", error)
        return OpLibrary(None, str(error))
    return OpLibrary(OpQueue(team), home=home)
