"""What tests/gpu asks of a GPU rank, asked of a pseudo GPU: that the question itself is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.families import TOLERANCE, float32_difference
from tests.support.mixed_reference import LAYOUTS, check, save_checkpoint

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("variant", "layout", "dtype"),
    [
        ("qwen3", "2 CPU ranks on MLP only", "float32"),
        ("llama", "3 CPU ranks on all parts", "float32"),
        ("qwen3", "layers on the GPU, then on 4 CPU ranks", "float32"),
        ("llama", "the GPU alone", "bfloat16"),
    ],
)
def test_logits_are_the_references(tmp_path: Path, variant: str, layout: str, dtype: str) -> None:
    check(save_checkpoint(variant, tmp_path / "model"), LAYOUTS[layout], dtype=dtype, pseudo=True)


def test_a_family_with_experts_draws_what_torchs_operators_draw(tmp_path: Path) -> None:
    beside = "2 CPU ranks with experts"
    assert float32_difference("deepseek-v3", tmp_path, beside, "none", pseudo=True) <= TOLERANCE
