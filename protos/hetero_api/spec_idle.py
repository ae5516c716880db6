"""Fields of the resource about groups that nobody asks anything, and about resources without replicas."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hetero_api.spec_types import SpecModel


class ResponderSpec(SpecModel):
    """A small pod behind the Service while spec.replicas is 0, and from there until the first replica serves."""

    enabled: bool = False
    """Answer calls then: HTTP by 503 with Retry-After, gRPC by UNAVAILABLE with google.rpc.RetryInfo. Otherwise
    connections are refused, as nothing listens.
    """
    retry_after_seconds: Annotated[int, Field(ge=1, le=86_400)] = 30
    """Seconds after which callers are asked to try again."""


class IdleSpec(SpecModel):
    """Behaviour while there are no requests, or no replicas."""

    sleep_after_seconds: Annotated[int, Field(ge=1, le=604_800)] | None = None
    """Seconds without a request after which a group gives memory up, each replica by itself. It stays ready and wakes
    with the next request, which waits for it. Default: never.
    """
    level: Annotated[int, Field(ge=1, le=2)] = 1
    """Memory that it gives up. 1: the KV cache, and weights on GPUs, which move to the host's memory. 2: the KV cache
    and all weights, which are read from the model's files again.
    """
    responder: ResponderSpec = ResponderSpec()
    """Answer to callers while no replica runs. One machine (`hetero up`) has no use for it."""
