"""A rank on host cores touches no CUDA on a machine that has a driver and a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu_needed import skip_without_gpu
from tests.support.random_model import save_random_llama

skip_without_gpu()

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    """A program of the tests, with every GPU to be seen; what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_its_steps_open_no_device_and_begin_no_cuda(tmp_path: Path) -> None:
    assert run("-m", "tests.support.quiet_step", str(save_random_llama(tmp_path / "model"))) == ""


def test_whoever_begins_cuda_is_seen() -> None:
    program = "import torch; from tests.support.quiet_step import device_files; torch.ones(1, device='cuda')"
    assert "/dev/nvidia" in run("-c", f"{program}; print(device_files())")
