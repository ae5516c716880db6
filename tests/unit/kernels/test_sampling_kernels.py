"""Triton's draws against numpy's noise and the host's tokens, in Triton's interpreter."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from hetero_worker.kernels.sampling import TritonDrawKernels, upper_noise
from hetero_worker.sampling import noise
from hetero_worker.sampling.device_draws import slack
from hetero_worker.sampling.device_scores import Contest, TorchDrawKernels
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise
from hetero_worker.sampling.request import SamplingRow
from tests.support.sampling_paths import device_drawing, drawn_by
from tests.support.sampling_reference import sample_on

pytestmark = pytest.mark.unit


class _OneAtATime(TritonDrawKernels):
    """Ranks are threads here, and the interpreter is one thread's."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def contest(self, *args: Any) -> Contest:
        with self._turn:
            return super().contest(*args)

    def words_at(self, *args: Any) -> torch.Tensor:
        with self._turn:
            return super().words_at(*args)


KEYS = [NoiseKey(2**64 - 1, 3), NoiseKey(0, 0), NoiseKey(7, 2**40 + 5)]


def _bits(keys: list[NoiseKey]) -> torch.Tensor:
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


def _row(seed: int, **fields: Any) -> SamplingRow:
    defaults = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "position": seed % 97}
    return SamplingRow(**{**defaults, "seed": seed, **fields})


def test_words_are_numpys_to_the_bit() -> None:
    ids = torch.tensor([[0, 1, 7, 8, 150_000], [2**31, 5, 4, 3, 2], [9, 9, 63, 64, 65]])
    words = TritonDrawKernels().words_at(_bits(KEYS), ids)
    for key, own, drawn in zip(KEYS, ids.tolist(), words.tolist(), strict=True):
        assert drawn == [int(noise._draw_words(key, each, 1)[0]) for each in own]


@pytest.mark.parametrize(("begin", "count"), [(0, 1), (3, 6), (64, 200), (129, 2100), (1, 4096)])
def test_a_contest_finds_the_best_score_and_bounds_the_others(begin: int, count: int) -> None:
    logits = torch.randn(5, count, generator=torch.Generator().manual_seed(count)) * 3
    rows, temperatures = torch.tensor([4, 0, 2]), torch.tensor([0.3, 1.0, 2.5])
    scores = gumbel_noise(KEYS, begin=begin, count=count) + logits[rows] / temperatures[:, None]
    for kernels in (TritonDrawKernels(), TorchDrawKernels(chunk_elements=count)):
        ids, rivals = kernels.contest(logits, rows, _bits(KEYS), temperatures, begin)
        assert ids.tolist() == (scores.argmax(dim=1) + begin).tolist()
        others = scores.scatter(1, ids[:, None] - begin, -torch.inf).amax(dim=1).numpy()
        none, bounds = others == -np.inf, rivals.numpy()
        assert (bounds[none] == -np.inf).all()
        assert (np.abs(bounds[~none] - others[~none]) <= slack(others[~none])).all()


@pytest.mark.parametrize("words", [[0, 1, 255, 256, 257], [2**32 - 1, 2**32 - 256, 2**31, 2**28, 2**28 - 1]])
def test_noise_is_the_hosts_within_half_the_slack_and_of_coarse_words_never_less(words: list[int]) -> None:
    """Every word in turn is the best of a row's: what a contest says of it must bound what it is on the host."""
    exact = noise.gumbel_of_words([NoiseKey(1, 1)], np.arange(len(words))[None], np.array([words], dtype=np.int64))[0]
    upper = _upper_noise_of(words)
    coarse = np.array(words) < noise.COARSE
    assert (upper[coarse] >= exact[coarse]).all()
    np.testing.assert_array_less(np.abs(upper - exact)[~coarse], slack(exact[~coarse].astype(np.float64)) / 2)


def test_a_row_is_contested_alike_in_any_batch() -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2))
    keys, temperatures = _bits([NoiseKey(i, i) for i in range(4)]), torch.full((4,), 0.9)
    kernels = TritonDrawKernels()
    ids, rivals = kernels.contest(logits, torch.arange(4), keys, temperatures, 40)
    for i in range(4):
        alone = kernels.contest(logits, torch.tensor([i]), keys[i : i + 1], temperatures[i : i + 1], 40)
        assert (alone.ids.item(), alone.rivals.item()) == (ids[i].item(), rivals[i].item())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_never_a_proof(bad: float) -> None:
    logits = torch.zeros(1, 500)
    logits[0, 333] = bad
    for kernels in (TritonDrawKernels(), TorchDrawKernels()):
        ids, _ = kernels.contest(logits, torch.tensor([0]), _bits(KEYS[:1]), torch.ones(1), 0)
        assert ids.tolist() == [333]


def test_tokens_are_the_hosts_on_every_layout() -> None:
    logits = torch.randn(12, 1100, generator=torch.Generator().manual_seed(5)) * 2
    rows = [
        *(_row(i) for i in range(6)),
        *(_row(i, top_p=0.9) for i in range(2)),
        *(_row(i, top_k=7) for i in range(2)),
        _row(3, min_p=0.1),
        _row(4, temperature=0.0),
    ]
    expected = sample_on(logits, rows).tokens
    with drawn_by(device_drawing(_OneAtATime())):
        for counts in ((), (700, 400), (64, 0, 1036)):
            assert sample_on(logits, rows, counts).tokens == expected


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(words, out, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, block_size)
    tl.store(out + places, upper_noise(tl.load(words + places).to(tl.uint64)))


def _upper_noise_of(words: list[int]) -> npt.NDArray[np.float32]:
    """By the kernel's own function."""
    size = triton.next_power_of_2(len(words))
    padded, out = torch.tensor([*words, *[1 << 20] * (size - len(words))]), torch.empty(size)
    _noise_kernel[(1,)](padded, out, block_size=size)
    return np.asarray(out.numpy()[: len(words)])
