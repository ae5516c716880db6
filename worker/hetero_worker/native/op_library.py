"""OpLibrary: a host rank's access to the native kernels, or the reason why it has none."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.contract import ENV_CPU_ISA
from hetero_worker.errors import DeviceError
from hetero_worker.native.build import COMPUTE_LIBRARY
from hetero_worker.native.compute_library import load_compute
from hetero_worker.native.loading import Loaded
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpLibrary:
    """One rank's native kernels."""

    op_queue: OpQueue | None
    reason: str = ""
    """Reason why a host rank has no queue; empty if it has one, and for other devices."""
    home: int | None = None
    """Core that the team's other threads leave to the calling thread; None: all may run anywhere."""


NOT_FOR_DEVICES: Final = OpLibrary(None)
"""For ranks on devices: the kernels are for host cores."""


def open_op_library(num_threads: int, *, path: Path = COMPUTE_LIBRARY) -> OpLibrary:
    """Start a team of this many threads on the process's cores, and log if that is impossible.

    Each thread has a core of its own if there are as many cores as threads. Raises DeviceError if the environment asks
    for an instruction set that the library or the processor does not have.
    """
    loaded = load_compute(path)
    if isa := os.environ.get(ENV_CPU_ISA):
        _force(isa, loaded)
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


def _force(isa: str, loaded: Loaded) -> None:
    """Use the kernels of one instruction set in this process."""
    try:
        if loaded.library is None:
            raise ValueError(loaded.reason)
        loaded.library.use(isa)
    except ValueError as error:
        raise DeviceError(f"{ENV_CPU_ISA}={isa}: {error}") from error
