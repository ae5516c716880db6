"""Traces by OpenTelemetry, off unless the environment names a collector.

The standard variables hold: OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) turns traces on, the
others (sampler, headers, certificates, service name, attributes) are the SDK's. Spans go out over gRPC, in batches, on
a thread of the SDK's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from hetero_api.contract import VERSION
from hetero_api.errors import HeteroError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TracingError(HeteroError):
    """The environment asks for traces in a way that is not supported; the message names the variable."""


def start_tracing(service: str, environment: Mapping[str, str]) -> TracerProvider | None:
    """Return a provider whose spans go to the environment's collector; None where it names none.

    `service` is the name of the program, unless the environment gives another. Raises TracingError.
    """
    if not any(environment.get(name) for name in ENDPOINTS) or environment.get("OTEL_SDK_DISABLED", "") == "true":
        return None
    for name in _PROTOCOLS:
        if (protocol := environment.get(name, "grpc")) != "grpc":
            raise TracingError(f"{name}: spans are sent by grpc only, not by {protocol}; name a collector's gRPC port")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {"service.version": VERSION}
    if "OTEL_SERVICE_NAME" not in environment:
        own["service.name"] = service
    provider = TracerProvider(resource=Resource.create(own))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
