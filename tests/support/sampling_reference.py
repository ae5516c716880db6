"""Sampling with the whole vocabulary in one place, written from the definitions: what shards must agree with.

A `Draw` is everything that one token may depend on. `reference_token` edits, scales, filters and adds noise to dense
arrays; `reference_distribution` says how likely each token is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetero_api.sharding import ranges_of_counts
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.layers.sampler import SampledRows, sample_tokens
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise
from hetero_worker.sampling.request import GREEDY_TEMPERATURE, SamplingRow, SequenceSampling
from tests.support.thread_exchange import run_ranks, thread_exchanges

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw."""

    logits: Float32Array
    sampling: ranks_pb2.Sampling
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    mask: bytes | None = None

    @property
    def row(self) -> SamplingRow:
        return SequenceSampling(self.sampling, self.prompt, self.output).draw(self.mask)


def sampling_of(**fields: Any) -> ranks_pb2.Sampling:
    """Sampling with the defaults of requests, where protobuf's differ."""
    return ranks_pb2.Sampling(**{"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 1, **fields})


def mask_of(allowed: Sequence[int], vocabulary: int) -> bytes:
    """A mask that allows these tokens."""
    bits = np.zeros(vocabulary, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def sample_on(logits: torch.Tensor, rows: Sequence[SamplingRow], counts: Sequence[int] = ()) -> SampledRows:
    """Rank 0's outcome with the vocabulary split as `counts` says (whole by default); all ranks must agree."""
    ranges, exchanges = ranges_of_counts(counts or [logits.shape[1]]), thread_exchanges(len(counts or [0]))

    def body(rank: int) -> SampledRows:
        shard = logits[:, ranges[rank].begin : ranges[rank].end]
        exchange = exchanges[rank] if counts else LocalExchange()
        return sample_tokens(shard, rows, head_ranges=ranges, exchange=exchange)

    results = run_ranks(exchanges, body)
    assert all(result.tokens == results[0].tokens for result in results)
    return results[0]


def tokens_on(draws: Sequence[Draw], counts: Sequence[int] = ()) -> list[int]:
    """Tokens of a batch of draws, the vocabulary split as `counts` says."""
    logits = torch.from_numpy(np.stack([draw.logits for draw in draws]))
    return sample_on(logits, [draw.row for draw in draws], counts).tokens


def reference_logits(draw: Draw) -> Float32Array:
    """After bias, penalties, min_tokens and mask."""
    sampling, logits = draw.sampling, draw.logits.copy()
    for token_id, bias in zip(sampling.bias_token_ids, sampling.biases, strict=True):
        logits[token_id] += np.float32(bias)
    for token_id in {*draw.prompt, *draw.output}:
        factor = np.float32(sampling.repetition_penalty)
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id in set(draw.output):
        logits[token_id] -= np.float32(sampling.frequency_penalty) * np.float32(draw.output.count(token_id))
        logits[token_id] -= np.float32(sampling.presence_penalty)
    if len(draw.output) < sampling.min_tokens:
        logits[list(sampling.end_token_ids)] = -np.inf
    if draw.mask is not None:
        allowed = [draw.mask[token_id // 8] >> token_id % 8 & 1 for token_id in range(len(logits))]
        logits[np.array(allowed) == 0] = -np.inf
    return logits


def reference_distribution(draw: Draw) -> Float64Array:
    """Probability of each token: cut, renormalise, cut again. Of equal tokens at an edge the lowest ids stay."""
    sampling = draw.sampling
    scaled = reference_logits(draw) / np.float32(sampling.temperature)
    p = np.exp(scaled.astype(np.float64) - scaled.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -scaled))
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
        p /= p.sum()
    if 0 < sampling.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
        p /= p.sum()
    p[p < sampling.min_p * p.max()] = 0
    result: Float64Array = p / p.sum()
    return result


def reference_token(draw: Draw) -> int:
    """The draw by Gumbel-max over the dense, filtered logits; the likeliest token when greedy."""
    sampling, logits = draw.sampling, reference_logits(draw)
    if sampling.temperature < GREEDY_TEMPERATURE:
        return int(logits.argmax())
    key = NoiseKey(sampling.seed, len(draw.prompt) + len(draw.output))
    scores = logits / np.float32(sampling.temperature) + gumbel_noise([key], begin=0, count=len(logits))[0].numpy()
    scores[reference_distribution(draw) == 0] = -np.inf
    return int(scores.argmax())


def random_draw(seed: int, *, vocabulary: int) -> Draw:
    """A draw of random logits, parameters and history; what it is depends on the arguments only."""
    choose = random.Random(seed)
    logits = np.random.default_rng(seed).normal(0, choose.choice([0.3, 2.0, 5.0]), vocabulary)
    token_ids = choose.sample(range(vocabulary), 12)
    chosen = sampling_of(
        temperature=choose.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=choose.choice([0, 0, 1, 20, 300]),
        top_p=choose.choice([1.0, 1.0, 0.6, 0.95, 0.999]),
        min_p=choose.choice([0.0, 0.0, 0.02, 0.3]),
        seed=choose.getrandbits(64),
        presence_penalty=choose.choice([0.0, 0.7, -0.5]),
        frequency_penalty=choose.choice([0.0, 0.4, -0.2]),
        repetition_penalty=choose.choice([1.0, 1.3, 0.8]),
        min_tokens=choose.choice([0, 3, 50]),
        end_token_ids=token_ids[:2],
        bias_token_ids=token_ids[2:4],
        biases=[choose.uniform(-9, 9), choose.uniform(-9, 9)],
    )
    if choose.random() < 0.3:
        chosen = sampling_of(temperature=0.9, seed=choose.getrandbits(64))
    allowed = choose.sample(range(vocabulary), choose.choice([20, vocabulary // 2]))
    return Draw(
        logits.astype(np.float32),
        chosen,
        prompt=tuple(choose.choices(token_ids[4:], k=9)),
        output=tuple(choose.choices(token_ids, k=choose.choice([0, 1, 30]))),
        mask=mask_of([*allowed, token_ids[5]], vocabulary) if choose.random() < 0.3 else None,
    )
