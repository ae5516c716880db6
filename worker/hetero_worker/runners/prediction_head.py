"""PredictionHead: the model's own multi-token-prediction head, as a draft model of one layer.

Its input at position i is the model's state of token i, behind the last norm, and the embedding of token i + 1; its
output says what token i + 2 may be. So it reads a sequence without its first token, and needs states. The model tells
it those of each span that it computes, and those of decodes behind which tokens are drafted. Behind the newest token it
goes on with states of its own.

Steps that only decode, with nothing drafted behind them, tell no states: they would be slower. The head reads what it
missed later, with zeros for the states: its proposals are a little worse then, and change no token.

Where rank 0 has all rows of embedding and output head, the head computes with them; else it has them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch

from hetero_api.errors import ModelError
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.checkpoints.checkpoint import HeadCheckpoint
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.memory.streams import to_device
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.draft import DraftModel
from hetero_worker.runners.forward import ForwardStates
from hetero_worker.runners.model_state import ModelState, ServingCache
from hetero_worker.runners.plan_check import num_decode_rows
from hetero_worker.runners.shard import DTYPES
from hetero_worker.runners.slots import Int64Array, SlotTable


class StatePlace(NamedTuple):
    """Rows with the states of a slot's tokens from a position on."""

    position: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class TokenStates:
    """States of a step's tokens behind the last norm, [rows, hidden], by slot."""

    rows: torch.Tensor
    decodes: Mapping[int, StatePlace]
    spans: Mapping[int, StatePlace]

    def add_rows(self, into: Int64Array, slot: int, position: int) -> None:
        """Fill in the row of each of the slot's states from a position on; entries without a state stay."""
        place = self.spans.get(slot) or self.decodes.get(slot)
        if place is None:
            return
        begin = max(position, place.position)
        end = min(position + len(into), place.position + place.num_rows)
        if begin < end:
            into[begin - position : end - position] = np.arange(begin, end) - place.position + place.first_row


_NO_STATES: Final = TokenStates(torch.empty(0), {}, {})


