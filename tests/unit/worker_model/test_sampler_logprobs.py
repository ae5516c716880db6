"""Log-probabilities are log_softmax of the whole vocabulary, on every layout, and cost nothing unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from hetero_api.errors import ModelError
from hetero_api.sharding import ranges_of_counts
from hetero_api.v1 import logprobs_pb2
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.sampler import SampledRows, prompt_logprobs, sample_tokens
from hetero_worker.sampling.request import SamplingRow, SequenceSampling
from tests.support.sampling_checks import LAYOUTS, check_logprobs
from tests.support.sampling_reference import sample_on, sampling_of
from tests.support.thread_exchange import ThreadExchange, run_ranks, thread_exchanges

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("both_paths")]


@pytest.mark.parametrize("counts", LAYOUTS, ids=str)
def test_logprobs_are_those_of_the_whole_vocabulary(counts: tuple[int, ...]) -> None:
    check_logprobs(counts)


@pytest.mark.parametrize("spread", [1e-3, 30.0, 1e4])
def test_extreme_logits_give_exact_logprobs(spread: float) -> None:
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(2)) * spread
    row = SequenceSampling(sampling_of(num_logprobs=3), [1]).draw()
    told = sample_on(logits, [row], (200, 400)).logprobs[0]
    assert told is not None
    whole = torch.log_softmax(logits[0].double(), dim=0)
    assert told.logprob == pytest.approx(float(whole[told.token_id]), rel=1e-6, abs=1e-5)
    assert list(told.top_token_ids) == torch.argsort(logits[0], descending=True)[:3].tolist()


def test_a_rank_counts_equal_tokens_of_lower_ids_in_other_shards() -> None:
    logits = torch.zeros(1, 12)
    for token_id in range(12):
        told = [
            prompt_logprobs(logits, [token_id], 2, head_ranges=ranges_of_counts([12]), exchange=LocalExchange()),
            _on_three_ranks(logits, [token_id]),
        ]
        assert [(t.rank, list(t.top_token_ids)) for [t] in told] == [(token_id + 1, [0, 1])] * 2


def test_rounds_are_spent_only_on_steps_that_ask() -> None:
    logits, rounds = torch.zeros(2, 12), []
    for num_logprobs in (None, 0):
        exchanges = thread_exchanges(2)
        asking = sampling_of() if num_logprobs is None else sampling_of(num_logprobs=num_logprobs)
        rows = [SequenceSampling(sampling, [1]).draw() for sampling in (sampling_of(), asking)]

        first, second = run_ranks(exchanges, partial(_sample_part, logits, rows, exchanges))
        assert [told is None for told in first.logprobs] == [True, num_logprobs is None]
        assert second.logprobs == [None, None]
        rounds.append(exchanges[0].rounds)
    assert rounds == [2, 4]


def test_no_tokens_take_no_round() -> None:
    exchange = thread_exchanges(2)[0]
    ranges = ranges_of_counts((5, 7))
    assert prompt_logprobs(torch.zeros(0, 5), [], 2, head_ranges=ranges, exchange=exchange) == []
    assert sample_tokens(torch.zeros(0, 5), [], head_ranges=ranges, exchange=exchange) == SampledRows([], [])
    assert exchange.rounds == 0


def test_prompts_of_logits_that_are_not_finite_are_refused() -> None:
    logits = torch.zeros(1, 12)
    logits[0, 3] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        prompt_logprobs(logits, [5], 2, head_ranges=ranges_of_counts([12]), exchange=LocalExchange())


def _sample_part(
    logits: torch.Tensor, rows: Sequence[SamplingRow], exchanges: Sequence[ThreadExchange], rank: int
) -> SampledRows:
    ranges = ranges_of_counts((5, 7))
    shard = logits[:, ranges[rank].begin : ranges[rank].end]
    return sample_tokens(shard, rows, head_ranges=ranges, exchange=exchanges[rank])


def _on_three_ranks(logits: torch.Tensor, targets: list[int]) -> list[logprobs_pb2.TokenLogprobs]:
    ranges, exchanges = ranges_of_counts((4, 1, 7)), thread_exchanges(3)

    def body(rank: int) -> list[logprobs_pb2.TokenLogprobs]:
        shard = logits[:, ranges[rank].begin : ranges[rank].end]
        return prompt_logprobs(shard, targets, 2, head_ranges=ranges, exchange=exchanges[rank])

    return run_ranks(exchanges, body)[0]
