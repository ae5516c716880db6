"""Edits of all rows of a batch, applied on the device that holds the logits, with a few operators.

The numbers are those of `edits.LogitEdits.apply`. The host sends tables of (row, token, number), and masks as packed
bits. A sequence whose last token only the device knows has that token counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hetero_worker.memory.streams import to_device
from hetero_worker.sampling.base import UnknownTokens
from hetero_worker.sampling.edits import FloatArray, LogitEdits, Penalties, mask_bytes, within
from hetero_worker.sampling.noise import IdArray
from hetero_worker.sampling.request import SamplingRow


def edit_logits(
    logits: torch.Tensor, rows: Sequence[SamplingRow], begin: int, *, unknown: UnknownTokens | None = None
) -> None:
    """Apply each row's edits in place.

    `logits` is float32 [draws, shard rows], contiguous, the first column being vocabulary row `begin`. Raises
    ProtocolError when a mask is shorter than the vocabulary.
    """
    edits = [(draw, row.edits) for draw, row in enumerate(rows) if row.edits is not None]
    _add_bias(logits, edits, begin)
    _penalise(logits, [(draw, each.penalties) for draw, each in edits if each.penalties is not None], begin, unknown)
    _ban(logits, edits, begin)
    _apply_masks(logits, edits, begin)


@dataclass(slots=True)
class _Entries:
    """Table of edits on the device; each tensor has one column an edit."""

    draws: torch.Tensor
    """int64 [entries]"""
    places: torch.Tensor
    """int64 [entries]: indices in the flattened logits."""
    numbers: torch.Tensor
    """float32 [kinds of numbers, entries]"""


def _entries(logits: torch.Tensor, parts: Iterable[tuple[int, IdArray, FloatArray]], begin: int) -> _Entries | None:
    """Send a table of (draw, token ids, numbers [kinds, ids]) for the shard's tokens; None if it is empty."""
    draws, places, numbers = [], [], []
    for draw, ids, of_ids in parts:
        own = within(ids, begin, logits.shape[1])
        places.append(ids[own] - begin + draw * logits.shape[1])
        draws.append(np.full(len(places[-1]), draw))
        numbers.append(of_ids[:, own])
    if not any(map(len, places)):
        return None
    return _Entries(
        _send(np.concatenate(draws), logits), _send(np.concatenate(places), logits), _send(np.hstack(numbers), logits)
    )


def _add_bias(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits]], begin: int) -> None:
    parts = [(draw, each.bias.ids, each.bias.values[None]) for draw, each in edits if each.bias is not None]
    if (entries := _entries(logits, parts, begin)) is not None:
        logits.view(-1).index_put_((entries.places,), entries.numbers[0], accumulate=True)


def _ban(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits]], begin: int) -> None:
    parts = [
        (draw, each.banned_ids, np.empty((0, len(each.banned_ids)), dtype=np.float32))
        for draw, each in edits
        if each.banned_ids is not None
    ]
    if (entries := _entries(logits, parts, begin)) is not None:
        logits.view(-1).index_fill_(0, entries.places, -torch.inf)


def _penalise(
    logits: torch.Tensor, penalties: Sequence[tuple[int, Penalties]], begin: int, unknown: UnknownTokens | None
) -> None:
    entries = _entries(logits, [(draw, each.counts.ids, _numbers_of(each)) for draw, each in penalties], begin)
    if unknown is not None:
        entries = _with_unknown(logits, dict(penalties), unknown, entries)
    if entries is None:
        return
    times, presence, frequency, repetition = entries.numbers
    values = logits.view(-1)[entries.places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times
    values -= torch.where(times > 0, presence, 0.0)
    logits.view(-1).index_put_((entries.places,), values)


def _numbers_of(penalties: Penalties) -> FloatArray:
    """Return counts, presence, frequency and repetition for each entry of the counts: float32 [4, entries]."""
    counts = penalties.counts.counts
    numbers = np.empty((4, len(counts)), dtype=np.float32)
    numbers[0] = counts
    numbers[1:] = np.array([[penalties.presence], [penalties.frequency], [penalties.repetition]])
    return numbers


def _with_unknown(
    logits: torch.Tensor, penalties: dict[int, Penalties], unknown: UnknownTokens, entries: _Entries | None
) -> _Entries | None:
    """Count the unknown tokens of penalised draws once more, in an entry of their own.

    If the token has an entry already both get the same count, so that they write the same number.
    """
    chosen = [i for i, draw in enumerate(unknown.draws) if draw in penalties]
    if not chosen:
        return entries
    draws = np.array([unknown.draws[i] for i in chosen])
    scalars = [(1.0, each.presence, each.frequency, each.repetition) for each in map(penalties.__getitem__, draws)]
    own_draws, own = _send(draws, logits), _send(np.array(scalars, dtype=np.float32).T.copy(), logits)
    own_places = unknown.ids.index_select(0, _send(np.array(chosen), logits)) + own_draws * logits.shape[1]
    if entries is None:
        return _Entries(own_draws, own_places, own)
    place_of = torch.full((len(logits),), -1, device=logits.device).index_copy_(0, own_draws, own_places)
    is_again = entries.places == place_of[entries.draws]
    entries.numbers[0] += is_again
    counted = torch.zeros(len(logits), device=logits.device)
    counted.index_add_(0, entries.draws, entries.numbers[0] * is_again)
    own[0] = counted[own_draws].clamp_(min=1.0)
    return _Entries(
        torch.cat([entries.draws, own_draws]),
        torch.cat([entries.places, own_places]),
        torch.cat([entries.numbers, own], dim=1),
    )


def _apply_masks(logits: torch.Tensor, edits: Sequence[tuple[int, LogitEdits]], begin: int) -> None:
    masks = [(draw, each.mask) for draw, each in edits if each.mask is not None]
    if not masks:
        return
    count, skip = logits.shape[1], begin % 8
    packed = _send(np.stack([mask_bytes(mask, begin, count) for _, mask in masks]), logits)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed.unsqueeze(2) >> shifts) & 1
    is_out = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    draws = _send(np.array([draw for draw, _ in masks]), logits)
    is_out.index_copy_(0, draws, bits.view(len(masks), -1)[:, skip : skip + count] == 0)
    logits.masked_fill_(is_out, -torch.inf)


def _send(array: npt.NDArray[np.generic], logits: torch.Tensor) -> torch.Tensor:
    """Copy a host array to where the logits lie."""
    return to_device(torch.from_numpy(array), logits.device)
