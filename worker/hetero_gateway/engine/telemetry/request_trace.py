"""RequestTrace: the spans of one request that is traced.

One span from the call's arrival to the end of its stream, by the GenAI conventions of OpenTelemetry. Below it are a
span for each phase (queue, prefill, decode), made when the request ends, and one for each sampled step of each rank.
Preemptions, lost groups and resumptions are events. No text or token is in it.

A request that is not traced has none, so steps cost nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from hetero_api.v1 import ranks_pb2

_NANOS: Final = 1_000_000_000
Attributes = Mapping[str, str | int | float | bool]


class RequestTrace:
    """Spans of a request, from its making to `end`. Times are of the monotonic clock, in seconds."""

    def __init__(self, tracer: Tracer, name: str, *, parent: Context, began_ns: int, attributes: Attributes) -> None:
        """Begin the request's span at `began_ns` (since 1970) below the caller's span, if `parent` has one."""
        self._tracer = tracer
        self._since_1970_ns = time.time_ns() - time.monotonic_ns()
        self._span = tracer.start_span(
            name, context=parent, kind=SpanKind.SERVER, start_time=began_ns, attributes=dict(attributes)
        )
        self._context = set_span_in_context(self._span)
        self._first_token_s: float | None = None
        self._reasons: list[str] = []

    @property
    def is_sampled(self) -> bool:
        """Whether anybody will see it."""
        return self._span.is_recording()

    def event(self, name: str, **attributes: str | int) -> None:
        """Note something that happened to the request now."""
        self._span.add_event(name, attributes)

    def fail(self, error: Exception) -> None:
        """Note the error that ends the request."""
        self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.set_attribute("error.type", type(error).__name__)

    def note_token(self, now_s: float) -> None:
        """Note the first token of a completion."""
        if self._first_token_s is None:
            self._first_token_s = now_s

    def note_end(self, reason: str) -> None:
        """Note why a completion ended."""
        self._reasons.append(reason)

    def step(self, rank: int, report: ranks_pb2.StepTrace) -> None:
        """Add the span of a step on a rank that computed this request among others."""
        attributes = {
            "hetero.rank": rank,
            "hetero.step": report.step_id,
            "hetero.rows": report.rows,
            "hetero.prefill": report.is_prefill,
            "hetero.exchange_s": report.exchange_s,
            "hetero.compute_s": (report.ended_ns - report.began_ns) / _NANOS - report.exchange_s,
        }
        span = self._tracer.start_span(
            f"step on rank {rank}", context=self._context, start_time=report.began_ns, attributes=attributes
        )
        span.end(report.ended_ns)

    def end(self, *, arrival_s: float, first_step_s: float | None, now_s: float, usage: Attributes) -> None:
        """End the request's span, and add its phases. `usage`: counts of tokens, by the conventions' names."""
        first_token_s = self._first_token_s
        self._phase("queue", arrival_s, now_s if first_step_s is None else first_step_s)
        if first_step_s is not None:
            self._phase("prefill", first_step_s, now_s if first_token_s is None else first_token_s)
        if first_token_s is not None:
            self._phase("decode", first_token_s, now_s)
        self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        self._span.set_attributes(usage)
        self._span.end(self._at(now_s))

    def refuse(self, error: Exception) -> None:
        """End the span of a request that the engine did not take."""
        self.fail(error)
        self._span.end()

    def _phase(self, name: str, began_s: float, ended_s: float) -> None:
        self._tracer.start_span(name, context=self._context, start_time=self._at(began_s)).end(self._at(ended_s))

    def _at(self, seconds: float) -> int:
        """Return a time of the monotonic clock as nanoseconds since 1970."""
        return self._since_1970_ns + int(seconds * _NANOS)
