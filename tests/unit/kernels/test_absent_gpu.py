"""What can be seen of a GPU's steps without one: their machine code, what they launch, and what recordings do.

Each in a process of its own, which interprets no kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit

SMALL_GPU_BYTES = 99 * 1024
"""Shared memory of a program on GPUs of workstations."""
LARGE_GPU_BYTES = 163 * 1024
"""Of data centres."""
REGISTERS = {
    "_decode": 168,
    "_spans": 200,
    "_best_kernel": 128,
    "_router": 232,
    "_combine": 184,
    "_rule": 232,
    "_grouped": 232,
    "_choose": 96,
    "_expert_sums": 96,
    "_inner_rows": 72,
    "_row_product": 72,
}
"""Most of a thread, as they are: whoever needs fewer lowers them."""
FEW_REGISTERS = 64
OF_SEVERAL_SHAPES = {"_grouped", "_add_choices", "_rms_norm", "_gated", "_router", "_row_product"}
"""Kernels that a model launches with several constants: of experts, of one row, norms of heads beside those of rows."""
PIPELINED = {"_decode", "_spans"}


def told_by(module: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Lines of JSON that a program of tests.support prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", *arguments],
        env={**environment, "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FP_FUSION" not in done.stderr, "a launch leaves it open whether products and sums are fused"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("model", ["qwen3-8b", "gpt-oss-20b", "gemma-2-9b", "qwen3-next-80b-a3b", "deepseek-v3"])
def test_machine_code_keeps_to_registers_and_loads_ahead(model: str, capability: int, tmp_path: Path) -> None:
    kernels = told_by("codegen", tmp_path, str(capability), model)
    names = [each["name"] for each in kernels if each["name"] not in OF_SEVERAL_SHAPES]
    assert len({*names}) == len(names), "a kernel is compiled once, whatever the step"
    for code in kernels:
        assert code["local_bytes"] == 0, code
        assert code["registers"] <= REGISTERS.get(code["name"], FEW_REGISTERS), code
        assert code["shared_bytes"] <= (SMALL_GPU_BYTES if capability == 80 else LARGE_GPU_BYTES), code
        if code["name"] in PIPELINED:
            assert code["loads_in_flight"] >= 2, code
            of_large_tiles = {80: "mma", 90: "wgmma", 100: "tcgen05"}[capability]
            has_large_tiles = code["name"] == "_spans" and model in ("qwen3-8b", "gpt-oss-20b")
            assert code["tensor_cores"] == (of_large_tiles if has_large_tiles else "mma"), code


def test_kernels_of_an_image_serve_every_launch_and_others_are_kept_beside_them(tmp_path: Path) -> None:
    told = told_by("kernels_ahead", tmp_path, str(tmp_path))
    found = [(each["capability"], each["was_there"]) for each in told]
    number = found.index((80, False))
    assert number >= 8
    assert found == [(90, True)] * number + [(80, False)] * number + [(80, True)] * number
    assert {each["kernel"] for each in told[:number]} >= {"_decode", "_spans", "_rms_norm", "_best_kernel"}


GIVEN = {
    "greedy": {"graphs": 1, "kernels": 1, "operators": 6},
    "random": {"graphs": 1, "kernels": 2, "operators": 6},
    "filtered": {"graphs": 1, "kernels": 2, "operators": 37},
    "masked": {"graphs": 1, "kernels": 1, "operators": 14},
    "experts": {"graphs": 1, "kernels": 1, "operators": 6},
}
"""Graphs, kernels of ours and torch's operators of a step that decodes. Whoever needs fewer lowers them.

Of one row, the output head is a kernel of ours in place of an operator.
"""
COPIES = 2
"""The numbers of all tokens and rows, and the tables of attention."""
WAITS = 2
"""For earlier copies of inputs out of the same buffers, and for the numbers that were drawn."""
FILTERED_ROWS = 13
"""Rows of this vocabulary that are filtered at a time, by 30 operators."""


@pytest.mark.parametrize("rows", [1, 256])
def test_a_step_gives_the_device_no_more_than_it_did_and_recordings_wait_for_nothing(rows: int, tmp_path: Path) -> None:
    told = {each.pop("step"): each for each in told_by("step_launches", tmp_path, str(rows))}
    refused = told.pop("refused")
    assert set(refused) == {"value", "pageable copy", "new copy", "event query", "wait"}
    expected = {name: {"copies": COPIES, "waits": WAITS, **counts} for name, counts in GIVEN.items()}
    if rows == 1:
        for counts in expected.values():
            counts["kernels"] += 1
            counts["operators"] -= 1
    expected["filtered"]["operators"] += (-(-rows // FILTERED_ROWS) - 1) * 30
    assert told == expected
