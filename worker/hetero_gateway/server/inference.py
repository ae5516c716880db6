"""hetero.v1.Inference: what clients call.

Generate turns a call into a request of the engine and its events into messages. Whatever way the call ends, by its
last message, a status, the client's cancellation or its disappearance, the request ends with it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import DeadlineExceeded
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.stream import FinishedEvent, RequestStream, TokensEvent
from hetero_gateway.engine.tokenizer import TextTokenizer
from hetero_gateway.server.events import delta_event, finished_event, started_event
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.prompts import decode, encode_chat, encode_text
from hetero_gateway.server.statuses import Context, answering, status_of, when_over
from hetero_gateway.server.validation import (
    check_abort,
    check_detokenize,
    check_generate,
    check_tokenize,
    sampling_config,
)

Events = AsyncIterator[TokensEvent | FinishedEvent]


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while the gateway runs."""

    model: pb.GetModelInfoResponse
    name: str
    version: str
    world_size: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How the group stands now."""

    ready: bool
    epoch: int


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """See the module. `clock` is the engine's: its deadlines are times of it."""

    def __init__(
        self,
        core: EngineCore,
        *,
        tokenizer: TextTokenizer,
        facts: Facts,
        standing: Callable[[], Standing],
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._facts = facts
        self._standing = standing
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._in_flight = _InFlight()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:  # noqa: N802
        outcome = _Outcome()
        self._in_flight.enter()
        # These run as soon as the call is over, also when it ends while a message is being written.
        when_over(context, self._in_flight.leave)
        when_over(context, lambda: self._metrics.count_request(outcome.name))
        async with answering(context, "Generate"):
            with outcome.named():
                async for event in self._generate(request, context):
                    if event.HasField("finished"):
                        outcome.name = pb.FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_")
                    yield event

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        async with answering(context, "Abort"):
            check_abort(request)
            return pb.AbortResponse(found=self._core.abort(request.request_id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        async with answering(context, "Tokenize"):
            check_tokenize(request)
            if request.WhichOneof("input") == "chat":
                token_ids = await encode_chat(self._tokenizer, request.chat)
            else:
                token_ids = await encode_text(self._tokenizer, request.text)
            return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        async with answering(context, "Detokenize"):
            check_detokenize(request, vocab_size=self._facts.model.vocab_size)
            return pb.DetokenizeResponse(text=await decode(self._tokenizer, list(request.token_ids)))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:  # noqa: N802, ARG002
        return self._facts.model

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:  # noqa: N802, ARG002
        async with answering(context, "GetServerInfo"):
            standing, stats = self._standing(), self._core.stats()
            return pb.GetServerInfoResponse(
                version=self._facts.version,
                name=self._facts.name,
                ready=standing.ready,
                world_size=self._facts.world_size,
                epoch=standing.epoch,
                uptime_s=self._clock() - self._started_s,
                running_requests=stats.running_requests,
                waiting_requests=stats.waiting_requests,
            )

    async def wait_idle(self) -> None:
        """Return once no Generate call is in flight."""
        await self._in_flight.none.wait()

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:
        arrived_s = self._clock()
        deadline_s = _deadline(context, now=arrived_s)
        check_generate(request, vocab_size=self._facts.model.vocab_size)
        asked = await self._read(request, deadline_s=deadline_s)
        stream = self._core.submit(asked)
        when_over(context, stream.cancel)
        yield started_event(asked.request_id, prompt_tokens=stream.num_prompt_tokens, seed=asked.sampling.seed)
        events = self._timed(stream, arrived_s=arrived_s)
        if request.output_mode == pb.OUTPUT_MODE_FINAL_ONLY:
            events = _merged(events)
        async for event in events:
            yield finished_event(event) if isinstance(event, FinishedEvent) else delta_event(event)

    async def _timed(self, stream: RequestStream, *, arrived_s: float) -> Events:
        """The stream's events; the first token's time is observed as it passes."""
        is_first = True
        async for event in stream:
            if is_first and isinstance(event, TokensEvent):
                self._metrics.observe_first_token(self._clock() - arrived_s)
                is_first = False
            yield event

    async def _read(self, request: pb.GenerateRequest, *, deadline_s: float | None) -> GenerationRequest:
        return GenerationRequest(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=tuple(await self._prompt(request)),
            sampling=sampling_config(request.sampling),
            cache_salt=request.cache_salt,
            deadline_s=deadline_s,
        )

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "chat":
                return await encode_chat(self._tokenizer, request.chat)
            case "text":
                return await encode_text(self._tokenizer, request.text)
            case _:
                return list(request.token_ids.ids)


class _InFlight:
    """How many calls are; `none` is set while there is none."""

    def __init__(self) -> None:
        self._count = 0
        self.none = asyncio.Event()
        self.none.set()

    def enter(self) -> None:
        self._count += 1
        self.none.clear()

    def leave(self) -> None:
        self._count -= 1
        if not self._count:
            self.none.set()


class _Outcome:
    """What a call is counted as: the client's cancellation until something else ends it."""

    def __init__(self) -> None:
        self.name = grpc.StatusCode.CANCELLED.name

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error that leaves this block names the outcome."""
        try:
            yield
        except Exception as error:
            self.name = status_of(error).code.name
            raise


def _deadline(context: Context, *, now: float) -> float | None:
    """The call's deadline as a time of the engine's clock. Raises DeadlineExceeded if it has passed."""
    left_s: float | None = context.time_remaining()
    if left_s is None:
        return None
    if left_s <= 0:
        raise DeadlineExceeded("the call's deadline had passed when it arrived; give it more time")
    return now + left_s


async def _merged(events: Events) -> Events:
    """All tokens in one event, just before the end."""
    token_ids: list[int] = []
    text: list[str] = []
    async for event in events:
        if isinstance(event, TokensEvent):
            token_ids.extend(event.token_ids)
            text.append(event.text)
        else:
            if token_ids:
                yield TokensEvent(tuple(token_ids), "".join(text))
            yield event
