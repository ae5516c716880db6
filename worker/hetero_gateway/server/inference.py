"""hetero.v1.Inference: what clients call.

Generate turns a call into a request of the engine and its events into messages. Whatever way the call ends, by its
last message, a status, the client's cancellation or its disappearance, the request ends with it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.engine.errors import DeadlineExceeded
from hetero_gateway.engine.stream import FinishedEvent, TokensEvent
from hetero_gateway.engine.tokenizer import TextTokenizer
from hetero_gateway.server.events import merged, started_event, stream_event
from hetero_gateway.server.in_flight import InFlight
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.prompts import decode, encode_chat, encode_text
from hetero_gateway.server.reading import RequestReader
from hetero_gateway.server.statuses import Context, answering, status_of, when_over
from hetero_gateway.server.validation import (
    check_abort,
    check_detokenize,
    check_tokenize,
)


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
        reader: RequestReader,
        facts: Facts,
        standing: Callable[[], Standing],
        metrics: GatewayMetrics,
        in_flight: InFlight,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._reader = reader
        self._facts = facts
        self._standing = standing
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._in_flight = in_flight

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateEvent]:  # noqa: N802
        outcome = _Outcome()
        self._in_flight.enter()
        # These run as soon as the call is over, also when it ends while a message is being written.
        when_over(context, self._in_flight.leave)
        when_over(context, lambda: self._metrics.count_request(outcome.name))
        async with answering(context, "Generate"):
            with outcome.named():
                arrived_s = self._clock()
                asked = await self._reader.read(request, deadline_s=_deadline(context, now=arrived_s))
                stream = self._core.submit(asked)
                when_over(context, stream.cancel)
                prompt_tokens = stream.num_prompt_tokens
                yield started_event(asked.request_id, prompt_tokens=prompt_tokens, seed=asked.sampling.seed)
                is_whole = request.output_mode == pb.OUTPUT_MODE_FINAL_ONLY
                is_first = True
                async for event in merged(stream) if is_whole else stream:
                    if isinstance(event, FinishedEvent):
                        outcome.name = event.reason.name
                    elif is_first and isinstance(event, TokensEvent):
                        is_first = False
                        self._metrics.observe_first_token(self._clock() - arrived_s)
                    yield stream_event(event)

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
