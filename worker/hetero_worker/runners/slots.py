"""Slot state of a rank: what the gateway's deltas add up to.

Plans name requests by slot and say only what is new. The state here is the same on every rank after every step,
because every rank applies the same plans and appends the same sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_api.v1 import ranks_pb2
from hetero_worker.sampling.request import SamplingRow


@dataclass(slots=True)
class Slot:
    """One request's state."""

    token_ids: list[int]
    """Prompt and generated tokens."""
    num_computed: int
    """Leading tokens whose keys and values are in the cache."""
    num_blocks: int
    sampling: ranks_pb2.Sampling

    def next_draw(self) -> SamplingRow:
        """How the token after the known ones is drawn."""
        return SamplingRow(
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            min_p=self.sampling.min_p,
            seed=self.sampling.seed,
            position=len(self.token_ids),
        )


class SlotTable:
    """State of all slots; block tables lie in one array, so that a step's indices are computed at once."""

    def __init__(self, *, max_num_seqs: int, max_blocks: int) -> None:
        self._slots: list[Slot | None] = [None] * max_num_seqs
        self.block_tables: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        """[slots, blocks]: ids of a slot's blocks; zeros (the null block) behind them."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def max_blocks(self) -> int:
        return int(self.block_tables.shape[1])

    def get(self, slot: int) -> Slot | None:
        """None when the slot is free or out of range."""
        return self._slots[slot] if slot < len(self._slots) else None

    def bound(self, slot: int) -> Slot:
        """The state of a slot that is known to be in use."""
        state = self._slots[slot]
        if state is None:
            raise KeyError(f"slot {slot} is free")
        return state

    def release(self, slot: int) -> None:
        self._slots[slot] = None
        self.block_tables[slot] = 0

    def bind(self, sequence: ranks_pb2.NewSequence) -> None:
        self._slots[sequence.slot] = Slot(
            token_ids=list(sequence.token_ids),
            num_computed=sequence.num_computed_tokens,
            num_blocks=0,
            sampling=sequence.sampling,
        )
        self.append_blocks(sequence.slot, sequence.block_ids)

    def append_blocks(self, slot: int, block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        if ids:
            state = self.bound(slot)
            self.block_tables[slot, state.num_blocks : state.num_blocks + len(ids)] = ids
            state.num_blocks += len(ids)
