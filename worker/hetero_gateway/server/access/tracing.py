"""Traces of calls: what a caller shows of its own trace, and the trace of a request that is made of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.telemetry.request_trace import RequestTrace

_FIELDS: Final = ("traceparent", "tracestate")
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Arrival of a call. `shown` are the fields of W3C Trace Context, which need not be valid."""

    at_ns: int
    shown: dict[str, str]


_arrival: ContextVar[_Arrival] = ContextVar("arrival")


def note_arrival(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Note for this task that a call has come with these headers, whose names are in lower case."""
    shown = {name: value for name, value in headers if name in _FIELDS and isinstance(value, str)}
    _arrival.set(_Arrival(time.time_ns(), shown))


class CallTracer:
    """Maker of traces for the requests of calls; `model` is the model's name."""

    def __init__(self, tracer: Tracer, *, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def begin(self, asked: GenerationRequest) -> RequestTrace | None:
        """Return the trace of a request of this task's call; None if it is not sampled."""
        arrival = _arrival.get()
        trace = RequestTrace(
            self._tracer,
            f"generate_content {self._model}",
            parent=_PROPAGATOR.extract(arrival.shown),
            began_ns=arrival.at_ns,
            attributes={
                "gen_ai.operation.name": "generate_content",
                "gen_ai.provider.name": "heteroinference",
                "gen_ai.request.model": self._model,
                "gen_ai.request.choice.count": asked.n,
                "gen_ai.response.id": asked.request_id,
                **({} if asked.max_tokens is None else {"gen_ai.request.max_tokens": asked.max_tokens}),
            },
        )
        return trace if trace.is_sampled else None
