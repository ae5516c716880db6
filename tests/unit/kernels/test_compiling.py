"""Kernels compile to machine code, which what interprets them does not show. No GPU is needed for it.

Each set in a process of its own, without the interpreter.
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


def told_by(module: str, cache: Path) -> list[str]:
    """What a program of tests.support prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}"],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_attention_and_linear_layers_compile_within_the_shared_memory_of_small_gpus(tmp_path: Path) -> None:
    lines = [line.split() for line in told_by("compiled_kernels", tmp_path)]
    kernels = Counter(line[0] for line in lines)
    assert kernels == {"_decode": 6, "_spans": 6, "_combine": 6, "_matmul": 4 * 3, "_router": 4}
    assert max(int(line[-1]) for line in lines) <= SMALL_GPU_BYTES


def test_fused_steps_compile(tmp_path: Path) -> None:
    lines = told_by("compile_fused_kernels", tmp_path)
    assert lines == ["compiled for torch.bfloat16", "compiled for torch.float32"]


def test_draws_compile(tmp_path: Path) -> None:
    assert told_by("compile_sampling_kernels", tmp_path) == ["compiled"]


def test_products_with_quantised_weights_compile_and_spill_nothing(tmp_path: Path) -> None:
    lines = [line.split() for line in told_by("compile_quantized_kernels", tmp_path)]
    assert Counter(line[0] for line in lines) == {
        "_product": 5, "_grouped": 8, "_add_parts": 1, "_look_up": 1, "_add_choices": 1
    }  # fmt: skip
    assert max(int(line[4]) for line in lines) <= SMALL_GPU_BYTES
    assert [line for line in lines if line[6] != "0"] == []
