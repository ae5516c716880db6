"""An OpenTelemetry collector in the test's process: it keeps the spans that programs send over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.kube.ports import free_port


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collector while entered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.address = f"127.0.0.1:{free_port()}"
        self._server.add_insecure_port(self.address)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which programs send their spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}", "OTEL_BSP_SCHEDULE_DELAY": "200"}

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Keep the spans of one batch."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """Spans of a name, or whose name begins with it."""
        return [span for span in list(self.spans) if span.name.startswith(name)]

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()


def attributes(span: Span) -> dict[str, Any]:
    """Its attributes as plain values."""
    values = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value") or "string_value"
        value = getattr(each.value, kind)
        values[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values
