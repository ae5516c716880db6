"""Compiles a model's kernels ahead, and launches them as a rank would on the GPU that they are for.

    python -m tests.support.kernels_ahead FOLDER

Prints a line of JSON for each kernel that a rank asks for: of which GPU, and whether it was there. In a process of its
own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import triton
from triton.compiler import CompiledKernel

from hetero_worker.backends.cuda import ahead, launches, shipped
from hetero_worker.backends.cuda.absent import AbsentRank
from tests.support.codegen import DENSE, config_of

AHEAD, OTHER = 90, 80


def main(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**DENSE["qwen3-8b"], "num_hidden_layers": 1}), encoding="utf-8")
    ahead.main(["--into", str(folder / "image"), "--capabilities", str(AHEAD), str(config)])
    del os.environ["TRITON_STORE_BINARY_ONLY"]
    (folder / "image").rename(folder / "elsewhere")  # an image is not run where it was built
    shipped.SHIPPED = folder / "elsewhere"  # type: ignore[misc]
    os.environ.update(
        TRITON_CACHE_MANAGER="hetero_worker.backends.cuda.shipped:ShippedKernels", TRITON_CACHE_DIR=str(folder / "own")
    )
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.run = property(lambda _: lambda *_: None)
    for capability in (AHEAD, OTHER, OTHER):
        launch_all(capability)


def launch_all(capability: int) -> None:
    """Every kernel is launched, and runs nothing."""

    def tell(*, src: Any, cache_hit: bool, **_: object) -> None:
        print(json.dumps({"capability": capability, "kernel": src.name, "was_there": cache_hit}), flush=True)

    triton.runtime.driver.set_active(launches._AbsentTarget(capability))
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = tell
        rank = AbsentRank(config_of("qwen3-8b"))
        for plan in ahead._plans(rank):
            rank.execute(plan)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
