"""A runner that computes nothing and remembers what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import Exchange, LocalExchange
from hetero_worker.runners.base import LoadRequest, MaskSource, SampledToken, StepOutput, no_masks

WEIGHT_BYTES = 1000
KV_BYTES_PER_TOKEN = 16
GRAPH_BYTES = 70
GRAPH_RESERVE_BYTES = 90


@dataclass(frozen=True, slots=True)
class FakeStep:
    """Implements StepInFlight."""

    runner: FakeRunner
    plan: ranks_pb2.StepPlan

    @property
    def can_be_followed(self) -> bool:
        return self.runner.is_async and bool(self.plan.decode_slots)

    @property
    def is_done(self) -> bool:
        return self.runner.computed.is_set()

    def may_be_followed_by(self, plan: ranks_pb2.StepPlan) -> bool:
        return self.can_be_followed and bool(plan.decode_slots) and not plan.masked_slots

    def finish(self) -> StepOutput:
        self.runner.said.append(f"finish {self.plan.step_id}")
        self.runner.on_finish()
        return self.runner.outcome(self.plan)


class FakeRunner:
    """Implements Runner. Set `on_load`, `on_execute` or `on_finish` to make these do something else first.

    A command is done as told by `report`; masks are kept as they come. With `is_async`, steps that decode may overlap,
    and are done when `computed` is set.
    """

    def __init__(self) -> None:
        self.exchange: Exchange = LocalExchange()
        self.requests: list[LoadRequest] = []
        self.plans: list[ranks_pb2.StepPlan] = []
        self.masks: list[Sequence[bytes]] = []
        self.report = ranks_pb2.CommandReport(done=True)
        self.attached = 0
        self.detached = 0
        self.on_load: Callable[[], None] = _nothing
        self.on_execute: Callable[[], None] = _nothing
        self.on_finish: Callable[[], None] = _nothing
        self.home: int | None = None
        self.is_async = False
        self.has_multi_step = False
        self.computed = threading.Event()
        self.said: list[str] = []
        """Beginnings and ends, in their order."""

    @property
    def graph_bytes(self) -> int:
        return GRAPH_BYTES

    @property
    def held(self) -> LoadRequest | None:
        return self.requests[-1] if self.requests else None

    def attach(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.attached += 1

    def detach(self) -> None:
        self.detached += 1

    def load(self, request: LoadRequest) -> ranks_pb2.Loaded:
        self.on_load()
        kept = bool(self.requests) and self.requests[-1] == request
        self.requests.append(request)
        return ranks_pb2.Loaded(
            weight_bytes=WEIGHT_BYTES,
            kv_budget_bytes=5000,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            load_s=0.0 if kept else 1.5,
            kernels=("linear=fake",),
            graph_sizes=(1, 2),
            graph_reserve_bytes=GRAPH_RESERVE_BYTES,
        )

    def share_experts(self) -> str:
        return ""

    def allocate(self, num_blocks: int, block_size: int, num_snapshots: int = 0) -> int:
        return num_blocks * block_size * KV_BYTES_PER_TOKEN

    def execute(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> StepOutput:
        return self.begin(plan, masks).finish()

    def begin(self, plan: ranks_pb2.StepPlan, masks: MaskSource = no_masks) -> FakeStep:
        self.said.append(f"begin {plan.step_id}")
        self.on_execute()
        if plan.masked_slots:
            self.masks.append(masks())
        self.plans.append(plan)
        return FakeStep(self, plan)

    def execute_many(self, plans: Sequence[ranks_pb2.StepPlan], on_step: Callable[[], None]) -> Iterator[StepOutput]:
        for plan in plans:
            output = self.execute(plan)
            on_step()
            yield output

    def outcome(self, plan: ranks_pb2.StepPlan) -> StepOutput:
        if plan.HasField("command"):
            return StepOutput(report=self.report)
        sampling = [*plan.decode_slots, *(span.slot for span in plan.spans if span.sample)]
        return StepOutput(sampled=[SampledToken(slot, 100 + slot) for slot in sampling])


def _nothing() -> None:
    """The default of the hooks."""
