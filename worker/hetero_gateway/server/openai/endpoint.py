"""The ASGI application: routes, answers whole and streamed, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hetero_api.contract import VERSION
from hetero_api.metrics import EXPOSITION_TYPE
from hetero_api.spec_http import ToolCallFormat
from hetero_api.v1 import admin_pb2
from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.text.answer_formats import AnswerFormat
from hetero_gateway.engine.text.answer_parser import AnswerParser
from hetero_gateway.engine.text.asked_answer import AskedAnswer
from hetero_gateway.group.adapters.registry import Adapter, AdapterRegistry
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.server.access.intake import Intake
from hetero_gateway.server.calls import Account, InFlight
from hetero_gateway.server.config import ServedModel
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.openai.adapters import LoadAdapterBody, UnloadAdapterBody
from hetero_gateway.server.openai.answers import (
    ChatFormatter,
    CompletionFormatter,
    Failure,
    Json,
    ResponseFormatter,
    answer_of,
    failure_of,
)
from hetero_gateway.server.openai.call import Call, Part, check_echo
from hetero_gateway.server.openai.embeddings import Embedder, EmbeddingsBody, embeddings
from hetero_gateway.server.openai.http_server import RequestBodies, client_gone
from hetero_gateway.server.openai.page import Page
from hetero_gateway.server.openai.requests import chat_requests, completion_requests
from hetero_gateway.server.openai.schema import (
    Body,
    ChatBody,
    CompletionBody,
    Generation,
    IgnoredFields,
    StreamOptions,
    parse_body,
)
from hetero_gateway.server.openai.tokens import DetokenizeBody, TokenizeBody, TokensBody
from hetero_gateway.server.reading import RequestReader
from hetero_gateway.server.validation import MAX_REQUEST_ID_CHARS

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "x-request-id"
IGNORED_HEADER: Final = "x-hetero-ignored"
"""Header that names the fields of a body which were left out."""
METRICS_PATH: Final = "/metrics"
ADAPTER_PATHS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths that load and unload adapters, where spec.engine.adapters.overHttp asks for them."""
CLIENT_CLOSED: Final = 499
"""Status, seen by nobody but the log and metrics, of a call whose client went away."""
_DONE: Final = b"data: [DONE]\n\n"
_EVENT_STREAM: Final = "text/event-stream"
_STREAM_HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers by which proxies pass pieces on as they come."""
_DOORS: Final = (
    "POST /v1/chat/completions, POST /v1/completions, POST /v1/embeddings, GET /v1/models, POST /tokenize, "
    "POST /detokenize, GET /version, GET /metrics"
)

A = TypeVar("A", bound=Body)
B = TypeVar("B", bound=Generation)
_Requests = Callable[[B, str], list[pb.GenerateRequest]]
"""Makes the requests of a body, under an id."""


class OpenAiEndpoint:
    """Routes of the API."""

    def __init__(
        self,
        core: EngineCore,
        *,
        intake: Intake,
        model: ServedModel,
        reader: RequestReader,
        metrics: GatewayMetrics,
        in_flight: InFlight,
        adapters: AdapterRegistry,
        rpcs: AdminRpcs,
        page: Page | None = None,
    ) -> None:
        """`page` None: none is served."""
        self._core = core
        self._page = page
        self._adapters = adapters
        self._rpcs = rpcs
        self._loads_adapters = model.group_settings.spec.engine.adapters.over_http
        self._intake = intake
        self._tokenizer = model.tokenizer
        self._special_ids = frozenset(model.tokenizer.special_ids.values())
        self._eos_token_ids = model.engine_config.eos_token_ids
        self._reader = reader
        self._embedder = Embedder(intake, reader)
        self._settings = model.resource.spec.gateway.http
        chosen = self._settings.tool_call_format
        self._answers = AnswerFormat.find(
            self._tokenizer.chat_template,
            special_id=self._tokenizer.special_id,
            calls=None if chosen is ToolCallFormat.AUTO else str(chosen),
        )
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
        loading = (self._load_adapter, self._unload_adapter) if self._loads_adapters else ()
        return Starlette(
            routes=[
                *(Route(path, call, methods=["POST"]) for path, call in zip(ADAPTER_PATHS, loading, strict=False)),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/version", self._version),
                Route("/health", self._health),
                Route(METRICS_PATH, self._scrape),
                *(self._page.routes() if self._page is not None else ()),
            ],
            exception_handlers={HTTPException: _wrong_door},
        )

    # --- routes -----------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, chat_requests, ChatFormatter)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, completion_requests, CompletionFormatter)

    async def _embeddings(self, request: Request) -> Response:
        async def answer(body: EmbeddingsBody) -> Response:
            work = embeddings(body, embedder=self._embedder, model=self._name)
            return await _unless_gone(request, work)

        return await self._answer_body(request, EmbeddingsBody, answer)

    async def _models(self, request: Request) -> Response:  # noqa: ARG002
        adapters = [self._adapter_object(adapter) for adapter in self._adapters]
        return JSONResponse({"object": "list", "data": [self._model_object, *adapters]})

    def _adapter_object(self, adapter: Adapter) -> Json:
        return self._model_object | {"id": adapter.name, "root": adapter.directory, "parent": self._name}

    async def _load_adapter(self, request: Request) -> Response:
        async def answer(body: LoadAdapterBody) -> Response:
            asked = admin_pb2.LoadAdapterRequest(name=body.lora_name, directory=body.lora_path)
            await self._rpcs.load_adapter(asked)
            return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

        return await self._answer_body(request, LoadAdapterBody, answer)

    async def _unload_adapter(self, request: Request) -> Response:
        async def answer(body: UnloadAdapterBody) -> Response:
            await self._rpcs.unload_adapter(admin_pb2.UnloadAdapterRequest(name=body.lora_name))
            return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

        return await self._answer_body(request, UnloadAdapterBody, answer)

    async def _model(self, request: Request) -> Response:
        try:
            adapter = self._adapter_of(request.path_params["model"])
        except Failure as failure:
            return failure.response()
        return JSONResponse(self._model_object if adapter is None else self._adapter_object(adapter))

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return Response(status_code=200 if self._core.is_serving else 503)

    async def _scrape(self, request: Request) -> Response:  # noqa: ARG002
        return Response(await self._metrics.scrape(), headers={"Content-Type": EXPOSITION_TYPE})

    async def _version(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"version": VERSION})

    async def _tokenize(self, request: Request) -> Response:
        async def answer(body: TokenizeBody) -> Response:
            tokens = [*await self._reader.tokenize(body.request())]
            told = {"count": len(tokens), "max_model_len": self._model_object["max_model_len"], "tokens": tokens}
            return await answer_of(lambda: told, num_numbers=len(tokens))

        return await self._answer_body(request, TokenizeBody, answer)

    async def _detokenize(self, request: Request) -> Response:
        async def answer(body: DetokenizeBody) -> Response:
            told = {"prompt": await self._reader.detokenize(body.request())}
            return await answer_of(lambda: told, num_numbers=len(body.tokens))

        return await self._answer_body(request, DetokenizeBody, answer)

    async def _answer_body(
        self, request: Request, kind: type[A], answer: Callable[[A], Awaitable[Response]]
    ) -> Response:
        """Answer a call that asks for no completions: read its body as `kind`, and return what `answer` returns."""

        async def respond(ticket: _Ticket, cleanup: ExitStack) -> Response:  # noqa: ARG001
            body = await self._body(request, kind, ticket)
            asked = body.model if isinstance(body, TokensBody) else None
            if asked is not None and self._adapter_of(asked) is not None and kind is EmbeddingsBody:
                raise Failure(400, "invalid_request_error", "model: adapters make no embeddings", param="model")
            return ticket.whole(await answer(body))

        return await self._accounted(request, respond)

    async def _body(self, request: Request, kind: type[A], ticket: _Ticket) -> A:
        async with self._bodies.received(request) as data:
            return await self._reader.run(lambda: parse_body(kind, data, ticket.ignored), cost=len(data))

    async def _accounted(
        self, request: Request, respond: Callable[[_Ticket, ExitStack], Awaitable[Response]]
    ) -> Response:
        """Return what `respond` makes of a call, or the answer to its error.

        `respond` adds to the stack what has to be done when it has ended; the ticket is closed last.
        """
        ignored = IgnoredFields(is_strict=self._settings.strict_fields)
        ticket = _Ticket(request.headers.get(REQUEST_ID_HEADER), ignored, self._metrics, self._in_flight)
        with ExitStack() as cleanup:
            cleanup.callback(ticket.close)
            try:
                return await respond(ticket, cleanup)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:  # noqa: BLE001 — the call's top: any error is answered
                return ticket.failure(error).response()

    def _adapter_of(self, asked: str) -> Adapter | None:
        """Return the adapter that is meant; None: the model itself. Raises Failure when another model is meant."""
        if asked in (self._name, self._root):
            return None
        adapter = self._adapters.find(asked)
        if adapter is None:
            served = ", ".join(map(repr, (self._name, *(each.name for each in self._adapters))))
            text = f"model: {asked!r} is not served here; this replica serves {served}"
            raise Failure(404, "invalid_request_error", text, param="model", code="model_not_found")
        return adapter

    # --- one call ---------------------------------------------------------------------------------------

    async def _answer(
        self, request: Request, kind: type[B], requests: _Requests[B], formatter: type[ResponseFormatter]
    ) -> Response:
        """Answer one call: read its body as `kind`, submit its `requests`, and answer in the form of `formatter`.

        Unless a stream is returned, which ends its requests itself, none is left in flight.
        """

        async def respond(ticket: _Ticket, cleanup: ExitStack) -> Response:
            with ExitStack() as held:
                body, asked = await self._read(request, kind, requests, ticket, held)
                check_echo(asked)
                parts = self._submit(asked, self._asked_answer(body))
            for part in parts:
                cleanup.callback(part.stream.cancel)
            name = self._shown_name(body.model)
            call = Call(
                parts,
                formatter=formatter(
                    ticket.call_id, name, self._tokenizer.token_bytes, body.wants_logprobs, self._special_ids
                ),
                echo=self._tokenizer.decode if body.wants_echo else None,
            )
            if body.stream:
                stream = _EventStream(_events(call, body.stream_options or StreamOptions(), ticket), call, ticket)
                cleanup.pop_all()
                return stream
            return ticket.whole(await _unless_gone(request, call.whole()))

        return await self._accounted(request, respond)

    async def _read(
        self, request: Request, kind: type[B], requests: _Requests[B], ticket: _Ticket, held: ExitStack
    ) -> tuple[B, list[GenerationRequest]]:
        """Return the body and the engine's requests, whose adapter stays loaded until `held` is closed.

        Raises Failure, ValidationError, InvalidArguments and others.
        """
        async with self._bodies.received(request) as data:
            body = await self._reader.run(lambda: parse_body(kind, data, ticket.ignored), cost=len(data))
            adapter = self._adapter_of(body.model)
            if body.request_id:
                ticket.call_id = ticket.engine_id = body.request_id
            messages = await self._reader.run(lambda: requests(body, ticket.engine_id), cost=len(data))
            for message in messages:
                message.model = "" if adapter is None else adapter.name
            answer = self._asked_answer(body)
            asked = []
            for message in messages:
                each = await self._reader.read(message, answer=answer)
                if each.adapter:
                    held.callback(self._adapters.begin(each.adapter))
                asked.append(each)
            return body, asked

    def _shown_name(self, asked: str) -> str:
        return self._name if asked == self._root else asked

    def _asked_answer(self, body: Generation) -> AskedAnswer | None:
        """Return the answer that a chat asks for; None for completions, whose text is the answer."""
        if not isinstance(body, ChatBody):
            return None
        return AskedAnswer(
            self._answers,
            tools=body.callable_tools,
            is_forced=body.forces_calls,
            in_parallel=body.parallel_tool_calls is not False,
        )

    def _submit(self, asked: Sequence[GenerationRequest], answer: AskedAnswer | None) -> list[Part]:
        """Submit all requests; when one is refused, none is left in flight."""
        parts: list[Part] = []
        with ExitStack() as cleanup:
            streams = self._intake.submit_all(asked)
            for stream in streams:
                cleanup.callback(stream.cancel)
            for each, stream in zip(asked, streams, strict=True):
                first = parts[-1].choices.stop if parts else 0
                new_parser = None if answer is None else self._parser_of(answer, each)
                parts.append(
                    Part(each, stream, first_choice=first, eos_token_ids=self._eos_token_ids, new_parser=new_parser)
                )
            cleanup.pop_all()
        return parts

    def _parser_of(self, answer: AskedAnswer, asked: GenerationRequest) -> Callable[[], AnswerParser]:
        prompt_end = self._reader.prompt_end(asked.prompt_token_ids)
        return lambda: answer.parser(prompt_end)


def with_cors(application: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return an application that pages of `origins` may call; browsers' own questions need no token."""
    if not origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER, "retry-after"],
    )


