"""DeviceSampler: draws are made on the device that holds the logits.

Edits, filters and noise are applied there to all rows at once, and two numbers a draw, its score and its token, come to
the host in one copy. Where the rank holds the whole vocabulary the token stays on the device too, for the next step.
Where it holds a shard, draws with filters send candidates, which rank 0 merges (`decision`).

The noise is the host's: the same integers, keyed by seed, position and token id. A device rounds logarithms otherwise,
so tokens are the host's up to near ties (`bench/sampling_identity.py` counts them). On one kind of device a draw
depends on its own logits only: the same logits give the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from hetero_worker.memory.streams import to_device
from hetero_worker.sampling.base import PendingCopy, StartedDraws, UnknownTokens
from hetero_worker.sampling.device_edits import edit_logits
from hetero_worker.sampling.device_kernels import MAX_SELECTED, Best, SamplingKernels, filter_logits, first_columns
from hetero_worker.sampling.noise import key_tensor
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import BEST_FIELDS, Float64Array, ShardCandidates, ShardDraws, chunks_of, log_sum_exp

_CHUNK_ELEMENTS: Final = 1 << 21
"""Logits whose filters are applied at a time; each takes up to 45 bytes."""
_HEAD_FIELDS: Final = 2
_CANDIDATE_FIELDS: Final = 3

StartToHost = Callable[[torch.Tensor], PendingCopy]
"""Starts a copy of a device's tensor to pinned host memory, as `distributed.staging` does."""


class DeviceSampler:
    """ShardSampler for one device."""

    decides = True

    def __init__(self, device: torch.device, kernels: SamplingKernels, start_to_host: StartToHost) -> None:
        self._device = device
        self._kernels = kernels
        self._start_to_host = start_to_host

    @property
    def name(self) -> str:
        """Name for reports."""
        return f"device-{self._kernels.name}"

    def start(
        self,
        rows: Sequence[SamplingRow],
        logits: torch.Tensor,
        begin: int,
        *,
        is_whole: bool = False,
        unknown: UnknownTokens | None = None,
    ) -> StartedDraws:
        """As ShardSampler.start. Nothing here waits for the device."""
        filtered = [i for i, row in enumerate(rows) if row.is_filtered]
        is_edited = any(row.edits is not None for row in rows)
        if is_edited or (is_whole and filtered):
            logits = logits.clone(memory_format=torch.contiguous_format)
        if is_edited:
            edit_logits(logits, rows, begin, unknown=unknown)
        batch = _DeviceBatch(self._device, self._kernels, rows, logits, begin)
        if is_whole:
            batch.filter_rows(filtered)
            best = batch.best([i for i, row in enumerate(rows) if not row.is_greedy])
            return _DeviceDraws(rows, self._start_to_host(_packed(best)), best.ids)
        best = batch.best([i for i, row in enumerate(rows) if not (row.is_greedy or row.is_filtered)])
        chunks = list(chunks_of(filtered, logits.shape[1], chunk_elements=_CHUNK_ELEMENTS))
        numbers = torch.cat([_packed(best), *map(batch.candidates, chunks)])
        return _DeviceDraws(rows, self._start_to_host(numbers), None, chunks=chunks, shard_rows=logits.shape[1])

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """As ShardSampler.to_host."""
        index = to_device(torch.tensor(chosen, dtype=torch.int64), self._device)
        return self._start_to_host(logits.index_select(0, index)).wait()


