"""A step's inputs on a device: packed on the host in pinned memory, then copied in one piece to memory that lasts.

Block tables and lengths stay on the host; attention takes from them what it needs. A step's inputs are at the same
addresses as those of any earlier step of its size. Steps that only decode are padded, on the host, to the sizes that
graphs are made of.

A step may be filled while the one before is running. What that one reads on the device is safe by the order of the
device's stream, which comes to these copies only when it is through with it. The host's buffers are filled again when
the last copies out of them are done. Those copies came first in the step before, so the wait is short, and a second set
of buffers would gain nothing. A decode row whose token the running step draws has a `slots.pending_token` on the host;
`put_tokens` replaces it on the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.memory.streams import PAST, DeviceStreams, Moment
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.runners.graphs.padding import Padding
from hetero_worker.runners.input_batch import InputBatch, InputBuffers
from hetero_worker.runners.plan_check import PlanBounds, num_decode_rows
from hetero_worker.runners.slots import SlotTable, draw_of

_PARTS: Final = 4
"""Numbers of a token: its id, its position, its slot of the cache and its adapter."""


class DeviceInputs:
    """DeviceTokenInputs for one device."""

    def __init__(
        self, bounds: PlanBounds, padding: Padding, *, device: torch.device, streams: DeviceStreams, pins_memory: bool
    ) -> None:
        tokens, rows = bounds.max_num_batched_tokens, bounds.max_logit_rows
        self._padding = padding
        self._host = InputBuffers(bounds)
        self._streams = streams
        self._copies_end: Moment = PAST
        self._packed = torch.zeros(_PARTS * tokens + rows, dtype=torch.int64, pin_memory=pins_memory)
        self._there = torch.zeros(len(self._packed), dtype=torch.int64, device=device)
        """Token ids, positions, slots, logit rows and adapters of the last step, one after another."""

    def fill(self, plan: ranks_pb2.StepPlan, slots: SlotTable) -> InputBatch:
        """As StepInputs.fill; `decoder_input` of a step that only decodes has as many rows as its padded size.

        Steps that save states are not padded: no graph serves them.
        """
        self._copies_end.wait()  # the host's buffers are about to be overwritten
        batch = self._host.fill(plan, slots)
        step = batch.decoder_input
        if step.attention.only_decodes:
            count = num_decode_rows(plan)
            size = self._padding.padded(count)
            step = self._host.pad_decoding(count, size, has_adapters=step.adapters is not None)
        decoder_input = self._copied(step)
        self._copies_end = self._streams.now()
        return replace(batch, decoder_input=decoder_input)

    def put_tokens(self, num_decode: int, token_ids: torch.Tensor) -> None:
        """As DeviceTokenInputs.put_tokens."""
        ids = self._there[:num_decode]
        tokens = token_ids.index_select(0, draw_of(ids).clamp_(min=0))
        torch.where(ids < 0, tokens, ids, out=ids)

    def advance_decoding(self, count: int, slots: SlotTable) -> None:
        """As StepInputs.advance_decoding."""
        self._host.advance_decoding(count, slots)

    def _copied(self, step: DecoderInput) -> DecoderInput:
        assert step.logit_rows is not None, "a step of a plan says whose logits it wants"
        parts = [step.token_ids, step.positions, step.attention.slot_mapping, step.logit_rows]
        if step.adapters is not None:
            parts.append(step.adapters)
        sizes = list(map(len, parts))
        packed, there = self._packed[: sum(sizes)], self._there[: sum(sizes)]
        torch.cat(parts, out=packed)
        token_ids, positions, slot_mapping, logit_rows, *adapters = torch.split(
            there.copy_(packed, non_blocking=True), sizes
        )
        return DecoderInput(
            token_ids=token_ids,
            positions=positions,
            attention=replace(step.attention, slot_mapping=slot_mapping),
            logit_rows=logit_rows,
            adapters=adapters[0] if adapters else None,
            streams_experts=step.streams_experts,
        )
