"""What sampling promises, as checks: tests run them on the product, and on mutants of it, which must fail them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from hetero_api.sharding import ranges_of_counts
from hetero_api.v1 import logprobs_pb2
from hetero_worker.layers.sampler import prompt_logprobs
from hetero_worker.sampling.request import SequenceSampling
from tests.support.sampling_reference import (
    Draw,
    random_draw,
    reference_distribution,
    reference_token,
    sample_on,
    sampling_of,
    tokens_on,
)
from tests.support.thread_exchange import run_ranks, thread_exchanges

VOCABULARY = 512
LAYOUTS: tuple[tuple[int, ...], ...] = (
    (),
    (300, 212),
    (0, 512),
    (64, 0, 448),
    (100, 311, 101),
    (128, 128, 128, 128),
    (509, 1, 1, 1),
)
"""Whole, uneven, with ranks that hold nothing, one or four."""


def check_identity(draws: Sequence[Draw]) -> None:
    """The same tokens alone, in a batch, in another order, on any layout; and they are the reference's."""
    alone = [tokens_on([draw])[0] for draw in draws]
    assert alone == list(map(reference_token, draws)), "a draw differs from the reference"
    backwards = list(reversed(draws))
    for counts in LAYOUTS:
        assert tokens_on(draws, counts) == alone, f"tokens differ on {counts}"
        assert tokens_on(backwards, counts) == alone[::-1], f"tokens depend on the batch's order on {counts}"
        assert tokens_on(draws[1::3], counts) == alone[1::3], f"tokens depend on the batch on {counts}"


def check_distribution(draw: Draw, counts: Sequence[int], *, positions: int) -> None:
    """Chi-square of the tokens at many positions, after the same history; rarer tokens share a class."""
    logits = torch.from_numpy(draw.logits).expand(positions, -1)
    row = draw.row
    tokens = sample_on(logits, [row._replace(position=i) for i in range(positions)], counts).tokens
    expected = positions * reference_distribution(draw)
    observed = np.bincount(tokens, minlength=len(expected))
    assert not observed[expected == 0].any(), "a token was drawn that is filtered out"
    often = expected >= 8
    classes = [*zip(observed[often], expected[often], strict=True)]
    if expected[~often].sum() >= 1:
        classes.append((observed[~often].sum(), expected[~often].sum()))
    statistic = sum((seen - due) ** 2 / due for seen, due in classes)
    assert statistic < _chi_square_bound(len(classes) - 1), f"chi-square {statistic:.1f} of {len(classes)} classes"


def check_generation(draws: Sequence[Draw], counts: Sequence[int], *, steps: int = 6) -> None:
    """Tokens that follow one another are the reference's, whether histories are kept or made anew (a preemption)."""
    kept, anew = (_generate(draws, counts, steps, remake=remake) for remake in (False, True))
    assert kept == anew, "a draw after a preemption differs"
    for tokens, draw in zip(kept, draws, strict=True):
        for step in range(steps):
            known = dataclasses.replace(draw, output=(*draw.output, *tokens[:step]))
            assert tokens[step] == reference_token(known), f"step {step} differs from the reference"


def check_logprobs(counts: Sequence[int]) -> None:
    """Of sampled and of given tokens: log_softmax of the whole, whatever the sampling edits."""
    draws = [random_draw(seed, vocabulary=VOCABULARY) for seed in range(24)]
    for i, draw in enumerate(draws[:20]):
        draw.sampling.num_logprobs = (0, 1, 5, 300)[i % 4]
    logits = torch.from_numpy(np.stack([draw.logits for draw in draws]))
    logits[5, 100:300] = logits[5].max()
    sampled = logits.clone()
    drawn = sample_on(sampled, [draw.row for draw in draws], counts)
    assert torch.equal(sampled, logits), "sampling changed the logits"
    assert drawn.logprobs[20:] == [None] * 4, "log-probabilities that nobody asked for"
    for i, told in enumerate(drawn.logprobs[:20]):
        assert told is not None, "no log-probabilities of a draw that asks for them"
        _check_told(told, logits[i], drawn.tokens[i], draws[i].sampling.num_logprobs)
    targets = [(7 * i) % VOCABULARY for i in range(len(draws))]
    for i, told in enumerate(_prompt_logprobs(logits, targets, 4, counts)):
        _check_told(told, logits[i], targets[i], 4)