class _DeviceBatch:
    """One step's draws on the device."""

    def __init__(
        self,
        device: torch.device,
        kernels: SamplingKernels,
        rows: Sequence[SamplingRow],
        logits: torch.Tensor,
        begin: int,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._rows = rows
        self._logits = logits
        self._begin = begin
        self._temperatures = [row.temperature for row in rows]

    def filter_rows(self, chosen: Sequence[int]) -> None:
        """Scale the chosen rows of a whole vocabulary and apply their filters, in place."""
        small = [i for i in chosen if 0 < self._rows[i].top_k <= MAX_SELECTED]
        others = [i for i in chosen if not 0 < self._rows[i].top_k <= MAX_SELECTED]
        for kind in (small, others):
            for chunk in chunks_of(kind, self._logits.shape[1], chunk_elements=_CHUNK_ELEMENTS):
                scaled = self._scaled(chunk)
                filter_logits(scaled, [self._rows[i] for i in chunk])
                self._logits.index_copy_(0, self._index(chunk), scaled)
        for i in chosen:
            self._temperatures[i] = 1.0

    def best(self, noisy: Sequence[int]) -> Best:
        """Return the best row of each draw: with noise for some, the largest logit for all others."""
        if len(noisy) == len(self._rows):
            return self._noisy_best(noisy)
        scores, columns = self._logits.max(dim=1)
        ids = columns + self._begin
        if noisy:
            index, best = self._index(noisy), self._noisy_best(noisy)
            scores.index_copy_(0, index, best.scores)
            ids.index_copy_(0, index, best.ids)
        return Best(scores, ids)

    def candidates(self, chosen: Sequence[int]) -> torch.Tensor:
        """Return the numbers of the draws' ShardCandidates, in the order of `_DeviceDraws.read`: float64, 1-d."""
        scaled = self._scaled(chosen)
        columns = first_columns(scaled, _most_candidates(self._rows, chosen, scaled.shape[1]))
        ids = columns + self._begin
        head = torch.stack([scaled.amax(dim=1).double(), log_sum_exp(scaled)], dim=1)
        noise = self._kernels.noise_at(self._keys(chosen), ids)
        return torch.cat([head, scaled.gather(1, columns).double(), noise.double(), ids.double()], dim=1).view(-1)

    def _noisy_best(self, chosen: Sequence[int]) -> Best:
        temperatures = self._send(torch.tensor([self._temperatures[i] for i in chosen]))
        return self._kernels.noisy_best(
            self._logits, self._index(chosen), self._keys(chosen), temperatures, self._begin
        )

    def _scaled(self, chosen: Sequence[int]) -> torch.Tensor:
        temperatures = self._send(torch.tensor([[self._temperatures[i]] for i in chosen]))
        return self._logits.index_select(0, self._index(chosen)).div_(temperatures)

    def _index(self, chosen: Sequence[int]) -> torch.Tensor:
        return self._send(torch.tensor(chosen, dtype=torch.int64))

    def _keys(self, chosen: Sequence[int]) -> torch.Tensor:
        return self._send(key_tensor([self._rows[i].noise_key for i in chosen]))

    def _send(self, host: torch.Tensor) -> torch.Tensor:
        return to_device(host, self._device)


class _DeviceDraws:
    """StartedDraws whose numbers are on their way to the host in one copy."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        numbers: PendingCopy,
        token_ids: torch.Tensor | None,
        *,
        chunks: Sequence[Sequence[int]] = (),
        shard_rows: int = 0,
    ) -> None:
        self._rows = rows
        self._numbers = numbers
        self._chunks = chunks
        self._shard_rows = shard_rows
        self.token_ids = token_ids

    @property
    def is_here(self) -> bool:
        return self._numbers.is_here

    def read(self) -> ShardDraws:
        numbers = self._numbers.wait().numpy()
        used = BEST_FIELDS * len(self._rows)
        draws = ShardDraws(numbers[:used].reshape(-1, BEST_FIELDS), {})
        for chunk in self._chunks:
            size = len(chunk) * (_HEAD_FIELDS + _CANDIDATE_FIELDS * self._most(chunk))
            table = numbers[used : used + size].reshape(len(chunk), -1)
            draws.candidates.update((i, self._candidates(i, row)) for i, row in zip(chunk, table, strict=True))
            used += size
        return draws

    def _candidates(self, draw: int, numbers: Float64Array) -> ShardCandidates:
        scaled, noise, ids = np.split(numbers[_HEAD_FIELDS:], _CANDIDATE_FIELDS)
        kept = slice(self._rows[draw].num_candidates(self._shard_rows))
        return ShardCandidates.make(
            largest=float(numbers[0]),
            log_sum_exp=float(numbers[1]),
            scaled=scaled[kept],
            noise=noise[kept],
            ids=ids[kept],
            shard_rows=self._shard_rows,
        )

    def _most(self, chosen: Sequence[int]) -> int:
        return _most_candidates(self._rows, chosen, self._shard_rows)


def _packed(best: Best) -> torch.Tensor:
    """Return scores and ids in turn: float64 [2 * draws]."""
    return torch.stack([best.scores.double(), best.ids.double()], dim=1).view(-1)


def _most_candidates(rows: Sequence[SamplingRow], chosen: Sequence[int], shard_rows: int) -> int:
    return max(rows[i].num_candidates(shard_rows) for i in chosen)
