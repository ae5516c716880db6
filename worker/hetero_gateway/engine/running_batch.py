"""The running batch: completions that have a slot and blocks of the KV cache, and the pool of these blocks.

A residency begins with `start`, which takes all blocks of the known tokens at once, and ends with `leave`, which gives
up slot and blocks. In between, a completion is *prefilling* (known tokens are left to schedule), then in the decode
batch, then it may wait for the result of its last draw. What always holds:

- Blocks are registered for prefix lookups only when a step that is done has filled them, and only while they are the
  completion's.
- Shared blocks are full, hence never written again.

The decode batch holds the completions that compute one token, their newest, in every step. In a steady state every step
is the same for all of them, so nothing is done for each. Members are kept as parallel columns that a plan takes over in
bulk; how many tokens a member has follows from when it joined; and future events, that it needs another block or draws
its last token, are entered in a calendar when they are first known. A step costs what its day has in the calendars, and
bulk operations on columns.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, cast

from hetero_api.v1 import ranks_pb2
from hetero_api.v1.admin_pb2 import GetStatsResponse
from hetero_gateway.engine.block_pool import BlockPool, CacheLog, StateSnapshots
from hetero_gateway.engine.config import CacheSize, EngineConfig, max_running, num_proposal_snapshots
from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.step import NO_DECODES, DecodeView, TakenSnapshot

_slot_of = cast("Callable[[Completion], int]", attrgetter("slot"))
_token_ids_of = cast("Callable[[Completion], list[int]]", attrgetter("token_ids"))
_end_token_ids_of = cast("Callable[[Completion], frozenset[int]]", attrgetter("end_token_ids"))

_SHARES_NONE: Final = sys.maxsize
"""Registered blocks of a completion none of whose blocks, or snapshots, are to be found from now on."""


class RunningBatch:
    """Running completions on the cache of one group. `num_blocks` includes the null block."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        block_size: int,
        counts: GetStatsResponse,
        num_snapshots: int = 0,
        log: CacheLog | None = None,
    ) -> None:
        self._counts = counts
        places = num_proposal_snapshots(config, num_snapshots)
        self.proposal_snapshots = range(num_snapshots - places, num_snapshots)
        """Snapshots for the states behind proposed tokens; none where the model keeps no states."""
        num_snapshots -= places
        self._caching = config.enable_prefix_caching and (num_snapshots > 0 or not config.keeps_states)
        self._max_running = max_running(config)
        self.max_draws = config.max_num_seqs
        """Most draws of a step."""
        self.max_proposed = places if config.keeps_states else self.max_draws
        """Most proposed tokens of a step."""
        self.pool = BlockPool(num_blocks=num_blocks, log=log)
        self.cache = CacheSize(
            num_blocks=self.pool.capacity, block_size=block_size, shares_prompts=not config.keeps_states
        )
        self.snapshots: StateSnapshots | None = None
        """Of sequences' states; None if the model keeps none."""
        if config.keeps_states:
            self.snapshots = StateSnapshots(count=num_snapshots, num_blocks=self.pool.capacity)
        self.slots = BatchSlots(config.max_num_seqs)
        self.running: dict[Completion, None] = {}
        self.prefilling: dict[Completion, None] = {}
        self.decodes = DecodeBatch(block_size=block_size)

    @property
    def num_startable(self) -> int:
        """Number of completions that may start if there are blocks for them."""
        return self._max_running - len(self.running)

    def find_prefix(self, completion: Completion) -> list[int]:
        """Return blocks of the leading tokens whose KV is there: a sibling's, or cached. States are there, too.

        The last token is always computed: it is what is sampled from. So is every token of a prompt whose
        log-probabilities, or whose mean, are asked for.
        """
        blocks = self._blocks_with_prefix(completion)
        if self.snapshots is None or not blocks:
            return blocks
        return blocks[: self.snapshots.longest(completion.digests.upto(len(blocks), completion.token_ids))]

    def _blocks_with_prefix(self, completion: Completion) -> list[int]:
        pools_all = completion.request.asked.sampling.pooling == ranks_pb2.POOLING_MEAN
        if pools_all or computes_prompt_logprobs(completion):
            return []
        shared = self._blocks_of_sibling(completion)
        if not self._caching:
            return shared
        num_blocks = (completion.num_tokens - 1) // self.cache.block_size
        if len(shared) == num_blocks:
            return shared
        cached = self.pool.lookup(completion.digests.upto(num_blocks, completion.token_ids))
        return cached if len(cached) > len(shared) else shared

    def can_start(self, completion: Completion, prefix: list[int]) -> bool:
        """Return whether all its tokens have blocks: a completion that cannot be prefilled would be preempted again."""
        return self.pool.can_allocate(self._blocks_to_start(completion) - len(prefix), keeping=prefix)

    def start(self, completion: Completion, prefix: list[int]) -> list[int]:
        """Begin a residency behind the blocks `prefix`; return the new blocks."""
        self.pool.acquire(prefix)
        new_block_ids = self.pool.allocate(self._blocks_to_start(completion) - len(prefix))
        completion.block_ids = prefix + new_block_ids
        siblings = (each.num_registered_blocks for each in completion.request.completions if each.slot >= 0)
        completion.num_registered_blocks = _SHARES_NONE if _SHARES_NONE in siblings else len(prefix)
        completion.slot = self.slots.take()
        completion.num_scheduled = completion.num_filled = len(prefix) * self.cache.block_size
        self.running[completion] = None
        completion.request.num_running += 1
        self._counts.running_requests += completion.request.num_running == 1
        self.prefilling[completion] = None
        return new_block_ids

    def fitting(self, completion: Completion, proposed: Sequence[int]) -> Sequence[int]:
        """Return the proposed tokens of a decode for which there are blocks without a preemption."""
        num_blocks = len(completion.block_ids) + self.pool.free_blocks
        return proposed[: max(0, num_blocks * self.cache.block_size - completion.num_tokens)]

    def extend(self, completion: Completion, *, num_tokens: int) -> list[int]:
        """Give a decode blocks for its first `num_tokens` tokens; return the new ones."""
        new_block_ids = self.pool.allocate(max(0, self.cache.blocks_of(num_tokens) - len(completion.block_ids)))
        completion.block_ids += new_block_ids
        self.decodes.grew(completion)
        return new_block_ids

    def extend_as_possible(self, completion: Completion, *, num_tokens: int) -> list[int]:
        """Give a decode blocks for its first `num_tokens` tokens, as far as any are free; return the new ones."""
        most = (len(completion.block_ids) + self.pool.free_blocks) * self.cache.block_size
        return self.extend(completion, num_tokens=min(num_tokens, most))

    def leave(self, completion: Completion) -> None:
        """End the residency. From here on, `num_scheduled` is what steps in flight will have computed."""
        self.register(completion, self._num_filled(completion) // self.cache.block_size)
        if completion in self.decodes:
            self.decodes.leave(completion)
        self.prefilling.pop(completion, None)
        del self.running[completion]
        completion.request.num_running -= 1
        self._counts.running_requests -= completion.request.num_running == 0
        self.slots.give_up(completion.slot)
        self.pool.release(completion.block_ids)
        completion.slot = -1
        completion.block_ids = []
        completion.is_prefilled = False
        completion.residency += 1

    def register(self, completion: Completion, num_full_blocks: int) -> None:
        """Register the first `num_full_blocks` blocks of a running completion, computed by steps that are done."""
        begin = completion.num_registered_blocks
        if not self._caching or num_full_blocks <= begin:
            return
        completion.num_registered_blocks = num_full_blocks
        is_logged = self.pool.log.is_on and not completion.request.asked.cache_salt
        for index in range(begin, num_full_blocks):
            digest = completion.digests.of_block(index, completion.token_ids)
            if self.pool.register(completion.block_ids[index], digest) and is_logged:
                self._log(completion, index, digest)

    def _log(self, completion: Completion, index: int, digest: bytes) -> None:
        """Note that lookups find a block of the completion."""
        size = self.cache.block_size
        parent = completion.digests.of_block(index - 1, completion.token_ids) if index else None
        self.pool.log.stored(digest, parent, completion.token_ids[index * size : (index + 1) * size])

    def forget_prefixes(self) -> None:
        """Have no completion start behind what was computed until now, or goes on behind that."""
        for completion in self.running:
            completion.num_registered_blocks = _SHARES_NONE
        self.pool.forget()
        if self.snapshots is not None:
            self.snapshots.forget()

    def take_snapshots(self, completion: Completion, begin: int, end: int) -> list[TakenSnapshot]:
        """Return the snapshots to take of a running completion that computes its known tokens [begin, end)."""
        if self.snapshots is None or completion.num_registered_blocks == _SHARES_NONE:
            return []
        size, taken = self.cache.block_size, []
        places = self.snapshots.places(begin // size, end // size, last=self.shareable_blocks(completion))
        for num_blocks in places:
            digest = completion.digests.of_block(num_blocks - 1, completion.token_ids)
            snapshot = self.snapshots.take(digest)
            if snapshot is not None:
                taken.append(TakenSnapshot(num_blocks * size, snapshot, digest))
        return taken

    def states_of_prefix(self, completion: Completion, prefix: list[int]) -> int | None:
        """Return the snapshot that a completion behind the blocks `prefix` begins with, for the plan in the making."""
        if self.snapshots is None or not prefix:
            return None
        return self.snapshots.read(completion.digests.of_block(len(prefix) - 1, completion.token_ids))

    def least_urgent(self) -> Completion:
        """Return the completion that a preemption takes."""
        return max(self.running, key=lambda completion: completion.urgency)

    def shareable_blocks(self, completion: Completion) -> int:
        """Return how many full blocks of the prompt leave this completion a token to compute."""
        if self.snapshots is not None and not self.snapshots.spacing:
            return 0
        tokens = min(completion.num_prompt_tokens, completion.num_tokens - 1)
        return tokens // self.cache.block_size

    def _blocks_of_sibling(self, completion: Completion) -> list[int]:
        siblings = completion.request.completions
        count = self.shareable_blocks(completion) if len(siblings) > 1 else 0
        if count:
            for sibling in siblings:
                if sibling.slot >= 0 and self._num_filled(sibling) >= count * self.cache.block_size:
                    return sibling.block_ids[:count]
        return []

    def _num_filled(self, completion: Completion) -> int:
        return completion.num_tokens - 1 if completion.is_prefilled else completion.num_filled

    def _blocks_to_start(self, completion: Completion) -> int:
        # Room for the first drawn token as well, if it will be fed back: it is needed with the next step.
        return self.cache.blocks_of(min(completion.num_tokens + 1, completion.max_num_tokens - 1))


def computes_prompt_logprobs(completion: Completion) -> bool:
    """Return whether this completion has to give the log-probabilities that its request still waits for."""
    request = completion.request
    return request.prompt_logprobs is not None and request.first_open is completion


class BatchSlots:
    """Slots 0 .. count - 1 of the batch, lowest first. Every plan that goes out must carry `take_released`.

    A plan drops slots before it binds any. So a slot that was given up can be bound by the plan that has ranks drop it,
    and by none before.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._released: list[int] = []

    @property
    def has_released(self) -> bool:
        """Whether ranks keep state that the next plan drops."""
        return bool(self._released)

    def take(self) -> int:
        """Return a free slot, which is taken now."""
        return heapq.heappop(self._free)

    def give_up(self, slot: int) -> None:
        """Let the next plan release a slot."""
        self._released.append(slot)
        heapq.heappush(self._free, slot)

    def take_released(self) -> list[int]:
        """Return the slots that the plan in the making releases."""
        released, self._released = self._released, []
        return released


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
    """Completions that decode, in order of joining, which is their order in the batch.

    The batch counts its own steps: `day` is the number of the next one. A member has `decode_offset + day` tokens
    scheduled before that step, and that step draws the token after them.
    """

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
        """Add a completion from the next step on. All its tokens are scheduled but the one that is being drawn."""
        completion.decode_offset = completion.num_scheduled - self._day
        self._members[completion] = None
        self._enter_days(completion)
        self._view = None

    def leave(self, completion: Completion) -> None:
        """Take a completion out of the next step; its `num_scheduled` is up to date again."""
        del self._members[completion]
        completion.num_scheduled = completion.decode_offset + self._day
        self._last_draw_days.strike(completion.last_draw_day, completion)
        self._block_days.strike(completion.next_block_day, completion)
        self._view = None

    def view(self) -> DecodeView:
        """Return who decodes in the next step."""
        if self._view is None:
            self._view = _view_of(list(self._members))
        return self._view

    def due_for_block(self) -> list[Completion]:
        """Return the members whose blocks are full before the next step."""
        return self._block_days.on(self._day)

    def grew(self, completion: Completion) -> None:
        """Note that a member has more blocks."""
        self._block_days.strike(completion.next_block_day, completion)
        self._enter_block_day(completion)

    def catch_up(self, completion: Completion) -> int:
        """Go on behind all known tokens of a member; return how many more than one its last step gave. None is out."""
        self._last_draw_days.strike(completion.last_draw_day, completion)
        self._block_days.strike(completion.next_block_day, completion)
        offset = completion.num_tokens - 1 - self._day
        number, completion.decode_offset = offset - completion.decode_offset, offset
        self._enter_days(completion)
        return number

    def advance(self) -> tuple[Completion, ...]:
        """Go on to the next day; return the members that draw their last token in the step that goes out, and leave."""
        last_draws = self._last_draw_days.on(self._day)
        self._day += 1
        for completion in last_draws:
            self.leave(completion)
        return tuple(last_draws)

    def _enter_days(self, completion: Completion) -> None:
        # A step on day d draws token number decode_offset + d + 2, counted from 1.
        completion.last_draw_day = completion.max_num_tokens - 2 - completion.decode_offset
        self._last_draw_days.enter(completion.last_draw_day, completion)
        self._enter_block_day(completion)

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
