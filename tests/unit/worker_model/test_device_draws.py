"""Draws on a device, played on the host's tensors: what comes to the host, and that rounding never decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_worker.backends.base import HOST
from hetero_worker.distributed.exchange import Arrived
from hetero_worker.distributed.staging import HostCopy
from hetero_worker.sampling import device_draws, device_scores, guesses, noise
from hetero_worker.sampling.decision import decide_filtered
from hetero_worker.sampling.device_draws import DeviceDrawing, first_columns
from hetero_worker.sampling.device_scores import Contest, TorchDrawKernels
from hetero_worker.sampling.drawing import HOST_DRAWING
from hetero_worker.sampling.noise import NoiseKey, gumbel_noise
from hetero_worker.sampling.ordering import best_first
from hetero_worker.sampling.philox import words_at, words_of_range
from hetero_worker.sampling.request import SamplingRow
from tests.support.examples import examples
from tests.support.sampling_checks import VOCABULARY, check_identity
from tests.support.sampling_paths import device_drawing, drawn_by
from tests.support.sampling_reference import Draw, random_draw, sample_on, sampling_of

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


class _WrongWinner(TorchDrawKernels):
    """Names the row that comes second, and is right about the first: as a device that rounds badly might."""

    def contest(
        self, logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, begin: int
    ) -> Contest:
        best, _ = super().contest(logits, rows, keys, temperatures, begin)
        without = logits.index_select(0, rows).scatter(1, (best - begin).unsqueeze(1), -torch.inf)
        own = logits[rows, best - begin] / temperatures
        own += torch.from_numpy(
            noise.gumbel_of_words(
                [NoiseKey(*key) for key in keys.numpy().view(np.uint64).tolist()],
                best.unsqueeze(1).numpy(),
                words_at(keys, best.unsqueeze(1)).numpy(),
            )[:, 0]
        )
        second, _ = super().contest(without, torch.arange(len(rows)), keys, temperatures, begin)
        return Contest(second, own)


def test_words_are_numpys_to_the_bit() -> None:
    for begin, count in ((0, 1), (3, 6), (63, 5), (64, 64), (2**31, 9)):
        words = words_of_range(_bits(KEYS), begin, count)
        assert words.tolist() == [noise._draw_words(key, begin, count).tolist() for key in KEYS]
        ids = torch.arange(begin, begin + count).expand(len(KEYS), -1)
        assert torch.equal(words_at(_bits(KEYS), ids), words)


def test_noise_of_known_words_is_the_noise_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.array([[5, 90, 0], [11, 12, 13], [140, 1, 8]])
    words = words_at(_bits(KEYS), torch.from_numpy(ids)).numpy()
    for coarse in (256, 2**31):
        monkeypatch.setattr(noise, "COARSE", coarse)
        whole = gumbel_noise(KEYS, begin=0, count=150).numpy()
        np.testing.assert_array_equal(noise.gumbel_of_words(KEYS, ids, words), np.take_along_axis(whole, ids, axis=1))


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


def test_a_step_takes_one_copy_and_rows_with_edits_or_wide_filters_one_more() -> None:
    logits = torch.randn(7, 2000, generator=torch.Generator().manual_seed(1)) * 3
    rows = [_row(temperature=0.0), _row(), _row(top_p=0.9), _row(top_k=5, seed=2), _row(min_p=0.1), _row(seed=9)]
    copies = _Copies()
    drawing = DeviceDrawing(HOST, TorchDrawKernels(), copies.start)
    drawing.start(rows, logits[:6], 0).read()
    assert [len(shape) for shape in copies.shapes] == [1]
    assert copies.shapes[0][0] < 3000, "whole rows came"
    copies.shapes.clear()
    edited = random_draw(0, vocabulary=2000).row
    assert edited.edits is not None
    drawing.start([*rows[:5], edited, _row(top_k=1500)], logits, 0).read()
    assert copies.shapes[1:] == [(2, 2000)]
    assert drawing.summary() == (
        "13 draws on the device (torch); rows that came to the host whole: 2 for edits or wide filters, "
        "0 too close to tell, 0 for log-probabilities or wide nuclei"
    )
    assert drawing.summary() is None


def test_few_draws_are_too_close_to_tell() -> None:
    """Of tokens of a peaked and of a flat distribution; the bound is not so wide that it asks for rows all the time."""
    drawing = device_drawing()
    for spread in (0.01, 4.0):
        logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)).expand(1500, -1) * spread
        drawing.start([_row(position=i) for i in range(1500)], logits, 0).read()
    assert drawing._counts["unproven"] <= 6


def test_two_rows_that_are_too_close_are_told_apart_on_the_host() -> None:
    key = NoiseKey(1, 0)
    for offset in (-2e-6, 0.0, 2e-6):
        logits = 20 - gumbel_noise([key], begin=0, count=900)
        logits[0, :300] -= 5
        logits[0, 300] += offset
        expected = sample_on(logits, [_row()]).tokens
        drawing = device_drawing()
        with drawn_by(drawing):
            for counts in ((), (100, 800)):
                assert sample_on(logits, [_row()], counts).tokens == expected
        assert drawing._counts["unproven"] > 0


def test_a_device_that_names_the_wrong_row_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, 400, generator=torch.Generator().manual_seed(3))
    rows = [_row(position=i, temperature=0.7) for i in range(30)]
    expected = sample_on(logits, rows).tokens
    with drawn_by(device_drawing(_WrongWinner())):
        assert sample_on(logits, rows).tokens == expected
        monkeypatch.setattr(device_draws, "slack", lambda scores: np.full(scores.shape, -np.inf))
        assert sample_on(logits, rows).tokens != expected, "nobody asked for a proof"


def test_fractions_of_coarse_words_decide_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other word is coarse here; a draw in hundreds has one otherwise."""
    for module in (noise, device_scores):
        monkeypatch.setattr(module, "COARSE", 2**31)
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(4))
    rows = [_row(position=i, top_p=1.0 if i % 2 else 0.8) for i in range(60)]
    expected = sample_on(logits, rows).tokens
    with drawn_by(device_drawing()):
        assert sample_on(logits, rows, (128, 172)).tokens == expected


