"""Draws on a device, played on the host's tensors: they are the host's, and only numbers of draws come to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_worker.distributed.exchange import Arrived
from hetero_worker.distributed.staging import HostCopy
from hetero_worker.memory.streams import HOST
from hetero_worker.sampling import device, device_edits, device_kernels, noise
from hetero_worker.sampling.base import HOST_SAMPLER, UnknownTokens
from hetero_worker.sampling.device import DeviceSampler
from hetero_worker.sampling.device_edits import edit_logits
from hetero_worker.sampling.device_kernels import TorchSamplingKernels, filter_logits, first_columns
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise, words_of_range
from hetero_worker.sampling.request import SamplingRow, SequenceSampling
from hetero_worker.sampling.shard import best_first
from tests.support.examples import examples
from tests.support.sampling_checks import VOCABULARY, check_identity
from tests.support.sampling_paths import device_sampler, sampled_by
from tests.support.sampling_reference import (
    Draw,
    random_draw,
    reference_distribution,
    reference_logits,
    reference_token,
    sample_on,
    sampling_of,
    tokens_on,
)

pytestmark = pytest.mark.unit

KEYS = [NoiseKey(2**64 - 1, 3), NoiseKey(0, 0), NoiseKey(7, 2**40 + 5)]


def _row(**fields: Any) -> SamplingRow:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "position": 0}
    return SamplingRow(**{**defaults, **fields})


def _bits(keys: list[NoiseKey]) -> torch.Tensor:
    return torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64))


class _Copies:
    """Copies to the host, by their shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def start(self, tensor: torch.Tensor) -> HostCopy:
        self.shapes.append(tuple(tensor.shape))
        return Arrived(tensor.clone())


def test_words_are_numpys_to_the_bit() -> None:
    for begin, count in ((0, 1), (3, 6), (63, 5), (64, 64), (2**31, 9)):
        words = words_of_range(_bits(KEYS), begin, count)
        assert words.tolist() == [noise._draw_words(key, begin, count).tolist() for key in KEYS]


