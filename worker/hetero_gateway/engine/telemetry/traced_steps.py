"""TracedSteps: which steps ranks tell about, for the traces of requests in flight.

A step computes many requests. One of a few is sampled: a step every TRACE_INTERVAL_S while a traced request is in
flight, in turn for each of them. Without traced requests nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.step import ScheduledStep
from hetero_gateway.engine.telemetry.request_trace import RequestTrace

TRACE_INTERVAL_S: Final = 0.1
_MOST_STEPS: Final = 64
"""Steps that ranks have not told about yet, at most."""


class TracedSteps:
    """Traced requests in flight, and the steps that ranks will tell about."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.requests: list[RequestTrace] = []
        """Of requests in flight."""
        self._steps: dict[int, RequestTrace] = {}
        self._next_s = 0.0

    def add(self, trace: RequestTrace) -> None:
        """Add the trace of a request that begins; its first step is told about."""
        self.requests.insert(0, trace)
        self._next_s = 0.0

    def remove(self, trace: RequestTrace) -> None:
        """Remove the trace of a request that ended; steps that are out are still told about."""
        self.requests.remove(trace)

    def mark(self, step: ScheduledStep) -> RequestTrace | None:
        """Have ranks tell about a step if one is due; return the trace that it is for."""
        now = self._clock()
        if now < self._next_s:
            return None
        self._next_s = now + TRACE_INTERVAL_S
        traces = {id(each.completion.request): each.completion.request.trace for each in step.spans}
        traces |= {id(each.request): each.request.trace for each in step.decodes.completions}
        of_step = [trace for trace in self.requests if trace in traces.values()]
        if not of_step:
            return None
        trace = of_step[0]
        self.requests.remove(trace)
        self.requests.append(trace)
        step.plan.traced = True
        return trace

    def sent(self, step_id: int, trace: RequestTrace) -> None:
        """Note the id of a marked step."""
        if len(self._steps) >= _MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[step_id] = trace

    def take(self, rank: int, report: ranks_pb2.StepTrace) -> None:
        """Take what a step took on a rank; of a step that was not asked for, nothing."""
        trace = self._steps.get(report.step_id)
        if trace is not None:
            trace.step(rank, report)

    def forget_steps(self) -> None:
        """Forget the steps that are out: their group is gone."""
        self._steps.clear()
