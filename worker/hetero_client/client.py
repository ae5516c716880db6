"""The synchronous client.

A client holds one channel and may be shared by threads. Calls raise the errors of `hetero_client.errors` and none of
grpc's. A stream that breaks is resumed (`resuming.py`). A stream that is closed, or dropped before its end, cancels its
call, and the gateway frees its memory within one step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from hetero_client import wire
from hetero_client.access import Access, Calls
from hetero_client.channel import error_from, open_channel
from hetero_client.errors import DeadlineError, QueueFullError, RequestError, UnavailableError
from hetero_client.messages import ChatMessage, Completion, Event, GenerateOptions, ModelInfo, Prompt, ServerInfo
from hetero_client.resuming import ResumableRequest, ServerRecord, health_request

CALL_TIMEOUT_S: Final = 30.0
"""Default limit of every call but Generate."""
RETRY_S: Final = 0.1
"""Pause between two attempts to reach a server that does not answer yet."""


class GenerateStream(Iterator[Event]):
    """Events of one request: Started, any number of Delta, a Finished for each completion."""

    def __init__(self, resumable: ResumableRequest, *, inference: Any, health: Any, address: str) -> None:
        self._resumable = resumable
        self._inference, self._health = inference, health
        self._address = address
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._call = resumable.generate(inference)

    @property
    def request_id(self) -> str:
        """Id of the request, given or drawn."""
        return self._resumable.request_id

    def __next__(self) -> Event:
        while not self._closed.is_set():
            try:
                message = next(self._call)
            except StopIteration:
                self._closed.set()
                self._resumable.check_end()
                break
            except grpc.RpcError as error:
                if not self._closed.is_set():
                    self._resume(error)
                continue
            event = self._resumable.read(message)
            if event is not None:
                return event
        raise StopIteration

    def close(self) -> None:
        """Cancel the call, unless it is over. Callable from another thread; iteration then ends."""
        with self._lock:
            self._closed.set()
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self, broken: grpc.RpcError) -> None:
        try:
            pause_s = self._resumable.pause_after(error_from(broken, address=self._address))
            if not self._closed.wait(pause_s):
                self._await_server()
                self._begin(lambda: self._resumable.generate(self._inference))
        except RequestError as error:
            self._closed.set()
            raise error from broken

    def _await_server(self) -> None:
        """Wait until the server serves, or patience ends. The next call reports any error."""
        self._begin(lambda: self._resumable.watch(self._health))
        with suppress(grpc.RpcError):
            any(may_serve(response) for response in self._call)
        self._call.cancel()

    def _begin(self, open_call: Callable[[], Any]) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._call = open_call()


class HeteroClient:
    """Client of one gateway at `address` ("host:port"); without `access` the environment has the credentials."""

    def __init__(self, address: str, *, access: Access | None = None, channel: grpc.Channel | None = None) -> None:
        self.address = address
        access = access or Access.find()
        self._channel = channel or open_channel(address, access)
        self._stub = Calls(inference_pb2_grpc.InferenceStub(self._channel), access.metadata)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._server = ServerRecord()

    def generate(
        self, prompt: Prompt, *, final_only: bool = False, **options: Unpack[GenerateOptions]
    ) -> GenerateStream:
        """Stream the completions of a prompt and resume a stream that breaks; see GenerateOptions for the options."""
        resumable = ResumableRequest.of_prompt(prompt, final_only=final_only, server=self._server, **options)
        return GenerateStream(resumable, inference=self._stub, health=self._health, address=self.address)

    def generate_text(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Return the whole completion at once."""
        wire.check_single(options.get("sampling"))
        return self.generate_texts(prompt, **options)[0]

    def generate_texts(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> tuple[Completion, ...]:
        """Return all `sampling.n` completions at once, in order."""
        builder = wire.CompletionsBuilder()
        with self.generate(prompt, final_only=True, **options) as stream:
            for event in stream:
                builder.add(event)
        return builder.build()

    def abort(self, request_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """End a request in flight; return False if there is none with this id."""
        request = pb.AbortRequest(request_id=request_id)
        return bool(self._call(self._stub.Abort, request, timeout_s).found)

    def tokenize(self, prompt: str | Sequence[ChatMessage], *, timeout_s: float = CALL_TIMEOUT_S) -> tuple[int, ...]:
        """Return the token ids that `generate` would see."""
        return tuple(self._call(self._stub.Tokenize, wire.tokenize_request(prompt), timeout_s).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._call(self._stub.Detokenize, wire.detokenize_request(token_ids), timeout_s).text)

    def model_info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ModelInfo:
        """Return facts about the served model."""
        return wire.model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    def server_info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServerInfo:
        """Return the state of the server."""
        return wire.server_info(self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server serves requests. Raises DeadlineError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(UnavailableError, QueueFullError, DeadlineError):
                if self._watch_until_serving(left_s):
                    return
            time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
        raise DeadlineError(not_ready_message(self.address, timeout_s), code="DEADLINE_EXCEEDED")

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch_until_serving(self, timeout_s: float) -> bool:
        watch = self._health.Watch(health_request(), timeout=timeout_s, wait_for_ready=True)
        try:
            return any(is_serving(response) for response in watch)
        except grpc.RpcError as error:
            raise error_from(error, address=self.address) from error
        finally:
            watch.cancel()

    def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from(error, address=self.address) from error


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Return whether the server says that it serves."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def may_serve(response: health_pb2.HealthCheckResponse) -> bool:
    """Return whether the server may serve: it does not say that it does not."""
    return bool(response.status != health_pb2.HealthCheckResponse.NOT_SERVING)


def not_ready_message(address: str, timeout_s: float) -> str:
    """Return the message for a gateway that did not become ready in time."""
    return f"the gateway at {address} did not become ready within {timeout_s:g} s"
