"""Draws whose logits lie on a device: they are looked at there, and a few numbers a draw come to the host.

Tokens are those of the host's path to the bit, though devices round logarithms otherwise. For a draw without filters
the device finds the row that seems best, and a bound of all other rows' scores; the host computes the one row's score
as it always does, from its logit and its word of noise (an integer, the same everywhere), and takes it when it exceeds
the bound by more than rounding can explain. If not, in a draw of ten thousand or so, the whole row is fetched and drawn
from on the host. Candidates of filtered draws come in the one order of `ordering`, made exact by integer keys; their
noise is the host's again. Only the mass that a nucleus of the whole vocabulary is measured by is rounded by the
device: to a few parts in 10^7, as between layouts of ranks. Where that decides, either end of the nucleus is right.

Rows with edits (penalties, bias, masks) and filters of more than MAX_CANDIDATES are drawn on the host from copies of
just these rows, asked for in the same breath.

All that a step's draws need comes in one copy through pinned memory, beside it one of the rows that are known to be
needed whole; the host waits for these copies and nothing else. What the device found (the best row of a greedy draw,
the contest's winner, and by the filters of `guesses` one of a filtered draw's candidates) is nearly always the draw's
token: a guess, that the next step may be begun with while the numbers are still on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_worker.backends.copies import to_device
from hetero_worker.sampling.device_scores import DrawKernels
from hetero_worker.sampling.drawing import Guesses, PendingCopy, StartedDraws
from hetero_worker.sampling.guesses import DrawnFrom, guess_filtered
from hetero_worker.sampling.noise import gumbel_of_words
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import (
    Float64Array,
    ShardCandidates,
    ShardDraws,
    chunks_of,
    draws_of_shard,
    log_sum_exp,
)

MAX_CANDIDATES: Final = 1024
"""Of one filtered draw on the device."""
_CHUNK_ELEMENTS: Final = 1 << 20
"""Logits that are put in order at a time; each takes some 30 bytes."""
_HEAD_FIELDS: Final = 2
_CANDIDATE_FIELDS: Final = 3
_CONTEST_FIELDS: Final = 4
_LOW_WORD: Final = (1 << 32) - 1


StartToHost = Callable[[torch.Tensor], PendingCopy]
"""Begins a copy of a device's tensor to pinned host memory; as distributed.staging's."""


@dataclass(slots=True)
class _Kinds:
    """A batch's draws, by how they are made."""

    greedy: list[int] = field(default_factory=list)
    random: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    """From copies of their rows."""

    @property
    def guessed(self) -> list[int]:
        """Draws that the device can guess, in the order in which it is asked about them."""
        return [*self.greedy, *self.random, *self.filtered]

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], shard_rows: int) -> _Kinds:
        kinds = cls()
        for i, row in enumerate(rows):
            if row.edits is not None:
                kinds.whole.append(i)
            elif row.is_greedy:
                kinds.greedy.append(i)
            elif not row.is_filtered:
                kinds.random.append(i)
            elif row.num_candidates(shard_rows) <= MAX_CANDIDATES:
                kinds.filtered.append(i)
            else:
                kinds.whole.append(i)
        return kinds


