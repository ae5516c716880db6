"""Parts of a step that a device makes in its own way: inputs and forward passes, and their maker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.forward import ForwardPass, MultiStepForward
from hetero_worker.runners.input_batch import InputBatch, InputBuffers
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.slots import SlotTable


class StepInputs(Protocol):
    """Makes a step's tensors on the rank's device, in memory that lasts."""

    def fill(self, plan: ranks_pb2.StepPlan, slots: SlotTable) -> InputBatch:
        """Return the step's batch, valid until the next; the plan has been checked and applied to the slots."""
        ...

    def advance_decoding(self, count: int, slots: SlotTable) -> None:
        """Take the decode rows of the last batch, its first `count` rows, to be in the cache."""
        ...


class DeviceTokenInputs(StepInputs, Protocol):
    """Inputs that may contain tokens that only the device knows.

    Where a slot's last token is a `slots.pending_token`, `fill` leaves the token id out, and `put_tokens` has to follow
    before the step computes.
    """

    def put_tokens(self, num_decode: int, token_ids: torch.Tensor) -> None:
        """Put a running step's tokens, int64 [draws] on the device, into the last batch's decode rows; do not wait."""
        ...


@dataclass(frozen=True, slots=True)
class MultiStepParts:
    """Inputs and pass of multi-step decode."""

    inputs: InputBuffers
    forward: MultiStepForward


@dataclass(frozen=True, slots=True)
class StepParts:
    """Inputs and passes of steps on one cache."""

    inputs: StepInputs
    forward: ForwardPass
    async_inputs: DeviceTokenInputs | None = None
    """The inputs, where a step may begin before the one before is finished."""
    multi_step: MultiStepParts | None = None
    """Set where steps can draw by themselves."""


class StepMaker(Protocol):
    """Maker of steps on one kind of device."""

    def make(self, bounds: PlanBounds, request: LoadRequest) -> StepParts:
        """Create the parts for a new cache."""
        ...

    def kernels(self, request: LoadRequest, exchange: Exchange | None) -> tuple[str, ...]:
        """Return what Loaded.kernels says of steps that exchange through `exchange`."""
        ...

    def graph_sizes(self, request: LoadRequest) -> tuple[int, ...]:
        """Return Loaded.graph_sizes."""
        ...
