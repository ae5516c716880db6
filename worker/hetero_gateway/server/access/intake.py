"""Requests of principals to the engine: within their limits, under ids and cache salts of their own.

The engine knows one space of request ids and one prefix cache. An id is preceded here by its principal's name, which
holds no slash, so nobody can abort, take over or guess at a request of others. A cache salt is keyed by a secret that
this process drew at its start and by the principal's name, so prompts of one principal never hit blocks of another:
neither `cached_tokens` nor the time to the first token tells what others asked. Where callers are not told apart, ids
and salts stay as they are.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import InvalidRequest
from hetero_gateway.engine.output_processor import Preparation
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.stream import RequestStream
from hetero_gateway.group.adapters.registry import AdapterRegistry
from hetero_gateway.server.access.limits import Meter, Meters
from hetero_gateway.server.access.principals import Principal, current_principal
from hetero_gateway.server.access.tracing import CallTracer

_SECRET_BYTES: Final = 32


class Intake:
    """Way into the engine for the calls of both doors. One asyncio loop."""

    def __init__(
        self,
        core: EngineCore,
        meters: Meters,
        *,
        tracer: CallTracer | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`adapters` None: requests ask for none."""
        self._core = core
        self._adapters = adapters
        self._tracer = tracer
        self._meters = meters
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def prepare(self, asked: GenerationRequest) -> Preparation:
        """As EngineCore.prepare."""
        return self._core.prepare(asked)

    def submit(
        self, asked: GenerationRequest, prepared: Preparation | None = None, *, is_charged: bool = False
    ) -> RequestStream:
        """Queue a request of the caller and return its stream; `prepared` as for `EngineCore.submit`.

        With `is_charged` its prompt has been counted. Raises LimitExceeded, or what `EngineCore.submit` raises.
        """
        (stream,) = self.submit_all((asked,), prepared, is_charged=is_charged)
        return stream

    def submit_all(
        self, asked: Sequence[GenerationRequest], prepared: Preparation | None = None, *, is_charged: bool = False
    ) -> list[RequestStream]:
        """Queue the requests of one call, which are within the limits together, or none; as `submit`."""
        principal = current_principal()
        meter = self._meters.under_way(principal)
        owned = [self._owned(each, principal) for each in asked]
        charges = [0 if is_charged else len(each.prompt_token_ids) for each in asked]
        for own in owned:
            if own.received:  # it takes the place of one that counts as long as it is there
                self._core.abort(own.request_id)
        meter.begin(completions=sum(each.n for each in asked), prompt_tokens=sum(charges), prompts=len(asked))
        streams: list[RequestStream] = []
        try:
            for each, own in zip(asked, owned, strict=True):
                streams.append(self._start(meter, each, own, prepared))
        except Exception:
            for stream in streams:
                stream.cancel()
            meter.end(completions=sum(each.n for each in asked[len(streams) :]), more_tokens=-sum(charges))
            raise
        return streams

    def charge(self, prompt_tokens: int) -> Meter:
        """Count the prompts of a call whose requests begin one by one; return the meter. Raises LimitExceeded."""
        meter = self._meters.under_way(current_principal())
        meter.begin(completions=0, prompt_tokens=prompt_tokens)
        return meter

    def _start(
        self, meter: Meter, asked: GenerationRequest, own: GenerationRequest, prepared: Preparation | None
    ) -> RequestStream:
        trace = None if self._tracer is None else self._tracer.begin(asked)
        end_adapter = _nothing

        def end(num_tokens: int) -> None:
            meter.end(completions=asked.n, more_tokens=num_tokens)
            end_adapter()

        try:
            end_adapter = self._begin_adapter(asked)
            return self._core.submit(own, prepared, on_end=end, trace=trace)
        except Exception as error:
            end_adapter()
            if trace is not None:
                trace.refuse(error)
            raise

    def _begin_adapter(self, asked: GenerationRequest) -> Callable[[], None]:
        """Count a request of its adapter; return a function for its end. Raises InvalidRequest if that is gone."""
        if not asked.adapter or self._adapters is None:
            return _nothing
        if not self._adapters.serves(asked):
            raise InvalidRequest("model", "its adapter was unloaded while the request was read; load it again")
        return self._adapters.begin(asked.adapter)

    def abort(self, request_id: str) -> bool:
        """End a request of the caller; return False if the caller has none of this id in flight."""
        return self._core.abort(_scoped(request_id, current_principal()))

    def _owned(self, asked: GenerationRequest, principal: Principal) -> GenerationRequest:
        """Return the request under an id and a salt of the principal's. Raises InvalidRequest for its priority."""
        if not principal.name:
            return asked
        return replace(
            asked,
            request_id=_scoped(asked.request_id, principal),
            cache_salt=self._salt(principal) + asked.cache_salt,
            priority=_priority(asked.priority, least=principal.limits.min_priority),
        )

    def _salt(self, principal: Principal) -> str:
        return hmac.new(self._secret, principal.name.encode(), hashlib.sha256).hexdigest()


def _nothing() -> None:
    """Count nothing: the request has no adapter."""


def _scoped(request_id: str, principal: Principal) -> str:
    return f"{principal.name}/{request_id}" if principal.name else request_id


def _priority(asked: int, *, least: int) -> int:
    """Return the priority of a request; one that asks for none has at least `least`. Raises InvalidRequest."""
    if asked and asked < least:
        raise InvalidRequest("priority", f"must be at least {least} with this key, not {asked}; lower numbers go first")
    return max(asked, least)
