"""Runs the kernels' tests on a GPU, compiled, in place of Triton's interpreter: new tensors lie there by default.

    pytest --noconftest -p tests.support.kernels_on_gpu tests/unit/kernels/test_fused.py

The interpreter is switched on in that folder's conftest.py, which is left out.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.exit("torch finds no CUDA device here", returncode=pytest.ExitCode.NO_TESTS_COLLECTED)
torch.set_default_device("cuda")