class DeviceDrawing:
    """Implements drawing.ShardDrawing for one device."""

    def __init__(self, device: torch.device, kernels: DrawKernels, start_to_host: StartToHost) -> None:
        self._device = device
        self._kernels = kernels
        self._start_to_host = start_to_host
        self._counts: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return f"device-{self._kernels.name}"

    def start(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> StartedDraws:
        kinds = _Kinds.of(rows, logits.shape[1])
        self._counts.update(draws=len(rows), whole=len(kinds.whole))
        batch = _DeviceBatch(self._device, self._kernels, rows, logits, begin)
        return _DeviceDraws(batch, kinds, start_to_host=self._start_to_host, count=self._count)

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        self._counts.update(told=len(chosen))
        index = to_device(torch.tensor(chosen, dtype=torch.int64), self._device)
        return self._start_to_host(logits.index_select(0, index)).wait()

    def summary(self) -> str | None:
        counts, self._counts = self._counts, Counter()
        if not counts["draws"]:
            return None
        return (
            f"{counts['draws']} draws on the device ({self._kernels.name}); rows that came to the host whole: "
            f"{counts['whole']} for edits or wide filters, {counts['unproven']} too close to tell, "
            f"{counts['told']} for log-probabilities or wide nuclei"
        )

    def _count(self, **more: int) -> None:
        self._counts.update(more)


class _DeviceDraws:
    """Implements StartedDraws: asks the device for everything when it is made."""

    def __init__(
        self, batch: _DeviceBatch, kinds: _Kinds, *, start_to_host: StartToHost, count: Callable[..., None]
    ) -> None:
        self._batch = batch
        self._kinds = kinds
        self._start_to_host = start_to_host
        self._count = count
        self._asked = batch.ask(kinds)
        numbers = [asked.numbers for asked in self._asked]
        self._numbers = start_to_host(torch.cat(numbers)) if numbers else None
        self._copies = start_to_host(batch.rows_of(kinds.whole)) if kinds.whole else None

    @property
    def is_here(self) -> bool:
        return all(copy.is_here for copy in (self._numbers, self._copies) if copy is not None)

    @property
    def guessed(self) -> Sequence[int | None]:
        places: list[int | None] = [None] * len(self._batch.rows)
        for place, i in enumerate(self._kinds.guessed):
            places[i] = place
        return places

    def guess(self) -> Guesses:
        ids = torch.cat([asked.guess() for asked in self._asked])
        return Guesses(ids, self._start_to_host(ids))

    def read(self) -> ShardDraws:
        batch, kinds = self._batch, self._kinds
        draws = ShardDraws.room(len(batch.rows))
        unproven = batch.read(kinds, self._numbers.wait().numpy(), draws) if self._numbers is not None else []
        if self._copies is not None:
            self._draw_on_host(kinds.whole, self._copies.wait(), draws)
        if unproven:
            self._count(unproven=len(unproven))
            self._draw_on_host(unproven, self._start_to_host(batch.rows_of(unproven)).wait(), draws)
        return draws

    def _draw_on_host(self, chosen: Sequence[int], copies: torch.Tensor, draws: ShardDraws) -> None:
        rows, begin = [self._batch.rows[i] for i in chosen], self._batch.begin
        draws.put(chosen, draws_of_shard(copies, rows, begin))


class _Asked(NamedTuple):
    """Of some draws of one kind."""

    numbers: torch.Tensor
    """What is to be told of them, 1-d float64, not there yet."""
    guess: Callable[[], torch.Tensor]
    """What they seem to come to: int64, one a draw, on the device."""


@dataclass(frozen=True, slots=True)
class _DeviceBatch:
    """One step's draws: asks the device for numbers, and reads these, in the same order."""

    device: torch.device
    kernels: DrawKernels
    rows: Sequence[SamplingRow]
    logits: torch.Tensor
    begin: int

    def ask(self, kinds: _Kinds) -> list[_Asked]:
        """Of the draws that the device makes, in the order of `kinds.guessed`."""
        asked = []
        if kinds.greedy:
            asked.append(self._ask_greedy(kinds.greedy))
        if kinds.random:
            asked.append(self._ask_random(kinds.random))
        asked += [self._ask_filtered(chunk) for chunk in self._chunks(kinds.filtered)]
        return asked

    def read(self, kinds: _Kinds, numbers: Float64Array, draws: ShardDraws) -> list[int]:
        """Fill in what `ask` brought; the draws of which it proves nothing."""
        unproven: list[int] = []
        used = 0
        if kinds.greedy:
            used = 2 * len(kinds.greedy)
            draws.best[kinds.greedy] = numbers[:used].reshape(2, -1).T
        if kinds.random:
            size = _CONTEST_FIELDS * len(kinds.random)
            unproven = self._read_random(kinds.random, numbers[used : used + size], draws)
            used += size
        for chunk in self._chunks(kinds.filtered):
            size = len(chunk) * (_HEAD_FIELDS + _CANDIDATE_FIELDS * self._most(chunk))
            self._read_filtered(chunk, numbers[used : used + size], draws)
            used += size
        return unproven

    def rows_of(self, chosen: Sequence[int]) -> torch.Tensor:
        """A copy of some rows, on the device."""
        return self.logits if len(chosen) == len(self.logits) else self.logits.index_select(0, self._index(chosen))

    def _ask_greedy(self, chosen: list[int]) -> _Asked:
        scores, columns = self.rows_of(chosen).max(dim=1)
        ids = columns + self.begin
        return _Asked(torch.cat([scores.double(), ids.double()]), lambda: ids)

    def _ask_random(self, chosen: list[int]) -> _Asked:
        index, keys = self._index(chosen), self._keys(chosen)
        ids, rivals = self.kernels.contest(self.logits, index, keys, self._temperatures(chosen), self.begin)
        words = self.kernels.words_at(keys, ids.unsqueeze(1)).squeeze(1)
        numbers = torch.cat([each.double() for each in (ids, rivals, words, self.logits[index, ids - self.begin])])
        return _Asked(numbers, lambda: ids)

    def _read_random(self, chosen: list[int], numbers: Float64Array, draws: ShardDraws) -> list[int]:
        ids, rivals, words, logits = numbers.reshape(_CONTEST_FIELDS, -1)
        noise = self._noise(chosen, ids[:, None], words[:, None])[:, 0]
        temperatures = np.array([self.rows[i].temperature for i in chosen], dtype=np.float32)
        with np.errstate(all="ignore"):  # logits that are not finite prove nothing, and are refused on the host
            scores = (noise + logits.astype(np.float32) / temperatures).astype(np.float64)
            proven = scores - slack(scores) > rivals
        draws.best[chosen, 0], draws.best[chosen, 1] = scores, ids
        return [i for i, is_proven in zip(chosen, proven.tolist(), strict=True) if not is_proven]

    def _ask_filtered(self, chosen: list[int]) -> _Asked:
        scaled = self.logits.index_select(0, self._index(chosen)).div_(self._temperatures(chosen).unsqueeze(1))
        columns = first_columns(scaled, self._most(chosen))
        ids, totals = columns + self.begin, log_sum_exp(scaled)
        words = self.kernels.words_at(self._keys(chosen), ids)
        head = torch.stack([scaled.amax(dim=1).double(), totals], dim=1)
        of_candidates = scaled.gather(1, columns)
        numbers = torch.cat([head, of_candidates.double(), ids.double(), words.double()], dim=1).view(-1)
        drawn_from = DrawnFrom(of_candidates, ids, words, totals)

        def guess() -> torch.Tensor:
            return guess_filtered(drawn_from, [self.rows[i] for i in chosen], list(map(self._count, chosen)))

        return _Asked(numbers, guess)

    def _read_filtered(self, chosen: list[int], numbers: Float64Array, draws: ShardDraws) -> None:
        table = numbers.reshape(len(chosen), -1)
        scaled, ids, words = np.split(table[:, _HEAD_FIELDS:], _CANDIDATE_FIELDS, axis=1)
        noise = self._noise(chosen, ids, words).astype(np.float64)
        for place, i in enumerate(chosen):
            kept = slice(self._count(i))
            draws.candidates[i] = ShardCandidates.of(
                largest=float(table[place, 0]),
                log_sum_exp=float(table[place, 1]),
                scaled=scaled[place, kept],
                noise=noise[place, kept],
                ids=ids[place, kept],
                shard_rows=self.logits.shape[1],
            )

    def _noise(self, chosen: Sequence[int], ids: Float64Array, words: Float64Array) -> npt.NDArray[np.float32]:
        return gumbel_of_words([self.rows[i].noise_key for i in chosen], ids.astype(np.int64), words.astype(np.int64))

    def _chunks(self, chosen: list[int]) -> list[list[int]]:
        return list(chunks_of(chosen, self.logits.shape[1], chunk_elements=_CHUNK_ELEMENTS))

    def _count(self, i: int) -> int:
        return self.rows[i].num_candidates(self.logits.shape[1])

    def _most(self, chosen: Sequence[int]) -> int:
        return max(map(self._count, chosen))

    def _index(self, chosen: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(chosen, dtype=torch.int64), self.device)

    def _temperatures(self, chosen: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor([self.rows[i].temperature for i in chosen]), self.device)

    def _keys(self, chosen: Sequence[int]) -> torch.Tensor:
        keys = np.array([self.rows[i].noise_key for i in chosen], dtype=np.uint64)
        return to_device(torch.from_numpy(keys.view(np.int64)), self.device)


def slack(scores: Float64Array) -> Float64Array:
    """By how much a device's score of a row may be off: some times what two roundings of a quotient and two logarithms
    of 22 good bits add up to, where noise, and so what the score's parts exceed it by, is below 45."""
    return 5e-5 + 2e-6 * np.abs(scores)


def first_columns(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` first rows in the order (value descending, column ascending): int64 [draws, count].

    Exact, whatever a device's topk does with equals: of integers no two of which are equal, made of a float32's bits
    in an order of their own, and the column.
    """
    bits = (scaled + 0.0).view(torch.int32).long()  # -0.0, which equals 0.0, becomes it
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    columns = torch.arange(scaled.shape[1], device=scaled.device)
    keys = (ascending << 32) + (_LOW_WORD - columns)
    return _LOW_WORD - (keys.topk(count, dim=1).values & _LOW_WORD)
