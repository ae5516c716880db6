"""Keys and values that are cached in fewer bits than ranks compute in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.errors import ModelError
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

ONE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
TWO = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136), experts=((1, 5),))
BITS = {"bfloat16": 8, "float16": 11}
"""Of a number's significand, the hidden one included."""
PROMPT = [(i * i * 11 + 7 * i) % 200 for i in range(17)]


@pytest.fixture(scope="module", params=["llama-biased", "gemma2", "gpt-oss", "deepseek-v3-dense"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def logits_of(group: RankGroup, cuts: Sequence[int] = (17,)) -> torch.Tensor:
    """Of the prompt, cut into chunks, and of four tokens behind it."""
    builder, logits = PlanBuilder(group), []
    builder.start(0, PROMPT)
    for count in cuts:
        builder.schedule(0, count)
        logits = [builder.run().logits]
    for _ in range(4):
        builder.schedule(0)
        logits.append(builder.run().logits)
    return torch.cat(logits)


@pytest.mark.parametrize("shares", [ONE, TWO], ids=["one rank", "two"])
@pytest.mark.parametrize("cached", BITS)
def test_logits_differ_by_the_rounding_of_what_is_cached(
    checkpoint: TinyCheckpoint, cached: str, shares: Shares
) -> None:
    """By native kernels, recorded or not, and by torch, and however the prompt is cut."""

    def logits(cuts: Sequence[int] = (17,), **changes: Any) -> torch.Tensor:
        return logits_of(RankGroup(checkpoint.directory, shares, **({"kv_cache_dtype": cached} | changes)), cuts)

    whole, narrow = logits(kv_cache_dtype=""), logits()
    scale = float(whole.abs().max())
    assert 0 < float((narrow - whole).abs().max()) / scale < 2.0 ** (3 - BITS[cached])
    assert torch.equal(logits(recorded=False), narrow)
    torch.testing.assert_close(logits((5, 7, 5)), narrow, rtol=1e-4, atol=1e-4 * scale)
    torch.testing.assert_close(logits(native=False), narrow, rtol=1e-3, atol=1e-3 * scale)


def test_the_cache_takes_half_the_memory_and_reports_say_so(checkpoint: TinyCheckpoint) -> None:
    whole, narrow = (RankGroup(checkpoint.directory, ONE, kv_cache_dtype=cached) for cached in ("", "float16"))
    assert 2 * narrow.reports[0].kv_bytes_per_token == whole.reports[0].kv_bytes_per_token
    assert "cache=float16" in narrow.reports[0].kernels
    assert not [kernel for kernel in whole.reports[0].kernels if kernel.startswith("cache=")]


def test_a_type_that_a_rank_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    directory = save_tiny("llama-biased", tmp_path).directory
    with pytest.raises(
        ModelError,
        match=r"spec\.engine\.kvCacheDtype: float8 is not supported on pseudo GPU 0, which computes in float32",
    ):
        RankGroup(directory, ONE, num_gpu_ranks=1, kv_cache_dtype="float8")


def test_gpu_ranks_cache_and_compute_in_float16(checkpoint: TinyCheckpoint) -> None:
    def logits(**changes: Any) -> torch.Tensor:
        return logits_of(RankGroup(checkpoint.directory, ONE, num_gpu_ranks=1, **changes))

    whole = logits()
    scale = float(whole.abs().max())
    host = logits_of(RankGroup(checkpoint.directory, ONE, kv_cache_dtype="float16"))
    torch.testing.assert_close(logits(kv_cache_dtype="float16"), host, rtol=1e-3, atol=1e-3 * scale)
    found = logits(dtype="float16")
    assert 0 < float((found - whole).abs().max()) < 0.02 * scale
