"""How the ranks of a forming group agree: small rounds among all of them, over Gloo.

What one rank alone can fail at (shared memory, a library that is not there) ends in a vote: all ranks learn of it, all
raise or all take the other way, and none is left waiting. Every method is a round that all ranks take part in, in one
order, and ends when the epoch is aborted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hetero_worker.distributed.gloo_rounds import GlooRounds, GlooWaits
from hetero_worker.distributed.store import PrefixStore, Wait, await_all
from hetero_worker.errors import ExchangeError


class Control:
    """One rank's end. Costs: a vote is one round of a few bytes a rank; `texts` is two."""

    def __init__(
        self,
        world: dist.ProcessGroup,
        store: PrefixStore,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        aborted: Callable[[], bool],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._aborted_elsewhere = aborted
        self._waits = GlooWaits(timeout_s=timeout_s, aborted=aborted)
        self._rounds = GlooRounds(world, tuple(range(world_size)), rank=rank, waits=self._waits)
        self._meetings = 0
        self._is_aborted = False

    def abort(self) -> None:
        """Make a blocked or later call raise ExchangeAborted. From any thread."""
        self._is_aborted = True
        self._waits.abort()

    def meet(self) -> None:
        """Wait for all ranks, before they enter something that cannot be interrupted. Raises as Wait.pause."""
        self._meetings += 1
        wait = Wait.begin(self._timeout_s, lambda: self._is_aborted or self._aborted_elsewhere())
        try:
            what = f"meeting-{self._meetings}"
            await_all(self._store, what, rank=self._rank, world_size=self._world_size, wait=wait)
        except RuntimeError as error:  # torch's DistError: rank 0, which hosts the store, is gone
            raise ExchangeError(f"a peer left while the group was forming: {error}") from error

    def ranks_voting_no(self, *, vote: bool) -> list[int]:
        """Ascending."""
        votes = self._rounds.all_gather(torch.tensor([vote], dtype=torch.int64), [1] * self._world_size)
        return [rank for rank, ballot in enumerate(votes) if not ballot.item()]

    def texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self._rounds.all_gather(torch.tensor([len(mine)], dtype=torch.int64), [1] * self._world_size)
        told = self._rounds.all_gather(mine, [int(size.item()) for size in sizes])
        return [bytes(letters.tolist()).decode() for letters in told]

    def problem(self, text: str) -> str:
        """What some ranks have a problem with, the same on every rank: empty if nobody has one."""
        told = {rank: problem for rank, problem in enumerate(self.texts(text)) if problem}
        if not told:
            return ""
        first = next(iter(told.values()))
        return f"rank(s) {', '.join(map(str, told))}: {first}"

    def agree(self, problem: ExchangeError | None, what: str) -> None:
        """All ranks raise ExchangeError if one has a problem: the one its own, the others a pointer to it."""
        failed = self.ranks_voting_no(vote=problem is None)
        if problem is not None:
            raise problem
        if failed:
            raise ExchangeError(f"rank(s) {failed} could not {what}; the reason is in their logs")
