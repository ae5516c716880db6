"""Spans of requests: which there are, whose children they are, and what they say; none unless asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import StatusCode

from hetero_api.tracing import TracingError, start_tracing
from hetero_api.v1 import ranks_pb2
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling, served_model

pytestmark = pytest.mark.unit

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SHOWN = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


class TracedBench(GatewayBench):
    """A gateway whose spans are kept."""

    def __init__(self, folder: Path, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        super().__init__(served_model(folder), tracer=provider.get_tracer("test"))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[TracedBench]:
    async with TracedBench(tmp_path) as bench:
        await bench.join()
        yield bench


async def test_a_request_and_its_phases_are_spans_below_the_callers(traced: TracedBench) -> None:
    asked = request([1] * 9, sampling=sampling(max_tokens=3, ignore_eos=True))
    await read_all(traced.inference().Generate(asked, metadata=SHOWN))
    spans = traced.spans()
    whole = spans["generate_content g"]
    assert whole.context is not None
    assert whole.parent is not None
    assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.input_tokens"] == 9
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    begun = [whole.start_time]
    for phase in ("queue", "prefill", "decode"):
        parent = spans[phase].parent
        assert parent is not None
        assert parent.span_id == whole.context.span_id
        begun.append(spans[phase].start_time)
    assert begun == sorted(begun, key=lambda time: time or 0)
    assert spans["decode"].end_time == whole.end_time


async def test_what_ranks_tell_of_a_sampled_step_is_a_span(traced: TracedBench) -> None:
    call = traced.inference().Generate(request([1], sampling=sampling(ignore_eos=True)), metadata=SHOWN)
    await call.read()
    core = traced.gateway.core
    (step_id,) = core._traced._steps
    report = ranks_pb2.StepTrace(step_id=step_id, began_ns=10**18, ended_ns=10**18 + 10**7, exchange_s=0.004, rows=2)
    core.take_step_trace(1, report)
    core.take_step_trace(1, ranks_pb2.StepTrace(step_id=step_id + 10_000))
    step = traced.spans()["step on rank 1"]
    assert step.attributes is not None
    assert (step.attributes["hetero.rank"], step.attributes["hetero.rows"]) == (1, 2)
    assert step.attributes["hetero.compute_s"] == pytest.approx(0.006)
    call.cancel()


async def test_a_refused_request_is_a_failed_span(traced: TracedBench) -> None:
    asked = request([1], request_id="x", sampling=sampling(ignore_eos=True))
    first = traced.inference().Generate(asked)
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError):
        await read_all(traced.inference().Generate(asked))
    (span,) = traced.exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "DuplicateRequest"
    first.cancel()


async def test_a_caller_who_is_not_sampled_costs_the_engine_nothing(tmp_path: Path) -> None:
    async with TracedBench(tmp_path, ALWAYS_OFF) as bench:
        await bench.join()
        call = bench.inference().Generate(request([1], sampling=sampling(ignore_eos=True)))
        await call.read()
        assert bench.gateway.core._traced.requests == []
        call.cancel()
        assert bench.spans() == {}


def test_traces_are_off_unless_the_environment_names_a_collector() -> None:
    assert start_tracing("x", {}) is None
    assert (
        start_tracing("x", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}) is None
    )
    with pytest.raises(TracingError, match="OTEL_EXPORTER_OTLP_PROTOCOL: spans are sent by grpc only"):
        start_tracing("x", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
