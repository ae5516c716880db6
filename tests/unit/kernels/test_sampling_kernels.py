"""Triton's noise and draws against numpy's noise and the host's tokens, in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from hetero_worker.kernels.sampling import TritonSamplingKernels, gumbel_noise
from hetero_worker.sampling import noise
from hetero_worker.sampling.device_kernels import Best, TorchSamplingKernels
from hetero_worker.sampling.noise import NoiseKey
from hetero_worker.sampling.request import SamplingRow
from tests.support.sampling_paths import device_sampler, sampled_by
from tests.support.sampling_reference import sample_on
from tests.support.seeded import seeded

pytestmark = pytest.mark.unit


class _OneAtATime(TritonSamplingKernels):
    """Ranks are threads here, and the interpreter is one thread's."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def noisy_best(self, *args: Any) -> Best:
        with self._turn:
            return super().noisy_best(*args)


KEYS = [NoiseKey(2**64 - 1, 3), NoiseKey(0, 0), NoiseKey(7, 2**40 + 5)]


def keys_of(keys: Sequence[NoiseKey]) -> torch.Tensor:
    return noise.key_tensor(keys).to(torch.get_default_device())


def _row(seed: int, **fields: Any) -> SamplingRow:
    defaults = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "position": seed % 97}
    return SamplingRow(**{**defaults, "seed": seed, **fields})


@pytest.mark.parametrize(("begin", "count"), [(0, 1), (3, 6), (64, 200), (129, 2100), (1, 4096)])
def test_the_best_of_each_row_is_found(begin: int, count: int) -> None:
    logits = torch.randn(5, count, generator=seeded(count)) * 3
    rows, temperatures = torch.tensor([4, 0, 2]), torch.tensor([0.3, 1.0, 2.5])
    scores = noise.gumbel_noise(KEYS, begin=begin, count=count).to(logits.device) + logits[rows] / temperatures[:, None]
    for kernels in (TritonSamplingKernels(), TorchSamplingKernels(chunk_elements=count)):
        best = kernels.noisy_best(logits, rows, keys_of(KEYS), temperatures, begin)
        assert best.ids.tolist() == (scores.argmax(dim=1) + begin).tolist()
        np.testing.assert_allclose(best.scores.cpu().numpy(), scores.amax(dim=1).cpu().numpy(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("words", [[0, 1, 255, 256, 257], [2**32 - 1, 2**32 - 256, 2**31, 2**28, 2**28 - 1]])
def test_noise_of_extreme_words_has_their_fractions(words: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    key, drawn = NoiseKey(11, 12), np.array(words, dtype=np.uint32)
    monkeypatch.setattr(noise, "_draw_words", lambda key, begin, count: drawn)
    exact = noise.gumbel_noise([key], begin=40, count=len(words))[0].numpy()
    size = triton.next_power_of_2(len(words))
    padded, out = torch.tensor([*words, *[1 << 20] * (size - len(words))]), torch.empty(size)
    _noise_kernel[(1,)](padded, keys_of([key]), out, 40, block_size=size)
    np.testing.assert_allclose(out.cpu().numpy()[: len(words)], exact, rtol=2e-6, atol=1e-6)


def test_a_row_is_drawn_from_alike_in_any_batch() -> None:
    logits = torch.randn(4, 3000, generator=seeded(2))
    keys, temperatures = keys_of([NoiseKey(i, i) for i in range(4)]), torch.full((4,), 0.9)
    kernels = TritonSamplingKernels()
    scores, ids = kernels.noisy_best(logits, torch.arange(4), keys, temperatures, 40)
    for i in range(4):
        alone = kernels.noisy_best(logits, torch.tensor([i]), keys[i : i + 1], temperatures[i : i + 1], 40)
        assert (alone.scores.item(), alone.ids.item()) == (scores[i].item(), ids[i].item())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_win_and_their_score_shows_it(bad: float) -> None:
    logits = torch.zeros(1, 500)
    logits[0, 333] = bad
    for kernels in (TritonSamplingKernels(), TorchSamplingKernels()):
        scores, ids = kernels.noisy_best(logits, torch.tensor([0]), keys_of(KEYS[:1]), torch.ones(1), 0)
        assert ids.tolist() == [333]
        assert not scores.isfinite().any()


@pytest.mark.parametrize(("begin", "count"), [(0, 5), (3, 6), (129, 2100)])
def test_a_row_without_a_token_has_no_score_and_an_id_of_the_shard(begin: int, count: int) -> None:
    logits = torch.full((1, count), -torch.inf)
    for kernels in (TritonSamplingKernels(), TorchSamplingKernels()):
        scores, ids = kernels.noisy_best(logits, torch.tensor([0]), keys_of(KEYS[:1]), torch.ones(1), begin)
        assert scores.tolist() == [-np.inf]
        assert begin <= ids.item() < begin + count


def test_tokens_are_the_hosts_on_every_layout() -> None:
    logits = torch.randn(12, 1100, generator=seeded(5)) * 2
    rows = [
        *(_row(i) for i in range(6)),
        *(_row(i, top_p=0.9) for i in range(2)),
        *(_row(i, top_k=7) for i in range(2)),
        _row(3, min_p=0.1),
        _row(4, temperature=0.0),
    ]
    expected = sample_on(logits, rows).tokens
    with sampled_by(device_sampler(_OneAtATime())):
        for counts in ((), (700, 400), (64, 0, 1036)):
            assert sample_on(logits, rows, counts).tokens == expected


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(words, keys, out, begin, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, block_size)
    seed = tl.load(keys).to(tl.uint64, bitcast=True)
    position = tl.load(keys + 1).to(tl.uint64, bitcast=True)
    tl.store(out + places, gumbel_noise(tl.load(words + places).to(tl.uint64), places + begin, seed, position))