def check_wide_nuclei() -> None:
    """Filters that end beyond the candidates, over thousands of nearly equal tokens with and without edits."""
    filters: list[dict[str, float]] = [
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 1e-6},
        {"top_p": 0.99, "min_p": 0.3},
        {"top_k": 700, "top_p": 0.9},
        {"top_p": 0.8, "repetition_penalty": 0.1, "frequency_penalty": -2.0},
    ]
    logits = np.random.default_rng(5).normal(0, 0.2, (30, 2048)).astype(np.float32)
    logits[::2, 600:] -= 2.0
    history = tuple(range(0, 2048, 50))
    draws = [Draw(row, sampling_of(seed=i, **filters[i % 6]), output=history) for i, row in enumerate(logits)]
    expected = list(map(reference_token, draws))
    for counts in ((), (704, 1344), (600, 1448), (1024, 0, 1024)):
        assert tokens_on(draws, counts) == expected, f"tokens differ on {counts}"


def check_masked_sampling() -> None:
    """No token that a mask or min_tokens rules out is drawn, on any layout, greedy or not."""
    logits = np.random.default_rng(3).normal(0, 2, VOCABULARY).astype(np.float32)
    for temperature in (0.0, 1.0):
        sampling = sampling_of(temperature=temperature, top_p=0.9, min_tokens=4, end_token_ids=[7, 300])
        mask = np.zeros(VOCABULARY, dtype=np.uint8)
        mask[[7, 13, 211, 300, 511]] = 1
        packed = np.packbits(mask, bitorder="little").tobytes()
        draws = [Draw(logits, sampling, prompt=(1,) * n, mask=packed) for n in range(1, 40)]
        for counts in LAYOUTS:
            tokens = tokens_on(draws, counts)
            assert tokens == list(map(reference_token, draws))
            assert set(tokens) <= {13, 211, 511}


def _generate(draws: Sequence[Draw], counts: Sequence[int], steps: int, *, remake: bool) -> list[list[int]]:
    """Tokens of each sequence; its logits stay as they are, its history grows."""
    logits = torch.from_numpy(np.stack([draw.logits for draw in draws]))
    kept = [SequenceSampling(draw.sampling, draw.prompt, draw.output) for draw in draws]
    tokens: list[list[int]] = [[] for _ in draws]
    for _ in range(steps):
        if remake:
            kept = [
                SequenceSampling(draw.sampling, draw.prompt, (*draw.output, *known))
                for draw, known in zip(draws, tokens, strict=True)
            ]
        rows = [sequence.draw(draw.mask) for sequence, draw in zip(kept, draws, strict=True)]
        for i, token_id in enumerate(sample_on(logits, rows, counts).tokens):
            tokens[i].append(token_id)
            kept[i].append(token_id)
    return tokens


def _prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], num_top: int, counts: Sequence[int]
) -> list[logprobs_pb2.TokenLogprobs]:
    ranges, exchanges = ranges_of_counts(counts or [logits.shape[1]]), thread_exchanges(len(counts or [0]))

    def body(rank: int) -> list[logprobs_pb2.TokenLogprobs]:
        shard = logits[:, ranges[rank].begin : ranges[rank].end]
        return prompt_logprobs(shard, targets, num_top, head_ranges=ranges, exchange=exchanges[rank])

    told, *others = run_ranks(exchanges, body)
    assert others == [[]] * len(others)
    assert len(told) == len(targets)
    return told


def _check_told(told: logprobs_pb2.TokenLogprobs, logits: torch.Tensor, token_id: int, num_top: int) -> None:
    whole = torch.log_softmax(logits.double(), dim=0).numpy()
    order = np.lexsort((np.arange(len(whole)), -logits.numpy())).tolist()
    assert told.token_id == token_id
    assert told.rank == 1 + order.index(token_id), f"token {token_id} has rank {1 + order.index(token_id)}"
    assert list(told.top_token_ids) == order[:num_top]
    np.testing.assert_allclose(told.logprob, whole[token_id], atol=1e-5)
    np.testing.assert_allclose(told.top_logprobs, whole[order[:num_top]], atol=1e-5)


def _chi_square_bound(degrees: int) -> float:
    """The 0.99999 quantile, by Wilson and Hilferty's approximation."""
    spread = 2 / (9 * max(degrees, 1))
    return float(max(degrees, 1) * (1 - spread + 4.265 * spread**0.5) ** 3)