@pytest.mark.parametrize("coarse", [256, 2**31])
def test_noise_by_torchs_operators_is_the_hosts_to_the_bit(coarse: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With coarse words, which have fractions, in one draw of hundreds and in every other row."""
    monkeypatch.setattr(noise, "COARSE", coarse)
    whole = gumbel_noise(KEYS, begin=40, count=150)
    assert torch.equal(noise.noise_of_range(_bits(KEYS), 40, 150), whole)


@settings(max_examples=examples(100))
@given(
    size=st.sampled_from([1, 2, 511, 1024, 5000]),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    levels=st.sampled_from([1, 2, 30, 10**6]),
    banned=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_candidates_come_in_the_one_order(size: int, share: float, levels: int, banned: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = (random.integers(0, levels, (2, size)) - levels / 2).astype(np.float32)
    values[random.random((2, size)) < 0.1] = -0.0
    values[random.random((2, size)) < banned] = -np.inf
    count = max(1, int(size * share))
    columns = first_columns(torch.from_numpy(values), count)
    np.testing.assert_array_equal(columns.numpy(), [best_first(row, count) for row in values])


def test_a_step_takes_one_copy_of_two_numbers_a_draw() -> None:
    logits = torch.randn(7, 2000, generator=torch.Generator().manual_seed(1)) * 3
    edited = random_draw(0, vocabulary=2000).row
    assert edited.edits is not None
    rows = [_row(temperature=0.0), _row(), _row(top_p=0.9), _row(top_k=1500), _row(min_p=0.1), _row(seed=9), edited]
    copies = _Copies()
    sampler = DeviceSampler(HOST, TorchSamplingKernels(), copies.start)
    sampler.start(rows, logits, 0, is_whole=True).read()
    sampler.start(rows[:3], logits[:3], 0).read()
    assert copies.shapes == [(7, 2), (3, 2)]


def test_sampling_leaves_the_logits_alone() -> None:
    logits = torch.randn(40, 512, generator=torch.Generator().manual_seed(1))
    kept = logits.clone()
    rows = [random_draw(seed, vocabulary=512).row for seed in range(40)]
    for is_whole in (False, True):
        device_sampler().start(rows, logits, 0, is_whole=is_whole).read()
        assert torch.equal(logits, kept)


def test_tokens_stay_on_the_device_only_where_it_decides() -> None:
    rows = [random_draw(seed, vocabulary=512).row for seed in range(40)]
    logits = torch.from_numpy(np.stack([random_draw(seed, vocabulary=512).logits for seed in range(40)]))
    started = device_sampler().start(rows, logits, 0, is_whole=True)
    assert started.token_ids is not None
    assert started.token_ids.tolist() == sample_on(logits, rows).tokens
    assert device_sampler().start(rows, logits, 0).token_ids is None
    assert HOST_SAMPLER.start(rows, logits, 0).token_ids is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_on_the_device_is_a_row_of_the_vocabulary_whatever_the_logits_are(value: float) -> None:
    rows = [_row(), _row(temperature=0.0), _row(top_p=0.9), _row(top_k=5, min_p=0.2)]
    for logits in (torch.full((4, 300), value), torch.randn(4, 300).index_fill(1, torch.tensor([7, 200]), value)):
        ids = device_sampler().start(rows, logits, 0, is_whole=True).token_ids
        assert ids is not None
        assert 0 <= int(ids.min()) <= int(ids.max()) < 300


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), spread=st.sampled_from([0.3, 3.0]))
def test_filters_of_all_rows_keep_what_the_definition_keeps(seed: int, rows: int, spread: float) -> None:
    """Of equal tokens at an edge the lowest ids stay."""
    random = np.random.default_rng(seed)
    draws = [_unedited(int(random.integers(10**9))) for _ in range(rows)]
    for draw in draws:
        draw.sampling.temperature = max(draw.sampling.temperature, 0.8)  # else the definition underflows
        draw.logits[:] = np.round(draw.logits * spread)
    scaled = torch.from_numpy(np.stack([draw.logits / np.float32(draw.sampling.temperature) for draw in draws]))
    filter_logits(scaled, [draw.row for draw in draws])
    kept = (scaled > -torch.inf).numpy()
    np.testing.assert_array_equal(kept, np.stack([reference_distribution(draw) > 0 for draw in draws]))


def test_a_device_draws_what_the_host_draws_in_any_batch_and_layout() -> None:
    with sampled_by(device_sampler()):
        check_identity(DRAWS["unedited"])
        check_identity(DRAWS["any"])


@pytest.mark.parametrize("last", [5, 8, 300, 11])
def test_penalties_count_a_token_that_only_the_device_knows(last: int) -> None:
    """One that was drawn before, one of the prompt's, and ones that are new; beside a draw without."""
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(4)) * 0.1
    prompt, output = (7, 8, 8), (5, 5, 9)
    samplings = [
        sampling_of(temperature=0.0, frequency_penalty=-1.0, presence_penalty=0.3, repetition_penalty=0.8),
        sampling_of(temperature=0.0),
        sampling_of(temperature=0.0, frequency_penalty=-0.7, bias_token_ids=[last], biases=[0.5]),
    ]
    kept = [SequenceSampling(sampling, prompt, output) for sampling in samplings]
    for sequence in kept:
        sequence.expect()
    edited = logits.clone()
    unknown = UnknownTokens([0, 2], torch.tensor([last, last]))
    edit_logits(edited, [sequence.draw() for sequence in kept], 0, unknown=unknown)
    for row, sampling in enumerate(samplings):
        draw = Draw(logits[row].numpy(), sampling, prompt, (*output, last))
        np.testing.assert_array_equal(edited[row].numpy(), reference_logits(draw))


