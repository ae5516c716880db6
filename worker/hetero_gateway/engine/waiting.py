"""Completions that do not run: those in line, and those that will be.

In line are completions that could start now, in the order of urgency. Two kinds are kept out of it, so that the line
never has to be searched for somebody who can start:

- *Parked*: siblings whose request's first completion still has to compute the prompt's blocks that all of them share.
- *Returning*: preempted while steps in flight sample for them; they enter the line when these tokens are known.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetero_gateway.engine.live_heap import LiveHeap
from hetero_gateway.engine.request import Completion, Request


class WaitingLine:
    """Each waiting completion is in exactly one of the three places. The ended go away by themselves."""

    def __init__(self) -> None:
        self._line: LiveHeap[Completion] = LiveHeap(is_dead=_has_ended)
        self._num_pending: dict[Completion, int] = {}

    @property
    def has_returning(self) -> bool:
        """Whether somebody who was preempted will be in line within the steps in flight."""
        return bool(self._num_pending)

    def first(self) -> Completion | None:
        """The most urgent in line."""
        return self._line.first()

    def pop(self) -> Completion:
        """Take out what `first` has just returned."""
        return self._line.pop()

    def enter(self, request: Request, *, shares_blocks: bool) -> None:
        """Queue all completions of a request, none of which runs; parked behind the first if they share blocks."""
        waiting = [completion for completion in request.completions if not completion.ended]
        request.parked = waiting[1:] if shares_blocks else []
        for completion in waiting[:1] if shares_blocks else waiting:
            self._push(completion)

    def unpark(self, request: Request) -> None:
        """The shared blocks are computed."""
        parked, request.parked = request.parked, []
        for completion in parked:
            self._push(completion)

    def replace_first(self, request: Request) -> None:
        """A completion has ended. If it is the one that the parked ones wait for, the next takes its place."""
        request.parked = [completion for completion in request.parked if not completion.ended]
        if request.parked and request.num_open == len(request.parked):
            self._push(request.parked.pop(0))

    def put_back(self, completion: Completion, *, num_pending: int) -> None:
        """Queue a preempted completion, once so many more of its tokens are known."""
        if num_pending:
            self._num_pending[completion] = num_pending
        else:
            self._push(completion)

    def tokens_came(self, completions: Iterable[Completion]) -> None:
        """Each of these got a token."""
        for completion in completions:
            num_pending = self._num_pending.get(completion)
            if num_pending is not None:
                del self._num_pending[completion]
                self.put_back(completion, num_pending=num_pending - 1)

    def forget(self, completion: Completion) -> None:
        """A completion has ended. In line it goes away by itself."""
        self._num_pending.pop(completion, None)

    def clear(self) -> None:
        """Nobody waits."""
        self._line.clear()
        self._num_pending.clear()

    def _push(self, completion: Completion) -> None:
        self._line.push(completion.urgency, completion)


def _has_ended(completion: Completion) -> bool:
    return completion.ended
