"""ShardDrawing: how a rank comes by what it tells of its vocabulary rows, which is where its logits lie's to say.

Draws are made in two halves. `start` asks for all that is needed of the logits; `StartedDraws.read` is what was asked
for. On a device much may be given to it in between: another step, even, whose tokens are what these draws seem to come
to (`Guesses`), before anybody on the host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hetero_worker.backends.base import HOST
from hetero_worker.sampling.request import SamplingRow
from hetero_worker.sampling.shard import ShardDraws, draws_of_shard, take_rows


class PendingCopy(Protocol):
    """A copy that is under way to the host."""

    @property
    def is_here(self) -> bool:
        """Whether `wait` would not wait."""
        ...

    def wait(self) -> torch.Tensor:
        """The copy; the same when called again."""
        ...


@dataclass(frozen=True, slots=True)
class Guesses:
    """Tokens that a step's draws seem to come to; rows of the vocabulary all of them, if not always the right ones."""

    ids: torch.Tensor
    """int64 [draws that have one], on the device."""
    copy: PendingCopy
    """The same on the host, for whoever learns what the draws did come to."""


class StartedDraws(Protocol):
    """A step's draws, of which all has been asked for."""

    @property
    def is_here(self) -> bool:
        """Whether what was asked for has come."""
        ...

    @property
    def guessed(self) -> Sequence[int | None]:
        """For each draw, its place in `Guesses.ids`; None: nothing can be said of it before `read`."""
        ...

    def guess(self) -> Guesses:
        """Without waiting, in the order of the present stream. One draw at least is guessed."""
        ...

    def read(self) -> ShardDraws:
        """What the shard tells of each draw; waits for what was asked for."""
        ...


class ShardDrawing(Protocol):
    """Implemented by HostDrawing and device_draws.DeviceDrawing, which tell the same to the bit but for nuclei's sums.

    `logits` is float32 [draws, shard rows] where the rank computed it, the shard's first row being vocabulary row
    `begin`; it stays as it is, until draws that were started have been read.
    """

    @property
    def name(self) -> str:
        """As reports have it."""
        ...

    def start(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> StartedDraws:
        """Ask for what the shard has to tell of each draw; it has at least one row."""
        ...

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """A copy of some rows on the host."""
        ...

    def summary(self) -> str | None:
        """What was drawn since the last call, and how; None if there is nothing to tell."""
        ...


class HostDrawing:
    """Implements ShardDrawing for logits on the host; others are copied there whole."""

    name = "host"

    def start(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> StartedDraws:
        return _HostDraws(rows, logits, begin)

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        return take_rows(logits.to(HOST), chosen)

    def summary(self) -> str | None:
        return None


class _HostDraws:
    """Implements StartedDraws where nothing can go on by itself."""

    is_here = True

    def __init__(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> None:
        self._rows = rows
        self._logits = logits
        self._begin = begin

    @property
    def guessed(self) -> Sequence[int | None]:
        return [None] * len(self._rows)

    def guess(self) -> Guesses:
        raise ValueError("draws on the host are known as soon as they are begun: there is nothing to guess")

    def read(self) -> ShardDraws:
        logits = self._logits
        return draws_of_shard(logits if logits.is_cpu else logits.to(HOST), self._rows, self._begin)


class StartedDrawing:
    """A ShardDrawing for one step, whose draws have been started."""

    def __init__(self, drawing: ShardDrawing, started: StartedDraws) -> None:
        self._drawing = drawing
        self._started = started

    @property
    def name(self) -> str:
        return self._drawing.name

    def start(self, rows: Sequence[SamplingRow], logits: torch.Tensor, begin: int) -> StartedDraws:  # noqa: ARG002
        return self._started

    def to_host(self, logits: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        return self._drawing.to_host(logits, chosen)

    def summary(self) -> str | None:
        return self._drawing.summary()


HOST_DRAWING: Final = HostDrawing()
