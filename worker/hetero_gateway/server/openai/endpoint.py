"""The ASGI application: routes, answers whole and streamed, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from hetero_gateway.engine.stream import FinishedEvent
from hetero_gateway.server.in_flight import InFlight
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.openai.answers import ChatVoice, CompletionVoice, Frame, Json
from hetero_gateway.server.openai.call import Call, Part
from hetero_gateway.server.openai.failures import Failure, failure_of, internal_failure, unknown_model
from hetero_gateway.server.openai.requests import chat_request, completion_requests
from hetero_gateway.server.openai.schema import ChatBody, CompletionBody, Generation, StreamOptions

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
REQUEST_ID_HEADER: Final = "x-request-id"
CLIENT_CLOSED: Final = 499
"""Status, seen by nobody but the log and metrics, of a call whose client went away."""
_DONE: Final = "data: [DONE]\n\n"
_EVENT_STREAM: Final = "text/event-stream"
_DOORS: Final = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models"

ReadRequest = Callable[[pb.GenerateRequest], Awaitable[GenerationRequest]]
"""Checks a request, tokenises its prompt, compiles its constraint. Raises InvalidArguments or InvalidRequest."""
B = TypeVar("B", bound=Generation)


@dataclass(frozen=True, slots=True)
class ServedName:
    """Names of the model: the resource's, and `root`, that of the weights. `created` is in Unix seconds."""

    name: str
    root: str
    source: str
    """Origin of weights that were changed on their way; "" for weights as `root` names them."""
    max_model_len: int
    created: int

    def check(self, asked: str) -> None:
        """Raises Failure when another model is meant."""
        if asked not in (self.name, self.root):
            raise unknown_model(asked, self.name)

    def describe(self) -> Json:
        """The API's model object."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "heteroinference",
            "root": self.root,
            "source": self.source,
            "max_model_len": self.max_model_len,
        }


@dataclass(frozen=True, slots=True)
class TextTools:
    """What this needs of the model's tokenizer."""

    token_bytes: Callable[[int], bytes]
    decode: Callable[[Sequence[int]], str]
    eos_token_ids: frozenset[int]


class OpenAiEndpoint:
    """See the module."""

    def __init__(
        self,
        core: EngineCore,
        *,
        read: ReadRequest,
        text: TextTools,
        served: ServedName,
        metrics: GatewayMetrics,
        in_flight: InFlight,
    ) -> None:
        self._core = core
        self._read = read
        self._text = text
        self._served = served
        self._metrics = metrics
        self._in_flight = in_flight

    def application(self) -> Starlette:
        """To be served by an ASGI server."""
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
        async def start(body: ChatBody, call_id: str) -> Call:
            frame = self._frame(f"chatcmpl-{call_id}", ChatVoice(self._text.token_bytes), bool(body.logprobs))
            parts = await self._submit([chat_request(body, request_id=call_id)])
            return Call(parts, frame=frame, on_end=self._note_end)

        return await self._answer(request, ChatBody, start)

    async def _completions(self, request: Request) -> Response:
        async def start(body: CompletionBody, call_id: str) -> Call:
            voice = CompletionVoice(self._text.token_bytes)
            frame = self._frame(f"cmpl-{call_id}", voice, body.logprobs is not None)
            parts = await self._submit(completion_requests(body, request_id=call_id))
            return Call(parts, frame=frame, on_end=self._note_end, echo=self._text.decode if body.echo else None)

        return await self._answer(request, CompletionBody, start)

    async def _models(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"object": "list", "data": [self._served.describe()]})

    async def _model(self, request: Request) -> Response:
        try:
            self._served.check(request.path_params["model"])
        except Failure as failure:
            return _refusal(failure)
        return JSONResponse(self._served.describe())

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return Response(status_code=200 if self._core.is_serving else 503)

    # --- one call ---------------------------------------------------------------------------------------

    async def _answer(self, request: Request, kind: type[B], start: Callable[[B, str], Awaitable[Call]]) -> Response:
        """Answer one call. Unless a stream is returned, which ends its requests itself, none is left in flight."""
        ticket = _Ticket(request.headers.get(REQUEST_ID_HEADER), self._metrics, self._in_flight)
        with ExitStack() as cleanup:
            cleanup.callback(ticket.close)
            try:
                body = kind.model_validate_json(await _body(request), strict=True)
                self._served.check(body.model)
                ticket.call_id = body.request_id or ticket.call_id
                call = await start(body, ticket.call_id)
                cleanup.callback(call.cancel)
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
            except Exception as error:  # noqa: BLE001 — the call's top: whatever it was, the client is told
                return _refusal(ticket.failure(error))

    async def _submit(self, requests: Sequence[pb.GenerateRequest]) -> list[Part]:
        """Submit all requests; when one is refused, none is left in flight."""
        asked = [await self._read(request) for request in requests]
        parts: list[Part] = []
        with ExitStack() as cleanup:
            for each in asked:
                first = parts[-1].choices.stop if parts else 0
                stream = self._core.submit(each)
                cleanup.callback(stream.cancel)
                parts.append(Part(each, stream, first_choice=first, eos_token_ids=self._text.eos_token_ids))
            cleanup.pop_all()
        return parts

    def _note_end(self, finished: FinishedEvent) -> None:
        first_token_s = finished.timings.first_token_s
        if finished.index == 0 and first_token_s is not None:
            self._metrics.observe_first_token(first_token_s)

    def _frame(self, object_id: str, voice: ChatVoice | CompletionVoice, with_logprobs: bool) -> Frame:
        return Frame(object_id, int(time.time()), self._served.name, voice, with_logprobs)


class _Ticket:
    """One call, in flight until it is closed. Until it has another outcome, that is of a client that went away."""

    def __init__(self, call_id: str | None, metrics: GatewayMetrics, in_flight: InFlight) -> None:
        self.call_id = call_id or uuid.uuid4().hex
        self.outcome = str(CLIENT_CLOSED)
        self._metrics = metrics
        self._in_flight = in_flight
        in_flight.enter()

    def failure(self, error: Exception) -> Failure:
        """What the client is told of `error`, which is the outcome."""
        failure = failure_of(error)
        if failure is None:
            logger.error("request_id=%s failed", self.call_id, exc_info=error)
            failure = internal_failure()
        self.outcome = str(failure.status)
        return failure

    def close(self) -> None:
        self._in_flight.leave()
        self._metrics.count_http_call(self.outcome)


class _EventStream(StreamingResponse):
    """Ends its call's requests however it ends, also while a chunk is being sent."""

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
    except Exception as error:  # noqa: BLE001 — the call's top: whatever it was, the client is told
        yield _event(ticket.failure(error).body())


async def _whole(request: Request, call: Call) -> Json:
    """Return the answer. Raises ClientDisconnect if the client goes away first, or the error that ends the call."""
    answering = asyncio.ensure_future(call.whole())
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


async def _body(request: Request) -> bytes:
    """Raises Failure when it is too long."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise Failure(413, "invalid_request_error", f"the body is longer than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def _gone(request: Request) -> None:
    """Returns once the client has gone away; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
