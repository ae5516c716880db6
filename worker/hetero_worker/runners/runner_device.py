"""RunnerDevice: all in which the runners of different devices differ. What a step does is the same on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hetero_api.v1 import ranks_pb2
from hetero_worker.memory.accounts import MemoryAccount
from hetero_worker.platforms.base import Platform
from hetero_worker.runners.input_batch import InputBatch
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


@dataclass(frozen=True, slots=True)
class RunnerDevice:
    """See the module."""

    platform: Platform
    account: MemoryAccount
    make_inputs: Callable[[PlanBounds], StepInputs]
    parks_weights: bool
    """Whether weights that sleep go to the host's memory; else they are there already and stay."""
