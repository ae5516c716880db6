"""Says whether tests that need a GPU can run here; if not, why."""

from __future__ import annotations

import pytest
import torch


def skip_without_gpu() -> None:
    """Skip the calling module, with the reason, where torch has no CUDA device."""
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} was built without CUDA", allow_module_level=True)
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here", allow_module_level=True)
