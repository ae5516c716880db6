"""RunnerDevice: all in which the runners of different devices differ. What a step does is the same on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import Platform
from hetero_worker.distributed.exchange import Exchange
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.forward import DrawingForward, ForwardPass
from hetero_worker.runners.input_batch import InputBatch, InputBuffers
from hetero_worker.runners.plan_check import PlanBounds
from hetero_worker.runners.slots import SlotTable


class StepInputs(Protocol):
    """Makes a step's tensors on the rank's device, in memory that lasts."""

    def fill(self, plan: ranks_pb2.StepPlan, slots: SlotTable) -> InputBatch:
        """The step's batch, valid until the next is made; the plan has been checked and applied to the slots."""
        ...

    def advance_decoding(self, count: int, slots: SlotTable) -> None:
        """The first `count` rows of the batch that was last made, its decode rows, are in the cache now."""
        ...


class ChainableInputs(StepInputs, Protocol):
    """Inputs that can be made of tokens that only the device knows.

    Of a decode row whose slot's last token is a guess's stand-in (`device_inputs.stand_in_of`), `fill` makes everything
    but the token id. One of these has to follow before the step computes.
    """

    def put_guesses(self, num_decode: int, guesses: torch.Tensor) -> None:
        """Into the batch that was made last, of so many decode rows: int64, on the device. Does not wait for it."""
        ...

    def correct(self, num_decode: int, tokens: Sequence[int]) -> None:
        """The same of tokens that the host knows, each in its guess's place; the step is then computed anew."""
        ...


@dataclass(frozen=True, slots=True)
class DrawingParts:
    """What steps that draw by themselves are made with; they only decode."""

    inputs: InputBuffers
    forward: DrawingForward


@dataclass(frozen=True, slots=True)
class StepParts:
    """What steps on one cache are made with."""

    inputs: StepInputs
    forward: ForwardPass
    chained: ChainableInputs | None = None
    """The inputs, where a step may begin before the one before is finished."""
    drawing: DrawingParts | None = None
    """Inputs and pass, where steps can draw by themselves."""


class StepMaker(Protocol):
    """How steps are made on a kind of device."""

    def make(self, bounds: PlanBounds, request: LoadRequest) -> StepParts:
        """For a new cache."""
        ...

    def kernels(self, request: LoadRequest, exchange: Exchange | None) -> tuple[str, ...]:
        """Return what LoadReport.kernels says of steps that exchange through `exchange`."""
        ...

    def graph_sizes(self, request: LoadRequest) -> tuple[int, ...]:
        """LoadReport.graph_sizes."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerDevice:
    """See the module."""

    platform: Platform
    memory_pool: MemoryPool
    steps: StepMaker
    offloads_weights: bool
    """Whether weights that sleep go to the host's memory; else they are there already and stay."""
