"""A rank process, as hetero_worker is one; on a pseudo GPU where it is told --device cuda:N.

python -m tests.support.pseudo_gpu_rank ...            a rank, with hetero_worker's own options
python -m tests.support.pseudo_gpu_rank forkserver     what forks such ranks
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from unittest import mock

from hetero_worker.process import forkserver
from hetero_worker.process.config import RankConfig
from hetero_worker.process.rank import backend_of, main

if TYPE_CHECKING:
    from hetero_worker.backends.base import DeviceBackend


def make_backend(config: RankConfig) -> DeviceBackend:
    """A pseudo GPU where a rank is told to compute on one. Imported late, as rank.py does."""
    from tests.support.pseudo_gpu import PseudoGpu

    return backend_of(config) if config.cuda_device is None else PseudoGpu(config.cuda_device)


def be_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """`rank.main`, with pseudo GPUs."""
    return main(arguments, environment, make_backend=make_backend)


if __name__ == "__main__":
    if sys.argv[1:] == ["forkserver"]:
        with mock.patch("hetero_worker.process.rank.main", be_rank):
            forkserver.run()
    else:
        sys.exit(be_rank(sys.argv[1:], os.environ))
