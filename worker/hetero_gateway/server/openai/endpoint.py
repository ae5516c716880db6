"""The ASGI application: routes, answers whole and streamed, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.server.calls import Account, InFlight
from hetero_gateway.server.config import ServedModel
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.openai.answers import (
    ChatFormatter,
    CompletionFormatter,
    Failure,
    Json,
    ResponseFormatter,
    failure_of,
)
from hetero_gateway.server.openai.call import Call, Part
from hetero_gateway.server.openai.http_server import RequestBodies, client_gone
from hetero_gateway.server.openai.requests import chat_requests, completion_requests
from hetero_gateway.server.openai.schema import ChatBody, CompletionBody, Generation, StreamOptions, parse_body
from hetero_gateway.server.reading import RequestReader

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "x-request-id"
CLIENT_CLOSED: Final = 499
"""Status, seen by nobody but the log and metrics, of a call whose client went away."""
_DONE: Final = "data: [DONE]\n\n"
_EVENT_STREAM: Final = "text/event-stream"
_DOORS: Final = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models"

B = TypeVar("B", bound=Generation)


class OpenAiEndpoint:
    """Routes of the API."""

    def __init__(
        self,
        core: EngineCore,
        *,
        model: ServedModel,
        reader: RequestReader,
        metrics: GatewayMetrics,
        in_flight: InFlight,
    ) -> None:
        self._core = core
        self._tokenizer = model.tokenizer
        self._eos_token_ids = model.engine_config.eos_token_ids
        self._reader = reader
        self._bodies = RequestBodies()
        self._name = model.group_settings.name
        uri = model.info.model_uri
        self._root = uri.partition("://")[2] or uri
        """Name of the weights, by which the model may be asked for as well."""
        self._model_object = {
            "id": self._name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "heteroinference",
            "root": self._root,
            "source": model.info.source,
            "max_model_len": model.info.max_model_len,
        }
        self._metrics = metrics
        self._in_flight = in_flight

    def application(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _wrong_door},
        )

    # --- routes -----------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, chat_requests, ChatFormatter)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, completion_requests, CompletionFormatter)

    async def _models(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"object": "list", "data": [self._model_object]})

    async def _model(self, request: Request) -> Response:
        try:
            self._check_model(request.path_params["model"])
        except Failure as failure:
            return _refusal(failure)
        return JSONResponse(self._model_object)

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return Response(status_code=200 if self._core.is_serving else 503)

    def _check_model(self, asked: str) -> None:
        """Raise Failure when another model is meant."""
        if asked not in (self._name, self._root):
            text = f"model: {asked!r} is not served here; this replica serves {self._name!r}"
            raise Failure(404, "invalid_request_error", text, param="model", code="model_not_found")

    # --- one call ---------------------------------------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        kind: type[B],
        requests: Callable[[B, str], list[pb.GenerateRequest]],
        formatter: type[ResponseFormatter],
    ) -> Response:
        """Answer one call: read its body as `kind`, submit its `requests`, and answer in the form of `formatter`.

        Unless a stream is returned, which ends its requests itself, none is left in flight.
        """
        ticket = _Ticket(request.headers.get(REQUEST_ID_HEADER), self._metrics, self._in_flight)
        with ExitStack() as cleanup:
            cleanup.callback(ticket.close)
            try:
                body, asked = await self._read(request, kind, requests, ticket)
                parts = self._submit(asked)
                for part in parts:
                    cleanup.callback(part.stream.cancel)
                call = Call(
                    parts,
                    formatter=formatter(ticket.call_id, self._name, self._tokenizer.token_bytes, body.wants_logprobs),
                    on_end=self._note_end,
                    echo=self._tokenizer.decode if body.wants_echo else None,
                )
                if body.stream:
                    stream = _EventStream(_events(call, body.stream_options or StreamOptions(), ticket), call, ticket)
                    cleanup.pop_all()
                    return stream
                answer = await _whole(request, call)
                response = JSONResponse(answer, headers={REQUEST_ID_HEADER: ticket.call_id})
                ticket.outcome = "200"
                return response
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:  # noqa: BLE001 — the call's top: any error is answered
                return _refusal(ticket.failure(error))

    async def _read(
        self, request: Request, kind: type[B], requests: Callable[[B, str], list[pb.GenerateRequest]], ticket: _Ticket
    ) -> tuple[B, list[GenerationRequest]]:
        """Return the body and the engine's requests. Raises Failure, ValidationError, InvalidArguments and others."""
        async with self._bodies.received(request) as data:
            body = await self._reader.run(lambda: parse_body(kind, data), cost=len(data))
            self._check_model(body.model)
            ticket.call_id = body.request_id or ticket.call_id
            messages = await self._reader.run(lambda: requests(body, ticket.call_id), cost=len(data))
            return body, [await self._reader.read(message) for message in messages]

    def _submit(self, asked: Sequence[GenerationRequest]) -> list[Part]:
        """Submit all requests; when one is refused, none is left in flight."""
        parts: list[Part] = []
        with ExitStack() as cleanup:
            for each in asked:
                first = parts[-1].choices.stop if parts else 0
                stream = self._core.submit(each)
                cleanup.callback(stream.cancel)
                parts.append(Part(each, stream, first_choice=first, eos_token_ids=self._eos_token_ids))
            cleanup.pop_all()
        return parts

    def _note_end(self, finished: pb.Finished) -> None:
        if finished.index == 0 and finished.timings.HasField("first_token"):
            self._metrics.first_token.observe(finished.timings.first_token.ToTimedelta().total_seconds())


