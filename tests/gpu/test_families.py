"""The large families on a GPU, alone and beside CPU ranks, with weights of 16, 8 and 4 bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.families import (
    ALLOWED,
    ALONE,
    FAMILIES,
    LAYOUTS,
    QUANTIZED,
    TOLERANCE,
    bfloat16_differences,
    float32_difference,
)
from tests.support.gpu_needed import skip_without_gpu

skip_without_gpu()

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_torchs_operators(tmp_path: Path, family: str, layout: str) -> None:
    assert float32_difference(family, tmp_path, layout, "none", pseudo=False) <= TOLERANCE


@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize("family", FAMILIES)
def test_so_they_are_with_quantised_weights(tmp_path: Path, family: str, weights: str) -> None:
    assert float32_difference(family, tmp_path, ALONE, weights, pseudo=False) <= TOLERANCE


@pytest.mark.parametrize("eager", [False, True], ids=["graphs on", "graphs off"])
@pytest.mark.parametrize("weights", ["none", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_as_torchs(tmp_path: Path, family: str, weights: str, eager: bool) -> None:
    ours, torchs = bfloat16_differences(family, tmp_path, weights, eager=eager)
    assert ours <= ALLOWED * torchs
