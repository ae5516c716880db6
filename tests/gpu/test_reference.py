"""Llama- and Qwen3-like random models on a GPU, alone and beside 2 to 4 CPU ranks: logits are transformers' own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gpu_needed import skip_without_gpu
from tests.support.mixed_reference import LAYOUTS, check, save_checkpoint
from tests.support.tiny_checkpoints import TinyCheckpoint

skip_without_gpu()

pytestmark = pytest.mark.gpu

VARIANTS = ("llama", "qwen3")
MIXED = "2 CPU ranks on MLP only"
ALONE = "the GPU alone"
GRAPHS_ON: dict[str, Any] = {"enforce_eager": False}
GRAPHS_OFF: dict[str, Any] = {"enforce_eager": True}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_logits_equal_the_reference(checkpoint: TinyCheckpoint, layout: str) -> None:
    check(checkpoint, LAYOUTS[layout], dtype="float32", pseudo=False, changes=GRAPHS_ON)


@pytest.mark.parametrize("layout", [ALONE, MIXED])
def test_float32_logits_equal_the_reference_without_graphs(checkpoint: TinyCheckpoint, layout: str) -> None:
    check(checkpoint, LAYOUTS[layout], dtype="float32", pseudo=False, changes=GRAPHS_OFF)


@pytest.mark.parametrize(("layout", "changes"), [(ALONE, GRAPHS_ON), (ALONE, GRAPHS_OFF), (MIXED, GRAPHS_ON)])
def test_bfloat16_logits_are_as_near_as_the_references_own(
    checkpoint: TinyCheckpoint, layout: str, changes: dict[str, Any]
) -> None:
    check(checkpoint, LAYOUTS[layout], dtype="bfloat16", pseudo=False, changes=changes)
