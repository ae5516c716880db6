"""A gateway's face without an engine: real gRPC servers whose answers are scripted.

`FakeInference` answers a prompt by its first word, so a test says in the prompt what it wants to see:
"echo a b" streams the words back; "hang" starts and then waits until the call is cancelled; "invalid",
"full", "loading", "duplicate", "boom" end with the status of that name; "unfinished" ends too early.

"break-N a b c" streams N words of each completion in a call and then breaks it, until all were streamed;
"break-0-N ..." breaks the first N calls before Started and then echoes. It streams what comes after `received`, as a
gateway does, tells the end of every completion again, and answers for all `n` completions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from hetero_api.contract import GATEWAY_SERVICES
from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc, logprobs_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Scripted answers; remembers requests and whether calls were cancelled."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.called = threading.Event()
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:  # noqa: N802
        self.requests.append(request)
        self.called.set()
        verb, *words = _text(request).split()
        if verb in _STATUSES:
            context.abort_with_status(rpc_status.to_status(_STATUSES[verb]))
        if verb == "hang":  # Before the first event: the call may be cancelled as soon as that arrives.
            context.add_callback(self.cancelled.set)
        verb, breaks, *times = verb.split("-") if verb.startswith("break") else (verb, "")
        if times and len(self.requests) <= int(times[0]):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the group is gone")
        yield pb.GenerateEvent(started=pb.Started(request_id=request.request_id or "r1", prompt_tokens=3, seed=7))
        if verb == "hang":
            self.cancelled.wait(30)
            return
        yield from _stream(request, words, at_most=int(breaks) if breaks and not times else None, context=context)
        if verb != "unfinished":
            for index in range(max(1, request.sampling.n)):
                yield pb.GenerateEvent(finished=_finished(len(words), index=index))

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse(found=request.request_id == "r1")

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        text = request.text or " ".join(m.content for m in request.chat.messages)
        return pb.TokenizeResponse(token_ids=list(text.encode()))

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        return pb.GetModelInfoResponse(
            model_uri="hf://org/tiny", architecture="LlamaForCausalLM", vocab_size=256, max_model_len=64,
            dtype="float32", eos_token_ids=[2], has_chat_template=True, num_parameters=1000,
        )  # fmt: skip

    def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:  # noqa: N802
        return pb.GetServerInfoResponse(version="0.1.0", name="fake", ready=True, world_size=2, epoch=1, uptime_s=1.5)


class FakeGateway:
    """A server of FakeInference and grpc.health.v1 at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.inference = FakeInference()
        self._health = health.HealthServicer()
        self._executor = futures.ThreadPoolExecutor(max_workers=8)
        self._server = grpc.server(self._executor)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.inference, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def start(self) -> int:
        """The port, 1 for a unix socket."""
        port = self._server.add_insecure_port(self.address)
        self._server.start()
        return port

    def set_health(self, status: Any) -> None:
        for service in GATEWAY_SERVICES:
            self._health.set(service, status)

    def die(self) -> None:
        """Cut off every call, as the end of the process would."""
        self._server.stop(grace=None).wait()

    def stop(self) -> None:
        self.inference.cancelled.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=None).wait()
        self._executor.shutdown()


def _text(request: pb.GenerateRequest) -> str:
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        return request.chat.messages[-1].content
    return request.text if kind == "text" else "echo " + " ".join(map(str, request.token_ids.ids))


def _stream(
    request: pb.GenerateRequest, words: list[str], *, at_most: int | None, context: grpc.ServicerContext
) -> Iterator[pb.GenerateEvent]:
    """Each completion's words after those that the client has; breaks off after `at_most` of each."""
    count = max(1, request.sampling.n)
    have = [len(entry.token_ids) for entry in request.received] or [0] * count
    if request.sampling.HasField("prompt_logprobs"):
        positions = [logprobs_pb2.TokenLogprobs(token_id=9, logprob=-0.5, rank=1)]
        yield pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(positions=positions))
    for index in range(count):
        end = len(words) if at_most is None else min(len(words), have[index] + at_most)
        for token in range(have[index], end):
            logprobs = [_logprobs(token)] if request.sampling.HasField("logprobs") else []
            delta = pb.Delta(index=index, token_ids=[token], text=f"{words[token]} ", logprobs=logprobs)
            yield pb.GenerateEvent(delta=delta)
    if at_most is not None and min(have) + at_most < len(words):
        context.abort(grpc.StatusCode.UNAVAILABLE, "the group is gone")


def _logprobs(token: int) -> logprobs_pb2.TokenLogprobs:
    return logprobs_pb2.TokenLogprobs(
        token_id=token, logprob=-0.25, rank=1, top_token_ids=[token, 8], top_logprobs=[-0.25, -2.0]
    )


def _finished(tokens: int, *, index: int) -> pb.Finished:
    return pb.Finished(
        index=index,
        reason=pb.FINISH_REASON_STOP,
        stop_token_id=2,
        usage=pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=tokens),
        timings=pb.Timings(
            queued=duration_pb2.Duration(nanos=1_000_000),
            first_token=duration_pb2.Duration(nanos=20_000_000),
            total=duration_pb2.Duration(seconds=1, nanos=500_000_000),
        ),
    )


def _status(code: int, message: str, *details: Any) -> status_pb2.Status:
    packed = []
    for detail in details:
        wrapper = any_pb2.Any()
        wrapper.Pack(detail)
        packed.append(wrapper)
    return status_pb2.Status(code=code, message=message, details=packed)


_VIOLATION = error_details_pb2.BadRequest.FieldViolation(field="sampling.temperature", description="must be >= 0")
_STATUSES = {
    "invalid": _status(
        code_pb2.INVALID_ARGUMENT, "bad request", error_details_pb2.BadRequest(field_violations=[_VIOLATION])
    ),
    "full": _status(
        code_pb2.RESOURCE_EXHAUSTED,
        "queue is full",
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000)),
    ),
    "loading": _status(code_pb2.UNAVAILABLE, "the group is loading"),
    "duplicate": _status(code_pb2.ALREADY_EXISTS, "request r1 is in flight"),
    "boom": _status(code_pb2.INTERNAL, "a bug"),
}
