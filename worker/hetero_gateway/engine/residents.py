"""Who is in the KV cache: completions that have a slot and blocks, and the pool that the blocks are from.

A residency begins with `start`, which takes all blocks of the known tokens at once, and ends with `leave`, which gives
up slot and blocks. In between, a completion is *prefilling* (known tokens are left to schedule), then in the decode
batch, then it may wait for the result of its last draw. What always holds:

- Blocks are registered for prefix lookups only when a step that is done has filled them, and only while they are the
  completion's.
- Shared blocks are full, hence never written again.
"""

from __future__ import annotations

from hetero_gateway.engine.block_pool import BlockPool
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.counts import Counts
from hetero_gateway.engine.decode_batch import DecodeBatch
from hetero_gateway.engine.limits import CacheSize, max_running
from hetero_gateway.engine.request import Completion
from hetero_gateway.engine.slots import SlotTable


class Residents:
    """The cache of one group. `num_blocks` includes the null block."""

    def __init__(self, config: EngineConfig, *, num_blocks: int, block_size: int, counts: Counts) -> None:
        self._counts = counts
        self._caching = config.enable_prefix_caching
        self._max_running = max_running(config)
        self.pool = BlockPool(num_blocks=num_blocks)
        self.cache = CacheSize(num_blocks=self.pool.capacity, block_size=block_size)
        self.slots = SlotTable(config.max_num_seqs)
        self.running: dict[Completion, None] = {}
        self.prefilling: dict[Completion, None] = {}
        self.decodes = DecodeBatch(block_size=block_size)

    @property
    def num_startable(self) -> int:
        """Completions that may start, but for their blocks."""
        return self._max_running - len(self.running)

    def find_prefix(self, completion: Completion) -> list[int]:
        """Blocks of the leading tokens whose KV is there: a sibling's, or cached.

        The last token is always computed: it is what is sampled from. And so is every token of a prompt whose
        log-probabilities are asked for.
        """
        if computes_prompt_logprobs(completion):
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
        """Whether there are blocks for all its tokens: what cannot be prefilled would only be preempted again."""
        return self.pool.can_allocate(self._blocks_to_start(completion) - len(prefix), keeping=prefix)

    def start(self, completion: Completion, prefix: list[int]) -> list[int]:
        """Begin a residency behind the blocks `prefix`; the new blocks."""
        self.pool.acquire(prefix)
        new_block_ids = self.pool.allocate(self._blocks_to_start(completion) - len(prefix))
        completion.block_ids = prefix + new_block_ids
        completion.slot = self.slots.take()
        completion.num_registered_blocks = len(prefix)
        completion.num_scheduled = completion.num_filled = len(prefix) * self.cache.block_size
        self.running[completion] = None
        completion.request.num_running += 1
        self._counts.running_requests += completion.request.num_running == 1
        self.prefilling[completion] = None
        return new_block_ids

    def leave(self, completion: Completion) -> None:
        """End the residency. `num_scheduled` says from here on what steps in flight will have done."""
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
        """The first `num_full_blocks` blocks of a running completion are computed, by steps that are done."""
        begin = completion.num_registered_blocks
        if not self._caching or num_full_blocks <= begin:
            return
        completion.num_registered_blocks = num_full_blocks
        for index in range(begin, num_full_blocks):
            self.pool.register(completion.block_ids[index], completion.digests.of_block(index, completion.token_ids))

    def least_urgent(self) -> Completion:
        """Whom a preemption takes."""
        return max(self.running, key=lambda completion: completion.urgency)

    def shareable_blocks(self, completion: Completion) -> int:
        """Full blocks of the prompt, as many as leave this completion a token to compute."""
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
    """Whether the request still waits for the log-probabilities of its prompt, and this completion is to give them."""
    request = completion.request
    return request.prompt_logprobs is not None and request.first_open is completion
