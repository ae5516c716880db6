"""hetero.v1.Inference, the service that clients call.

Generate turns a call into a request of the engine and its events into messages. However the call ends, by its last
message, a status, the client's cancellation or its disappearance, the request ends with it.

Requests come as bytes: the reader parses them, bounded and off the loop where they are long.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import grpc

from hetero_api.contract import MAX_INFERENCE_MESSAGE_BYTES
from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.errors import DeadlineExceeded
from hetero_gateway.engine.request import FinishReason, GenerationRequest
from hetero_gateway.engine.stream import StreamEvent
from hetero_gateway.server.access.intake import Intake
from hetero_gateway.server.calls import Account, Context, InFlight, answering, when_over
from hetero_gateway.server.metrics import GatewayMetrics
from hetero_gateway.server.reading import RequestReader
from hetero_gateway.server.validation import check_abort

MAX_EVENT_BYTES: Final = MAX_INFERENCE_MESSAGE_BYTES // 2
_BYTES_A_RECEIVED_TOKEN: Final = 8
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Inference"].full_name
UNCOUNTED: Final = (f"/{_SERVICE}/Abort",)
"""Methods that no limit of calls may refuse."""


def serve_inference(server: grpc.aio.Server, servicer: InferenceServicer) -> None:
    """Have `server` answer hetero.v1.Inference."""
    generate: Any = grpc.unary_stream_rpc_method_handler(
        servicer.Generate, response_serializer=pb.GenerateEvent.SerializeToString
    )
    answers: dict[Any, Any] = {
        servicer.Abort: pb.AbortResponse,
        servicer.Tokenize: pb.TokenizeResponse,
        servicer.Detokenize: pb.DetokenizeResponse,
        servicer.GetModelInfo: pb.GetModelInfoResponse,
        servicer.GetServerInfo: pb.GetServerInfoResponse,
    }
    others: dict[str, Any] = {
        method.__name__: grpc.unary_unary_rpc_method_handler(method, response_serializer=kind.SerializeToString)
        for method, kind in answers.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Generate": generate, **others}),))


def _cost_of_received(asked: GenerationRequest) -> int:
    """Return how long it takes to go on behind received tokens, as bytes of plain text."""
    return _BYTES_A_RECEIVED_TOKEN * (1 + len(asked.stop)) * sum(map(len, asked.received))


class InferenceServicer:
    """The service's methods, under its names. `clock` is the engine's: its deadlines are times of it."""

    def __init__(
        self,
        intake: Intake,
        *,
        reader: RequestReader,
        model_info: pb.GetModelInfoResponse,
        server_info: Callable[[], pb.GetServerInfoResponse],
        metrics: GatewayMetrics,
        in_flight: InFlight,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._intake = intake
        self._reader = reader
        self._model_info = model_info
        self._server_info = server_info
        self._metrics = metrics
        self._clock = clock
        self._in_flight = in_flight

    async def Generate(self, data: bytes, context: Context) -> AsyncIterator[pb.GenerateEvent]:  # noqa: N802
        """Stream completions of one prompt."""
        # A client that goes away cancels.
        account = Account(self._in_flight, self._metrics.requests, outcome=grpc.StatusCode.CANCELLED.name)
        # This runs as soon as the call is over, also when it ends while a message is being written.
        when_over(context, account.close)
        async with answering(context, "Generate", account):
            arrived_s = self._clock()
            request = await self._reader.parse(pb.GenerateRequest, data)
            asked = await self._reader.read(request, deadline_s=deadline_of(context, now=arrived_s))
            prepared = await self._reader.run(partial(self._intake.prepare, asked), cost=_cost_of_received(asked))
            stream = self._intake.submit(asked, prepared)
            when_over(context, stream.cancel)
            prompt_tokens = stream.num_prompt_tokens
            yield started_event(asked.request_id, prompt_tokens=prompt_tokens, seed=asked.sampling.seed)
            is_whole = request.output_mode == pb.OUTPUT_MODE_FINAL_ONLY
            async for event in merged(stream) if is_whole else stream:
                if isinstance(event, pb.Finished):
                    account.outcome = FinishReason(event.reason).name
                for message in stream_events(event):
                    yield message

    async def Abort(self, data: bytes, context: Context) -> pb.AbortResponse:  # noqa: N802
        """End a request that is in flight."""
        async with answering(context, "Abort"):
            request = await self._reader.parse(pb.AbortRequest, data)
            check_abort(request)
            return pb.AbortResponse(found=self._intake.abort(request.request_id))

    async def Tokenize(self, data: bytes, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Return the token ids of text or a conversation."""
        async with answering(context, "Tokenize"):
            request = await self._reader.parse(pb.TokenizeRequest, data)
            return pb.TokenizeResponse(token_ids=await self._reader.tokenize(request))

    async def Detokenize(self, data: bytes, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Return the text of token ids."""
        async with answering(context, "Detokenize"):
            request = await self._reader.parse(pb.DetokenizeRequest, data)
            return pb.DetokenizeResponse(text=await self._reader.detokenize(request))

    async def GetModelInfo(self, data: bytes, context: Context) -> pb.GetModelInfoResponse:  # noqa: N802, ARG002
        """Return the model's name and bounds; the request has no fields."""
        return self._model_info

    async def GetServerInfo(self, data: bytes, context: Context) -> pb.GetServerInfoResponse:  # noqa: N802, ARG002
        """Return the server's name and its state right now; the request has no fields."""
        async with answering(context, "GetServerInfo"):
            return self._server_info()


def deadline_of(context: Context, *, now: float) -> float | None:
    """Return the call's deadline as a time of the engine's clock. Raises DeadlineExceeded if it has passed."""
    left_s: float | None = context.time_remaining()
    if left_s is None:
        return None
    if left_s <= 0:
        raise DeadlineExceeded("the call's deadline had passed when it arrived; give it more time")
    return now + left_s


def started_event(request_id: str, *, prompt_tokens: int, seed: int) -> pb.GenerateEvent:
    """Return the first event of a stream."""
    return pb.GenerateEvent(started=pb.Started(request_id=request_id, prompt_tokens=prompt_tokens, seed=seed))


def stream_events(event: StreamEvent) -> Iterator[pb.GenerateEvent]:
    """Yield the message for an event of the engine; several for log-probabilities that one has no room for."""
    if isinstance(event, pb.Delta):
        yield pb.GenerateEvent(delta=event)
    elif isinstance(event, pb.PromptLogprobs):
        positions = event.positions
        most = 1 + len(positions) // (1 + event.ByteSize() // MAX_EVENT_BYTES)
        for begin in range(0, max(1, len(positions)), most):
            part = pb.PromptLogprobs(positions=positions[begin : begin + most])
            yield pb.GenerateEvent(prompt_logprobs=part)
    else:
        yield pb.GenerateEvent(finished=event)


async def merged(events: AsyncIterable[StreamEvent]) -> AsyncIterator[StreamEvent]:
    """Yield all tokens of a completion in one event, or in as few as have room for them, just before its end."""
    pieces: dict[int, list[pb.Delta]] = {}
    async for event in events:
        if isinstance(event, pb.Delta):
            pieces.setdefault(event.index, []).append(event)
            continue
        if isinstance(event, pb.Finished):
            for group in _groups(pieces.pop(event.index, ())):
                yield _sum(group)
        yield event


def _groups(deltas: Iterable[pb.Delta]) -> Iterator[list[pb.Delta]]:
    group: list[pb.Delta] = []
    num_bytes = 0
    for delta in deltas:
        num_bytes += delta.ByteSize()
        if group and num_bytes > MAX_EVENT_BYTES:
            yield group
            group, num_bytes = [], delta.ByteSize()
        group.append(delta)
    if group:
        yield group


def _sum(deltas: Sequence[pb.Delta]) -> pb.Delta:
    whole = pb.Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
    )
    for delta in deltas:
        whole.token_ids.extend(delta.token_ids)
        whole.logprobs.extend(delta.logprobs)
    return whole