class PredictionHead(DraftModel):
    """The first prediction head of the model in a rank's directory."""

    _skipped = 1

    def __init__(self, backend: DeviceBackend, request: LoadRequest) -> None:
        """Create it without weights. Raises ModelError if the model has no head."""
        config, directory = request.config.prediction_head, request.directory
        if config is None:
            raise ModelError(
                f"{directory}: spec.engine.speculative.kind is MTP, and these files have no multi-token-prediction "
                "head; put the files there that the gateway has, or take kind NGram"
            )
        open_weights = partial(HeadCheckpoint, prefixes=request.config.prediction_head_prefixes)
        super().__init__(backend, directory, open_weights, config=config)
        self._model = request.config
        self._target: Decoder | None = None
        """Decoder of the rank's shard when the cache was made."""
        self._states = _NO_STATES

    @property
    def name(self) -> str:
        """As DraftModel.name."""
        return f"prediction head of {self._config.num_parameters / 1e6:,.0f} million parameters"

    def is_of(self, request: LoadRequest) -> bool:
        """Return whether it is the head of the request's model."""
        return (self._directory, self._model) == (request.directory, request.config)

    def follow(self, state: ModelState, exchange: Exchange) -> None:
        """As DraftModel.follow; if the rank's weights were read again, so are the head's."""
        if self._target is not None and (state.shard is None or state.shard.decoder is not self._target):
            self.drop()
        super().follow(state, exchange)

    def drop(self) -> None:
        """As DraftModel.drop."""
        super().drop()
        self._target, self._states = None, _NO_STATES

    def release(self, state: ModelState) -> None:  # noqa: ARG002 - its weights are from the same files, and borrowed
        """As DraftModel.release."""
        self.drop()

    def _allocate(self, order: ranks_pb2.AllocateCache, state: ModelState) -> None:
        super()._allocate(order, state)
        shard, request, _ = state.loaded("a prediction head's cache")
        self._target, decoder = shard.decoder, self._loaded.decoder
        decoder.borrow(shard.decoder)
        rows = max(request.max_num_batched_tokens, request.max_num_seqs)
        dtype = DTYPES[request.dtype]
        decoder.states = torch.zeros(rows, self._config.hidden_size, dtype=dtype, device=decoder.device)

    def _request_like(self, request: LoadRequest) -> LoadRequest:
        shard, all_rows = request.shard_plan.ranks[request.rank], self._config.vocab_size
        borrows = shard.embedding_rows.size == shard.head_rows.size == all_rows
        return replace(super()._request_like(request), borrows_vocabulary=borrows)

    # --- states -----------------------------------------------------------------------------------------

    def read(self, known: SlotTable, states: TokenStates) -> None:
        """Take a step's states: compute the tokens behind those of its spans, and keep the others for `propose`."""
        cache, reading = self._ready_cache, ranks_pb2.StepPlan()
        self._states = states
        begins: dict[int, int] = {}
        room = self._loaded.request.max_num_batched_tokens - sum(place.num_rows for place in states.spans.values())
        for slot, place in states.spans.items():
            older = self._tokens(known, slot)[: place.position]
            begin = self._blocks.num_held(slot, older, known.block_tables[slot], owner=known.sampling(slot))
            if place.position - begin <= room:
                room -= place.position - begin
                begins[slot] = begin
            end = place.position + place.num_rows
            self._add_span(cache, known, reading, slot, begin=begins.get(slot, place.position), end=end)
        if reading.spans:
            with torch.inference_mode():
                self._run(cache, reading)
        for slot, begin in begins.items():
            self._note(known, slot, begin=begin, end=int(cache.slots.counts.num_tokens[slot]))

    def _add_span(
        self, cache: ServingCache, known: SlotTable, reading: ranks_pb2.StepPlan, slot: int, *, begin: int, end: int
    ) -> None:
        cache.slots.mirror(known, slot, num_tokens=end, num_computed=begin, skipped=self._skipped)
        reading.spans.add(slot=slot, num_tokens=end - begin)

    def _note(self, known: SlotTable, slot: int, *, begin: int, end: int) -> None:
        self._blocks.write(slot, self._tokens(known, slot)[:end], known.block_tables[slot], begin)

    def _run(self, cache: ServingCache, plan: ranks_pb2.StepPlan) -> ForwardStates:
        """Compute the plan's tokens with the states at hand, and zeros for those that are missing."""
        decoder, count = self._loaded.decoder, num_decode_rows(plan)
        batch = cache.inputs.fill(plan, cache.slots)
        attention, total = batch.decoder_input.attention, count + sum(span.num_tokens for span in plan.spans)
        missing = len(self._states.rows)
        rows = np.full(total, missing, dtype=np.int64)
        for row in range(count):
            slot, position = int(attention.decode.slots[row]), int(attention.decode.lengths[row]) - 1
            self._states.add_rows(rows[row : row + 1], slot, position)
        for span in attention.prefills:
            self._states.add_rows(rows[span.begin : span.end], span.slot, span.num_computed)
        into, index = decoder.states[:total], to_device(torch.from_numpy(rows), decoder.device)
        if missing:
            torch.index_select(self._states.rows, 0, index.clamp(max=missing - 1), out=into)
        into.masked_fill_((index == missing)[:, None], 0)
        return cache.forward.run(decoder, batch, caches=cache.layers, exchange=self._exchange)

    # --- proposals --------------------------------------------------------------------------------------

    def propose(self, known: SlotTable, slots: Sequence[int], count: int) -> list[ranks_pb2.Proposal]:
        """As DraftModel.propose. The step's states were read."""
        cache = self._ready_cache
        with torch.inference_mode():
            ready = self._catch_up_missed(cache, known, slots)
            drafts = self._draft(cache, known, ready, count)
        return [ranks_pb2.Proposal(slot=slot, token_ids=tokens) for slot, tokens in drafts.items() if tokens]

    def _catch_up_missed(self, cache: ServingCache, known: SlotTable, slots: Sequence[int]) -> list[int]:
        """Compute tokens that came while nothing was drafted; return the slots in which none is left."""
        room, reading, ready = self._loaded.request.max_num_batched_tokens, ranks_pb2.StepPlan(), list[int]()
        ends: dict[int, tuple[int, int]] = {}
        for slot in slots:
            begin = self._num_read(known, slot)
            until = max(begin, self._states.decodes[slot].position)
            end = min(until, begin + room)
            if end > begin:
                room -= end - begin
                ends[slot] = begin, end
                self._add_span(cache, known, reading, slot, begin=begin, end=end)
            if end == until:
                ready.append(slot)
        if reading.spans:
            self._run(cache, reading)
        for slot, (begin, end) in ends.items():
            self._note(known, slot, begin=begin, end=end)
        return ready

    def _begin(self, cache: ServingCache, known: SlotTable, slots: Sequence[int]) -> torch.Tensor:
        """Compute all tokens whose states the step has told, in one pass; return logits behind the newest ones."""
        own, plan, begins = cache.slots, ranks_pb2.StepPlan(decode_slots=slots), dict[int, int]()
        numbers: list[int] = []
        for slot in slots:
            begin, tokens = self._num_read(known, slot), self._tokens(known, slot)
            own.mirror(known, slot, num_tokens=begin + 1, num_computed=begin, skipped=self._skipped)
            if rest := tokens[begin + 1 :].tolist():
                plan.proposals.add(slot=slot, token_ids=rest)
            numbers.append(1 + len(rest))
            begins[slot] = begin
        states = self._run(cache, plan)
        last = [end - 1 for end in accumulate(numbers)]
        logits = states.logits_of(self._loaded.decoder, sum(numbers))[last]
        for slot, begin in begins.items():
            total = len(self._tokens(known, slot))
            own.mirror(known, slot, num_tokens=total, num_computed=total, skipped=self._skipped)
            self._note(known, slot, begin=begin, end=total)
        self._keep_states(cache, slots, states.hidden[last])
        return logits

    def _decode(self, cache: ServingCache, slots: Sequence[int]) -> torch.Tensor:
        """As DraftModel._decode; the states behind it are those that the next tokens go with."""
        plan = ranks_pb2.StepPlan(decode_slots=slots)
        states = self._run(cache, plan)
        logits = states.logits_of(self._loaded.decoder, len(slots))
        cache.inputs.advance_decoding(len(slots), cache.slots)
        self._keep_states(cache, slots, states.hidden[: len(slots)])
        return logits

    def _keep_states(self, cache: ServingCache, slots: Sequence[int], hidden: torch.Tensor) -> None:
        """Let the next token of each slot go with a row of hidden states [slots, hidden]."""
        computed = cache.slots.counts.num_computed
        places = {slot: StatePlace(int(computed[slot]), row, 1) for row, slot in enumerate(slots)}
        self._states = TokenStates(self._loaded.decoder.normed(hidden), places, {})
