"""Kernels of attention and of linear layers compile to machine code, which what interprets them does not show.

No GPU is needed for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SMALL_GPU_BYTES = 99 * 1024
"""Shared memory of a program on GPUs of consumers, from compute capability 8.6 on."""


def test_kernels_compile_within_the_shared_memory_of_small_gpus(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.support.compiled_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    kernels = Counter(line[0] for line in lines)
    assert kernels == {"_decode": 2, "_spans": 2, "_combine": 2, "_matmul": 4 * 3, "_router": 4}
    assert max(int(line[-1]) for line in lines) <= SMALL_GPU_BYTES
