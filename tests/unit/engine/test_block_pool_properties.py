"""Whatever is taken, shared, filled and given back: no block is lost, none has two owners, no lookup lies."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetero_gateway.engine.block_pool import NULL_BLOCK, BlockDigests, BlockPool

pytestmark = pytest.mark.unit

BLOCK_SIZE = 2
TEXTS = [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]
CHAINS = [BlockDigests(cache_salt="", block_size=BLOCK_SIZE).upto(3, text) for text in TEXTS]


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take blocks for a text, fill some, and leave; `content` is what the blocks' KV would be of."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: BlockPool
        self.num_blocks = 0
        self.holders: list[tuple[int, list[int], int]] = []
        self.content: dict[int, bytes] = {}

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks=num_blocks)

    @rule(text=st.integers(0, len(TEXTS) - 1))
    def take(self, *, text: int) -> None:
        """What a request does that starts: hits, then new blocks."""
        hits = self.pool.lookup(CHAINS[text])
        assert [self.content[block] for block in hits] == CHAINS[text][: len(hits)], "a hit on other content"
        if not self.pool.can_allocate(3 - len(hits), keeping=hits):
            return
        self.pool.acquire(hits)
        taken = self.pool.allocate(3 - len(hits))
        held = {block for _, blocks, _ in self.holders for block in blocks}
        assert NULL_BLOCK not in taken
        assert len(set(taken)) == len(taken)
        assert not held & set(taken), "a block has two owners"
        for block in taken:
            self.content.pop(block, None)
        self.holders.append((text, hits + taken, len(hits)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill(self, *, data: st.DataObject) -> None:
        """A step has computed the next block of somebody."""
        index = data.draw(st.integers(0, len(self.holders) - 1))
        text, blocks, filled = self.holders[index]
        if filled < len(blocks):
            self.content[blocks[filled]] = CHAINS[text][filled]
            self.pool.register(blocks[filled], CHAINS[text][filled])
            self.holders[index] = text, blocks, filled + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, *, data: st.DataObject) -> None:
        """A sibling takes what is filled, found by a lookup or not."""
        text, blocks, filled = data.draw(st.sampled_from(self.holders))
        self.pool.acquire(blocks[:filled])
        self.holders.append((text, blocks[:filled], filled))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, *, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index)[1])

    @invariant()
    def counts_are_of_the_holders_blocks(self) -> None:
        if self.num_blocks:
            self.pool.check_integrity()
            held = {block for _, blocks, _ in self.holders for block in blocks}
            assert self.pool.used_blocks == len(held)
            assert self.pool.free_blocks == self.num_blocks - 1 - len(held)
            assert self.pool.cached_blocks <= self.pool.free_blocks

    def teardown(self) -> None:
        for _, blocks, _ in self.holders:
            self.pool.release(blocks)
        if self.num_blocks:
            assert self.pool.free_blocks == self.pool.capacity
            self.pool.check_integrity()


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(stateful_step_count=40)
