"""Draws follow the filtered softmax exactly, and depend on nothing but the request, its seed and its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hetero_api.errors import ModelError
from hetero_api.sharding import ranges_of_counts
from hetero_worker.layers import sampler
from hetero_worker.layers.sampler import sample_tokens
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise
from hetero_worker.sampling.request import SamplingRow
from tests.support.examples import examples
from tests.support.sampling_checks import check_wide_nuclei
from tests.support.sampling_reference import sample_on
from tests.support.thread_exchange import run_ranks, thread_exchanges

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("both_paths")]


def _row(**fields: Any) -> SamplingRow:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "position": 0}
    return SamplingRow(**{**defaults, **fields})


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow], counts: Sequence[int] = ()) -> list[int]:
    return sample_on(logits, rows, counts).tokens


def _by_transformers(logits: torch.Tensor, row: SamplingRow) -> int:
    """The Gumbel-max draw over what transformers' own filters leave of the whole vocabulary."""
    filters = LogitsProcessorList()
    if row.top_k:
        filters.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        filters.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        filters.append(MinPLogitsWarper(row.min_p))
    kept = filters(torch.LongTensor([[0]]), (logits / row.temperature)[None])[0]
    noise = gumbel_noise([NoiseKey(row.seed, row.position)], begin=0, count=len(logits))[0]
    return int((kept + noise).argmax())


LAYOUTS: list[tuple[int, ...]] = [(), (128, 64, 8, 0), (0, 200), (64, 136), (64, 64, 64, 8)]


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 200, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    layout=st.sampled_from(LAYOUTS),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_a_draw_equals_the_references_filters_on_any_layout(
    seed: int,
    position: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    layout: tuple[int, ...],
    spread: float,
) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(position % 1000)) * spread
    row = _row(seed=seed, position=position, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert _sample(logits, [row], layout) == [_by_transformers(logits[0], row)]


def test_wide_nuclei_are_exact() -> None:
    check_wide_nuclei()


@pytest.mark.parametrize("filters", [{"min_p": 0.5}, {"top_p": 0.7}], ids=str)
def test_a_shard_may_have_all_that_filters_leave(filters: dict[str, float]) -> None:
    logits = torch.randn(12, 1000, generator=torch.Generator().manual_seed(6)) * 0.1
    logits[:, 600:] -= 2.0
    rows = [_row(seed=3, position=i, **filters) for i in range(12)]
    assert _sample(logits, rows, (600, 400)) == [_by_transformers(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("counts", "num_filtered", "num_rounds"),
    [((512, 512), 0, 2), ((512, 512), 1, 3), ((512, 512), 2, 3), ((300, 724), 3, 4), ((512, 512), 5, 5),
     ((0, 1024), 5, 2), ((1024, 0), 5, 1)],
)  # fmt: skip
def test_whole_rows_of_a_shared_vocabulary_travel_for_draws_with_filters_some_at_a_time(
    counts: tuple[int, int], num_filtered: int, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "WHOLE_LOGITS", 2 * 1024)
    ranges, exchanges = ranges_of_counts(counts), thread_exchanges(2)
    logits = torch.randn(6, 1024, generator=torch.Generator().manual_seed(1))
    rows = [_row(position=i, top_p=0.9 if i < num_filtered else 1.0) for i in range(6)]

    def body(rank: int) -> list[int]:
        shard = logits[:, ranges[rank].begin : ranges[rank].end]
        return sample_tokens(shard, rows, head_ranges=ranges, exchange=exchanges[rank]).tokens

    tokens = run_ranks(exchanges, body)
    assert tokens == [[_by_transformers(logits[i], row) for i, row in enumerate(rows)]] * 2
    assert exchanges[0].rounds == num_rounds


def test_greedy_takes_the_lowest_id_of_equal_logits_on_any_layout() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [70, 130, 190]] = 5.0
    for layout in LAYOUTS:
        assert _sample(logits, [_row(temperature=0.0)], layout) == [70]


def test_equal_logits_at_the_edge_of_top_k_keep_the_lowest_ids() -> None:
    logits = torch.zeros(1, 1024)
    for layout in [(), (512, 512), (64, 960)]:
        tokens = {_sample(logits, [_row(top_k=3, position=i)], layout)[0] for i in range(60)}
        assert tokens == {0, 1, 2}


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(3)) * 30
    assert _sample(logits, [_row(temperature=1e-38, top_p=0.9)]) == [int(logits.argmax())]


def test_the_smallest_temperature_that_is_not_greedy_follows_the_logits() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(3)) * 30
    for layout in LAYOUTS:
        for filters in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
            assert _sample(logits, [_row(temperature=1e-5, **filters)], layout) == [int(logits.argmax())]


def test_a_huge_temperature_makes_all_tokens_equally_likely() -> None:
    logits = torch.tensor([[50.0, -50.0, 0.0, 3.0]]).expand(4000, -1)
    for filters in ({}, {"top_p": 0.999}):
        tokens = _sample(logits, [_row(temperature=1e30, position=i, **filters) for i in range(4000)], (1, 3))
        assert np.bincount(tokens) == pytest.approx(1000, abs=130)


def test_a_mixed_batch_draws_what_each_row_draws_alone() -> None:
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(4)) * 2
    rows = [
        _row(temperature=0.0),
        _row(seed=5),
        _row(seed=6, top_p=0.8),
        _row(seed=7, top_k=4, temperature=1.7),
        _row(seed=8, min_p=0.1),
    ]
    alone = [_sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    for layout in LAYOUTS:
        assert _sample(logits, rows, layout) == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [_row(temperature=0.0), _row(), _row(top_p=0.5)], ids=["greedy", "plain", "filtered"])
def test_logits_that_are_not_finite_are_refused(bad: float, row: SamplingRow) -> None:
    logits = torch.zeros(1, 200)
    logits[0, 17] = bad
    with pytest.raises(ModelError, match="not finite"):
        _sample(logits, [row])
