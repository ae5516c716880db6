"""`python -m hetero_worker.backends.software`: report what ranks of this installation would compute with, and exit.

For `hetero doctor`, which imports nothing of a rank. One JSON object on stdout; nothing is measured.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import torch

from hetero_api.host.gpus import visible_gpus
from hetero_worker.backends.cuda.driver import CudaDriver
from hetero_worker.distributed import native_exchange
from hetero_worker.native.build import BuildError, find_compiler
from hetero_worker.native.compute_library import load_compute


def report() -> dict[str, Any]:
    """Return facts about torch, the native libraries, the compiler and the devices.

    Problems are "" where all is well. `isas`: instruction sets that this processor has native kernels for, best first.
    """
    kernels = load_compute()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "architecture": platform.machine(),
        "compiler": _compiler(),
        "kernels_problem": kernels.reason,
        "isas": [] if kernels.library is None else list(kernels.library.isas),
        "exchange_problem": native_exchange.load().reason,
        "gpu_problems": [CudaDriver(gpu.number).problem() or "" for gpu in visible_gpus(os.environ)],
    }


def _compiler() -> str:
    """Return the path of the C compiler; "" without one."""
    try:
        return find_compiler()[0]
    except BuildError:
        return ""


if __name__ == "__main__":
    print(json.dumps(report()))