class _Ticket(Account):
    """Account of one call, under its id. Its outcome is that of a client that went away until set."""

    def __init__(self, call_id: str | None, metrics: GatewayMetrics, in_flight: InFlight) -> None:
        super().__init__(in_flight, metrics.http_calls, outcome=str(CLIENT_CLOSED))
        self.call_id = call_id or uuid.uuid4().hex

    def failure(self, error: Exception) -> Failure:
        """Return the answer to `error`, whose status is the outcome."""
        failure = failure_of(error)
        if failure is None:
            logger.error("request_id=%s failed", self.call_id, exc_info=error)
            text = "internal error; the gateway's log tells what happened"
            failure = Failure(500, "server_error", text, code="internal")
        self.outcome = str(failure.status)
        return failure


class _EventStream(StreamingResponse):
    """Response that ends its call's requests however it ends, also while a chunk is being sent."""

    def __init__(self, events: AsyncIterator[str], call: Call, ticket: _Ticket) -> None:
        super().__init__(events, media_type=_EVENT_STREAM, headers=_stream_headers(ticket.call_id))
        self._call = call
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()
            self._ticket.close()


async def _events(call: Call, options: StreamOptions, ticket: _Ticket) -> AsyncIterator[str]:
    try:
        async for chunk in call.chunks(usage_at_end=options.include_usage, usage_in_all=options.continuous_usage_stats):
            yield _event(chunk)
        ticket.outcome = "200"
        yield _DONE
    except Exception as error:  # noqa: BLE001 — the call's top: any error is answered
        yield _event(ticket.failure(error).body())


async def _whole(request: Request, call: Call) -> Json:
    """Return the answer. Raises ClientDisconnect if the client goes away first, or the error that ends the call."""
    answering = asyncio.ensure_future(call.whole())
    leaving = asyncio.ensure_future(client_gone(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _stream_headers(call_id: str) -> Mapping[str, str]:
    # Proxies must pass pieces on as they come.
    return {REQUEST_ID_HEADER: call_id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _refusal(failure: Failure) -> Response:
    return JSONResponse(failure.body(), status_code=failure.status, headers=dict(failure.headers))


async def _wrong_door(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = f"{request.method} {request.url.path} is not served; there is {_DOORS}"
    return _refusal(Failure(status, "invalid_request_error", text, code="not_found"))
