"""Completions that do not run: those in line, and those that will be.

Completions in line could start now; they stand in the order of urgency. Two kinds are kept out of the line, so that it
never has to be searched for one that can start:

- *Parked*: siblings whose request's first completion still has to compute the prompt's blocks that all of them share.
- *Returning*: preempted while steps in flight sample for them; they enter the line when these tokens are known.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

from hetero_gateway.engine.request import Completion, Request

_REBUILD_FROM: Final = 64

ItemT = TypeVar("ItemT", Completion, Request)


class LiveHeap(Generic[ItemT]):
    """Priority queue whose entries die in place, smallest key first. No two living items have the same key.

    An item that has ended is dead. Requests end at any moment, wherever they are queued. Taking them out of a heap
    would cost O(n), so the dead stay until they surface, and when more than half of the heap may be dead it is rebuilt.
    Its size is therefore bounded by twice the living, and every operation costs O(log n), amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], ItemT]] = []
        self._rebuild_at = _REBUILD_FROM

    def push(self, key: tuple[Any, ...], item: ItemT) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > self._rebuild_at:
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapq.heapify(self._heap)
            self._rebuild_at = max(_REBUILD_FROM, 2 * len(self._heap))

    def first(self) -> ItemT | None:
        """Return the living item of the smallest key."""
        while self._heap and self._heap[0][1].ended:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> ItemT:
        """Take out the item that `first` has just returned."""
        return heapq.heappop(self._heap)[1]

    def clear(self) -> None:
        """Drop all items."""
        self._heap.clear()

    def __len__(self) -> int:
        """Return the number of entries, dead ones included."""
        return len(self._heap)


class WaitingLine:
    """All waiting completions, each in exactly one of the three places. The ended go away by themselves."""

    def __init__(self) -> None:
        self.line: LiveHeap[Completion] = LiveHeap()
        """Completions that could start now, by urgency."""
        self._num_pending: dict[Completion, int] = {}

    @property
    def has_returning(self) -> bool:
        """Whether a preempted completion will be in line within the steps in flight."""
        return bool(self._num_pending)

    def enter(self, request: Request, *, shares_blocks: bool) -> None:
        """Queue all completions of a request, none of which runs; parked behind the first if they share blocks."""
        waiting = [completion for completion in request.completions if not completion.ended]
        request.parked = waiting[1:] if shares_blocks else []
        for completion in waiting[:1] if shares_blocks else waiting:
            self._push(completion)

    def unpark(self, request: Request) -> None:
        """Queue the parked completions: the shared blocks are computed."""
        parked, request.parked = request.parked, []
        for completion in parked:
            self._push(completion)

    def replace_first(self, request: Request) -> None:
        """Queue the next parked completion if the one that ended is the one that they waited for."""
        request.parked = [completion for completion in request.parked if not completion.ended]
        if request.parked and request.num_open == len(request.parked):
            self._push(request.parked.pop(0))

    def put_back(self, completion: Completion, *, num_pending: int) -> None:
        """Queue a preempted completion once `num_pending` more of its tokens are known."""
        if num_pending:
            self._num_pending[completion] = num_pending
        else:
            self._push(completion)

    def tokens_came(self, completions: Iterable[Completion]) -> None:
        """Count one more known token for each of these."""
        for completion in completions:
            num_pending = self._num_pending.get(completion)
            if num_pending is not None:
                del self._num_pending[completion]
                self.put_back(completion, num_pending=num_pending - 1)

    def remove_ended(self, completion: Completion) -> None:
        """Stop waiting for the tokens of an ended completion. In line it goes away by itself."""
        self._num_pending.pop(completion, None)

    def clear(self) -> None:
        """Drop all waiting completions."""
        self.line.clear()
        self._num_pending.clear()

    def _push(self, completion: Completion) -> None:
        self.line.push(completion.urgency, completion)
