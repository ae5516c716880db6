"""The decode batch: completions that compute one token, their newest, in every step.

In a steady state every step is the same for all of them, so nothing is done for each. Members are kept as parallel
columns that a plan takes over in bulk; how many tokens a member has is computed from when it joined; and what will
happen to it, that it needs another block or draws its last token, is entered in a calendar when it is known first.
A step costs what its day has in the calendars, and bulk operations on columns.

The batch counts its own steps: `day` is the number of the next one. A member has
`decode_offset + day` tokens scheduled before that step, and that step draws the token after them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import cast

from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.step import NO_DECODES, DecodeView

_slot_of = cast("Callable[[Completion], int]", attrgetter("slot"))
_token_ids_of = cast("Callable[[Completion], list[int]]", attrgetter("token_ids"))
_end_token_ids_of = cast("Callable[[Completion], frozenset[int]]", attrgetter("end_token_ids"))


class _Calendar:
    """Completions by day, in order of entering; a day without entries takes no room."""

    def __init__(self) -> None:
        self._days: dict[int, dict[Completion, None]] = {}

    def enter(self, day: int, completion: Completion) -> None:
        self._days.setdefault(day, {})[completion] = None

    def strike(self, day: int, completion: Completion) -> None:
        entries = self._days.get(day)
        if entries is not None:
            entries.pop(completion, None)
            if not entries:
                del self._days[day]

    def on(self, day: int) -> list[Completion]:
        return list(self._days.get(day, ()))

    def __len__(self) -> int:
        return sum(map(len, self._days.values()))


class DecodeBatch:
    """Members, in order of joining, which is their order in the batch."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._members: dict[Completion, None] = {}
        self._day = 0
        self._block_days = _Calendar()
        self._last_draw_days = _Calendar()
        self._view: DecodeView | None = NO_DECODES

    def __contains__(self, completion: Completion) -> bool:
        return completion in self._members

    def __len__(self) -> int:
        return len(self._members)

    def join(self, completion: Completion) -> None:
        """From the next step on. Its `num_scheduled` tokens are all that it has, but the one that is being drawn."""
        completion.decode_offset = completion.num_scheduled - self._day
        # A step on day d draws token number decode_offset + d + 2, counted from 1.
        completion.last_draw_day = completion.max_num_tokens - 2 - completion.decode_offset
        self._members[completion] = None
        self._last_draw_days.enter(completion.last_draw_day, completion)
        self._enter_block_day(completion)
        self._view = None

    def leave(self, completion: Completion) -> None:
        """Out of the next step; `num_scheduled` is up to date again."""
        del self._members[completion]
        completion.num_scheduled = completion.decode_offset + self._day
        self._last_draw_days.strike(completion.last_draw_day, completion)
        self._block_days.strike(completion.next_block_day, completion)
        self._view = None

    def view(self) -> DecodeView:
        """Who decodes in the next step."""
        if self._view is None:
            self._view = _view_of(list(self._members))
        return self._view

    def due_for_block(self) -> list[Completion]:
        """Members whose blocks are full before the next step."""
        return self._block_days.on(self._day)

    def grew(self, completion: Completion) -> None:
        """A member that was due has another block."""
        self._block_days.strike(completion.next_block_day, completion)
        self._enter_block_day(completion)

    def advance(self) -> tuple[Completion, ...]:
        """The next step goes out. Those that draw their last token in it leave the batch and are returned."""
        last_draws = self._last_draw_days.on(self._day)
        self._day += 1
        for completion in last_draws:
            self.leave(completion)
        return tuple(last_draws)

    def _enter_block_day(self, completion: Completion) -> None:
        completion.next_block_day = len(completion.block_ids) * self._block_size - completion.decode_offset
        self._block_days.enter(completion.next_block_day, completion)


def _view_of(completions: list[Completion]) -> DecodeView:
    return DecodeView(
        completions=completions,
        slots=list(map(_slot_of, completions)),
        token_ids=list(map(_token_ids_of, completions)),
        end_token_ids=list(map(_end_token_ids_of, completions)),
        masked=tuple(c for c in completions if c.is_masked),
        has_logprobs=any(c.has_logprobs for c in completions),
    )