class _Ticket(Account):
    """Account of one call, under its id. Its outcome is that of a client that went away until set."""

    def __init__(
        self, call_id: str | None, ignored: IgnoredFields, metrics: GatewayMetrics, in_flight: InFlight
    ) -> None:
        super().__init__(in_flight, metrics.http_calls, outcome=str(CLIENT_CLOSED))
        own = uuid.uuid4().hex
        self.call_id = call_id[:MAX_REQUEST_ID_CHARS] if call_id else own
        self.engine_id = f"{call_id[: MAX_REQUEST_ID_CHARS // 2]}-{own}" if call_id else own
        """A header's id names calls in logs, and several calls may have one; the engine's are unique."""
        self.ignored = ignored

    def headers(self) -> dict[str, str]:
        """Return the headers of an answer."""
        names = self.ignored.header()
        return {REQUEST_ID_HEADER: self.call_id} | ({IGNORED_HEADER: names} if names else {})

    def whole(self, response: Response) -> Response:
        """Return a whole answer, which is a good outcome, with the call's headers."""
        response.headers.update(self.headers())
        self.outcome = "200"
        return response

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

    def __init__(self, events: AsyncIterator[bytes], call: Call, ticket: _Ticket) -> None:
        super().__init__(events, media_type=_EVENT_STREAM, headers=ticket.headers() | _STREAM_HEADERS)
        self._call = call
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()
            self._ticket.close()


async def _events(call: Call, options: StreamOptions, ticket: _Ticket) -> AsyncIterator[bytes]:
    try:
        async for chunk in call.chunks(usage_at_end=options.include_usage, usage_in_all=options.continuous_usage_stats):
            yield _event(chunk)
        ticket.outcome = "200"
        yield _DONE
    except Exception as error:  # noqa: BLE001 — the call's top: any error is answered
        yield _event(ticket.failure(error).body())


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer. Raises ClientDisconnect if the client goes away first, or the error that ends the answer."""
    answering = asyncio.create_task(answer)
    leaving = asyncio.ensure_future(client_gone(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        leaving.cancel()
        answering.cancel()


def _event(data: Json) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def _wrong_door(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = f"{request.method} {request.url.path} is not served; there is {_DOORS}"
    return Failure(status, "invalid_request_error", text, code="not_found").response()