def test_a_penalised_sequence_without_tokens_counts_the_first_one_on_the_device() -> None:
    sequence = SequenceSampling(sampling_of(frequency_penalty=0.5, presence_penalty=0.25), ())
    sequence.expect()
    logits = torch.zeros(1, 16)
    edit_logits(logits, [sequence.draw()], 0, unknown=UnknownTokens([0], torch.tensor([3])))
    assert logits[0, 3] == -0.75
    assert int((logits != 0).sum()) == 1


def _unedited(seed: int) -> Draw:
    draw = random_draw(seed, vocabulary=VOCABULARY)
    fields = {name: getattr(draw.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    return dataclasses.replace(draw, sampling=sampling_of(**fields), mask=None)


DRAWS = {
    "unedited": [_unedited(seed) for seed in range(60)],
    "any": [random_draw(s, vocabulary=VOCABULARY) for s in range(40)],
    "narrow": [
        Draw(np.random.default_rng(s).normal(0, 1, 64).astype(np.float32), sampling_of(top_k=6, top_p=0.6, seed=s))
        for s in range(40)
    ],
    "banned": [
        Draw(np.arange(64, dtype=np.float32), sampling_of(temperature=t, min_tokens=3, end_token_ids=[63]))
        for t in (0.0, 1.0)
    ],
}


def _draws_noise_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(noise, "words_of_range", lambda keys, begin, count: words_of_range(keys, begin + 8, count))


def _keys_noise_without(column: int) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def mutant(keys: Any) -> torch.Tensor:
            bits = noise.key_tensor(keys)
            bits[:, column] = 0
            return bits

        patch.setattr(device, "key_tensor", mutant)

    return mutate


def _orders_by_column_alone(patch: pytest.MonkeyPatch) -> None:
    def mutant(scaled: torch.Tensor, count: int) -> torch.Tensor:
        return torch.arange(count).expand(len(scaled), -1).contiguous()

    patch.setattr(device_kernels, "first_columns", mutant)


def _forgets(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(device_edits, name, lambda *args: None)

    return mutate


def _filters_without(column: int, off: float) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def mutant(rows: Any, where: torch.device) -> torch.Tensor:
            numbers = filter_numbers(rows, where)
            numbers[column] = off
            return numbers

        filter_numbers = device_kernels._filter_numbers
        patch.setattr(device_kernels, "_filter_numbers", mutant)

    return mutate


def _ends_nuclei_one_token_too(far: int) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        def mutant(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            counted = total(self, *args, **kwargs)
            return counted + far if self.dtype == torch.bool else counted

        total = torch.Tensor.sum
        patch.setattr(torch.Tensor, "sum", mutant)

    return mutate


MUTANTS = {
    "noise of other rows": (_draws_noise_of_other_rows, "unedited"),
    "noise without the seed": (_keys_noise_without(0), "unedited"),
    "noise without the position": (_keys_noise_without(1), "unedited"),
    "the order of columns": (_orders_by_column_alone, "unedited"),
    "no top_k": (_filters_without(0, np.inf), "unedited"),
    "no top_p": (_filters_without(1, np.inf), "unedited"),
    "no min_p": (_filters_without(2, -np.inf), "unedited"),
    "nuclei one token too large": (_ends_nuclei_one_token_too(1), "narrow"),
    "nuclei one token too small": (_ends_nuclei_one_token_too(-1), "narrow"),
    "no bias": (_forgets("_add_bias"), "any"),
    "no penalties": (_forgets("_penalise"), "any"),
    "no banned tokens": (_forgets("_ban"), "banned"),
    "no masks": (_forgets("_apply_masks"), "any"),
}


@pytest.mark.parametrize(("mutate", "draws"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_of_the_devices_path_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], draws: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, chosen = list(map(reference_token, DRAWS[draws])), DRAWS[draws]
    in_shards = (24, len(chosen[0].logits) - 24)
    mutate(monkeypatch)
    with sampled_by(device_sampler()):
        assert not tokens_on(chosen) == tokens_on(chosen, in_shards) == expected
