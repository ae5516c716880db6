"""Devices make keys and values of long spans again of what latent attention caches: when, and with the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hetero_api.model_parts import LatentShape
from hetero_api.rank_memory import EXPANDED_AT_ONCE
from hetero_worker.attention import base
from hetero_worker.attention.base import AttentionBatch, DecodeRows, LatentExpansion, PrefillSpan
from hetero_worker.layers.latent_attention import LatentAttention
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
DEEPSEEK = LatentShape(512, query_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)
LAYOUTS = {
    "one GPU": (Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(VOCAB_SIZE,), experts=((6,),)), 1),
    "two GPUs and a CPU": (
        Shares(kv_heads=((5, 3, 0),), mlp_columns=((30, 20, 0),), vocab_rows=(VOCAB_SIZE, 0, 0), experts=((1, 1, 4),)),
        2,
    ),
}


def split_of(*spans: tuple[int, int], expansion: LatentExpansion | None = None) -> tuple[int, int]:
    """How many spans of (tokens before, rows) stay, and are expanded."""
    made, begin = [], 2
    for num_computed, rows in spans:
        made.append(PrefillSpan(begin, begin + rows, num_computed, np.zeros(0, dtype=np.int32)))
        begin += rows
    decode = DecodeRows(np.full(2, 7, dtype=np.int32), np.zeros((2, 1), dtype=np.int32))
    batch = AttentionBatch(torch.zeros(begin, dtype=torch.int64), decode, tuple(made))
    kept, expanded = (expansion or LatentExpansion(DEEPSEEK)).split(batch)
    assert (*kept.prefills, *expanded) == batch.prefills
    assert kept.decode is decode
    return len(kept.prefills), len(expanded)


def test_a_span_is_expanded_where_that_takes_fewer_products() -> None:
    assert split_of() == (0, 0)
    assert split_of((0, 64)) == (0, 1)
    assert split_of((0, 63)) == (1, 0)
    # Behind a long prefix each token is expanded for few rows: 131,072 products of a head against 768 saved a pair.
    assert split_of((100_000, 170)) == (1, 0)
    assert split_of((100_000, 171)) == (0, 1)


def test_the_last_spans_are_expanded_from_the_first_on_for_which_it_pays() -> None:
    assert split_of((0, 5), (0, 300), (9, 2)) == (1, 2)
    too_long = EXPANDED_AT_ONCE // DEEPSEEK.expanded_elements + 1
    assert split_of((0, 300), (too_long - 300, 300), (0, 200), (0, 5)) == (2, 2)
    assert split_of((too_long - 300, 300)) == (1, 0)
    assert split_of((too_long - 301, 300)) == (0, 1)


@pytest.fixture(scope="module", params=["deepseek-v3", "glm4-moe-lite-direct"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at_once", [1 << 27, 20_000], ids=["all heads", "some heads at a time"])
@pytest.mark.parametrize("dtype", ["", "float16"], ids=["cache", "float16 cache"])
def test_logits_are_those_of_the_whole(
    checkpoint: TinyCheckpoint, layout: str, at_once: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in pieces, beside rows that decode and a second prompt; every expanded span is seen."""
    monkeypatch.setattr(base, "EXPANDED_AT_ONCE", at_once)
    monkeypatch.setattr(LatentExpansion, "_pays", lambda *_: True)  # these shapes are too small for it
    spans: list[tuple[int, int]] = []
    attend = LatentAttention._attend_expanded

    def seen(self: LatentAttention, query: torch.Tensor, span: PrefillSpan, *rest: object) -> None:
        spans.append((span.num_computed, span.end - span.begin))
        attend(self, query, span, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LatentAttention, "_attend_expanded", seen)
    shares, num_gpu_ranks = LAYOUTS[layout]
    group = RankGroup(checkpoint.directory, shares, num_gpu_ranks=num_gpu_ranks, kv_cache_dtype=dtype)
    builder = PlanBuilder(group)
    for slot, length in ((0, 43), (1, 23)):
        builder.start(slot, [(slot * 37 + i * i * 11 + i) % VOCAB_SIZE for i in range(length)])
    for counts in ((23, None), (11, None), (7, None), (1, None), (None, None)):
        for slot in (1, 0):
            builder.schedule(slot, counts[slot])
        outcome = builder.run()
        for row, (slot, _) in enumerate(outcome.sampled):
            expected = checkpoint.logits(builder.sequences[slot].tokens[:-1])[-1]
            difference = (outcome.logits[row] - expected).abs().max()
            assert difference <= (0.02 if dtype else TOLERANCE)
    assert {(0, 23), (23, 11), (34, 7), (41, 1)} <= set(spans)


def test_invariant_rows_and_host_cores_do_not_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentAttention, "_attend_expanded", None)
    directory = save_tiny("deepseek-v3", tmp_path, num_hidden_layers=2).directory
    shares, _ = LAYOUTS["one GPU"]
    for num_gpu_ranks, native, invariant in ((1, True, True), (0, True, False), (0, False, False)):
        group = RankGroup(directory, shares, num_gpu_ranks=num_gpu_ranks, native=native, batch_invariant=invariant)
        builder = PlanBuilder(group)
        builder.start(0, list(range(40)))
        builder.schedule(0)
        builder.run()
