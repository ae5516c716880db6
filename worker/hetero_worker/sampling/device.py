"""DeviceSampler: draws are made on the device that holds the logits.

Edits, filters and noise are applied there to all rows at once, and two numbers a draw, its score and its token, come to
the host in one copy. Where the rank holds the whole vocabulary the token stays on the device too, for the next step.

The noise is the host's: the same integers, keyed by seed, position and token id. A device rounds logarithms otherwise,
so tokens are the host's up to near ties (`bench/sampling_identity.py` counts them). On one kind of device a draw
depends on its own logits only: the same logits give the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from hetero_worker.memory.streams import to_device
from hetero_worker.sampling.base import PendingCopy, StartedDraws, UnknownTokens
from hetero_worker.sampling.device_edits import edit_logits
from hetero_worker.sampling.device_kernels import MAX_SELECTED, Best, SamplingKernels, filter_logits
from hetero_worker.sampling.noise import key_tensor
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import Float64Array, chunks_of

_CHUNK_ELEMENTS: Final = 1 << 21
"""Logits whose filters are applied at a time; each takes up to 45 bytes."""

StartToHost = Callable[[torch.Tensor], PendingCopy]
"""Starts a copy of a device's tensor to pinned host memory, as `distributed.staging` does."""


class DeviceSampler:
    """ShardSampler for one device."""

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
        """As ShardSampler.start; logits may be on the host. Nothing here waits for the device."""
        logits = logits.to(self._device)
        filtered = [i for i, row in enumerate(rows) if row.is_filtered] if is_whole else []
        is_edited = any(row.edits is not None for row in rows)
        if is_edited or filtered:
            logits = logits.clone(memory_format=torch.contiguous_format)
        if is_edited:
            edit_logits(logits, rows, begin, unknown=unknown)
        batch = _DeviceBatch(self._device, self._kernels, rows, logits, begin)
        batch.filter_rows(filtered)
        best = batch.best([i for i, row in enumerate(rows) if not row.is_greedy and (is_whole or not row.is_filtered)])
        return _DeviceDraws(self._start_to_host(_packed(best)), best.ids if is_whole else None)

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

    def __init__(self, numbers: PendingCopy, token_ids: torch.Tensor | None) -> None:
        self._numbers = numbers
        self.token_ids = token_ids

    @property
    def is_here(self) -> bool:
        return self._numbers.is_here

    def read(self) -> Float64Array:
        return self._numbers.wait().numpy()


def _packed(best: Best) -> torch.Tensor:
    """Return scores and ids: float64 [draws, 2]."""
    return torch.stack([best.scores.double(), best.ids.double()], dim=1)