def _draws_noise_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_scores, "words_of_range", lambda keys, begin, count: words_of_range(keys, 0, count))
    patch.setattr(device_scores, "words_at", lambda keys, ids: words_at(keys, ids - ids.min()))


def _orders_candidates_by_column_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        device_draws, "first_columns", lambda scaled, count: torch.arange(count).expand(len(scaled), -1).contiguous()
    )


def _forgets_edits(patch: pytest.MonkeyPatch) -> None:
    def mutant(rows: Any, shard_rows: int) -> Any:
        return kinds([row._replace(edits=None) for row in rows], shard_rows)

    kinds = device_draws._Kinds.of
    patch.setattr(device_draws._Kinds, "of", mutant)


def _unedited(seed: int) -> Draw:
    """A draw that the device makes."""
    draw = random_draw(seed, vocabulary=VOCABULARY)
    fields = {name: getattr(draw.sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    return dataclasses.replace(draw, sampling=sampling_of(**fields), mask=None)


DRAWS = {
    "unedited": [_unedited(seed) for seed in range(60)],
    "any": [random_draw(s, vocabulary=512) for s in range(40)],
}
MUTANTS = {
    "noise of other rows": (_draws_noise_of_other_rows, "unedited"),
    "candidates by column alone": (_orders_candidates_by_column_alone, "unedited"),
    "forgets edits": (_forgets_edits, "any"),
}


def test_a_device_draws_what_the_host_draws_in_any_batch_and_layout() -> None:
    drawing = device_drawing()
    with drawn_by(drawing):
        check_identity(DRAWS["unedited"])
    assert drawing._counts["whole"] == 0


@pytest.mark.parametrize(("mutate", "draws"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_of_the_devices_path_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], draws: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with drawn_by(device_drawing()), pytest.raises(AssertionError):
        check_identity(DRAWS[draws])


def _guessed(draw: Draw) -> tuple[int, int]:
    """What a draw is guessed to come to, and what it does come to."""
    started = device_drawing().start([draw.row], torch.from_numpy(draw.logits)[None], 0)
    return int(started.guess().ids[0]), sample_on(torch.from_numpy(draw.logits)[None], [draw.row]).tokens[0]


def _reaches_its_end(draw: Draw) -> bool:
    """Whether the candidates that the device has are enough for the filters."""
    row = draw.row
    candidates = device_drawing().start([row], torch.from_numpy(draw.logits)[None], 0).read().candidates
    return not row.is_filtered or decide_filtered([candidates[0]], row) is not None


def test_guesses_come_true_where_the_candidates_suffice() -> None:
    draws = [draw for draw in DRAWS["unedited"] if _reaches_its_end(draw)]
    assert sum(draw.row.is_filtered for draw in draws) > 20
    assert all(guess == token for guess, token in map(_guessed, draws))


@pytest.mark.parametrize("forgotten", ["how many", "that top_k cut", "top_p", "min_p"])
def test_each_filter_has_a_part_in_guesses(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(row: SamplingRow, count: int) -> tuple[float, float, float, float]:
        limit, is_cut, top_p, min_log = filters_of(row, count)
        whole = {"how many": (1e9, is_cut, top_p, min_log), "that top_k cut": (limit, 0.0, top_p, min_log)}
        return {**whole, "top_p": (limit, is_cut, np.inf, min_log), "min_p": (limit, is_cut, top_p, -np.inf)}[forgotten]

    filters_of = guesses._filters_of
    monkeypatch.setattr(guesses, "_filters_of", mutant)
    draws = [_unedited(seed) for seed in range(250)]
    rows, logits = [draw.row for draw in draws], torch.from_numpy(np.stack([draw.logits for draw in draws]))
    started, places = device_drawing().start(rows, logits, 0), device_drawing().start(rows, logits, 0).guessed
    ids, tokens = started.guess().ids.tolist(), sample_on(logits, rows).tokens
    wrong = [i for i, place in enumerate(places) if place is not None and ids[place] != tokens[i]]
    assert any(_reaches_its_end(draws[i]) for i in wrong)


def test_draws_are_guessed_in_whatever_order_and_edited_ones_are_not() -> None:
    edited = next(draw for draw in DRAWS["any"] if draw.row.edits is not None)
    draws = [draw for draw in DRAWS["unedited"][:20] if _reaches_its_end(draw)]
    draws[3:3] = [edited, edited]
    logits = torch.from_numpy(np.stack([draw.logits for draw in draws]))
    started = device_drawing().start([draw.row for draw in draws], logits, 0)
    guess, tokens = started.guess(), sample_on(logits, [draw.row for draw in draws]).tokens
    assert [i for i, place in enumerate(started.guessed) if place is None] == [3, 4]
    for place, token in zip(started.guessed, tokens, strict=True):
        assert place is None or int(guess.ids[place]) == token
    assert guess.copy.wait().tolist() == guess.ids.tolist()
    assert started.is_here


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_guess_is_a_row_of_the_vocabulary_whatever_the_logits_are(value: float) -> None:
    rows = [_row(), _row(temperature=0.0), _row(top_p=0.9), _row(top_k=5, min_p=0.2)]
    for logits in (torch.full((4, 300), value), torch.randn(4, 300).index_fill(1, torch.tensor([7, 200]), value)):
        ids = device_drawing().start(rows, logits, 40).guess().ids
        assert len(ids) == 4
        assert 40 <= int(ids.min()) <= int(ids.max()) < 340


def test_draws_on_the_host_are_not_guessed() -> None:
    started = HOST_DRAWING.start([_row(), _row()], torch.randn(2, 50), 0)
    assert list(started.guessed) == [None, None]
    with pytest.raises(ValueError, match="nothing to guess"):
        started.guess()
