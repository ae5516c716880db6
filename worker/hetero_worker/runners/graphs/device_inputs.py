"""A step's inputs on a device: filled on the host in pinned memory, then copied to tensors that last.

Block tables and lengths stay on the host; attention takes from them what it needs. A step's inputs are at the same
addresses as those of any earlier step of its kind. Steps that only decode are padded, on the host, to the sizes that
graphs are made of.

A step may be filled while the one before is running. What that one reads on the device is safe by the order of the
device's stream, which comes to these copies only when it is through with it. The host's buffers are filled again when
the last copies out of them are done. Those copies came first in the step before, so the wait is short, and a second set
of buffers would gain nothing. A decode row whose token the running step draws has a `slots.pending_token` on the host;
`put_tokens` replaces it on the device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.memory.streams import PAST, DeviceStreams, Moment
from hetero_worker.models.decoder import DecoderInput
from hetero_worker.runners.graphs.padding import Padding
from hetero_worker.runners.input_batch import InputBatch, InputBuffers
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.slots import SlotTable, draw_of


class DeviceInputs:
    """DeviceTokenInputs for one device."""

    def __init__(
        self, bounds: PlanBounds, padding: Padding, *, device: torch.device, streams: DeviceStreams, pins_memory: bool
    ) -> None:
        tokens, rows = bounds.max_num_batched_tokens, bounds.max_logit_rows
        self._padding = padding
        self._host = InputBuffers(bounds, pins_memory=pins_memory)
        self._streams = streams
        self._copies_end: Moment = PAST
        self._token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._slot_mapping = torch.zeros_like(self._token_ids)
        self._logit_rows = torch.zeros(rows, dtype=torch.int64, device=device)

    def fill(self, plan: ranks_pb2.StepPlan, slots: SlotTable) -> InputBatch:
        """As StepInputs.fill; `decoder_input` of a step that only decodes has as many rows as its padded size."""
        self._copies_end.wait()  # the host's buffers are about to be overwritten
        batch = self._host.fill(plan, slots)
        decoder_input = self._copied(batch.decoder_input if plan.spans else self._padded(len(plan.decode_slots)))
        self._copies_end = self._streams.now()
        return replace(batch, decoder_input=decoder_input)

    def put_tokens(self, num_decode: int, token_ids: torch.Tensor) -> None:
        """As DeviceTokenInputs.put_tokens."""
        ids = self._token_ids[:num_decode]
        tokens = token_ids.index_select(0, draw_of(ids).clamp_(min=0))
        torch.where(ids < 0, tokens, ids, out=ids)

    def advance_decoding(self, count: int, slots: SlotTable) -> None:
        """As StepInputs.advance_decoding."""
        self._host.advance_decoding(count, slots)

    def _padded(self, count: int) -> DecoderInput:
        return self._host.pad_decoding(count, self._padding.padded(count))

    def _copied(self, step: DecoderInput) -> DecoderInput:
        attention = replace(step.attention, slot_mapping=_copy(step.attention.slot_mapping, self._slot_mapping))
        return DecoderInput(
            token_ids=_copy(step.token_ids, self._token_ids),
            positions=_copy(step.positions, self._positions),
            attention=attention,
            logit_rows=None if step.logit_rows is None else _copy(step.logit_rows, self._logit_rows),
        )


def _copy(host: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor into the first elements of `room`, and return these."""
    return room[: len(host)].copy_(host, non_blocking=True)
