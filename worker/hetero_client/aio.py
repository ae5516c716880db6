"""The asyncio client: `HeteroClient` with `await`.

Make and use it on one event loop. Errors and the cancelling of closed streams are those of the synchronous client. A
cancelled task cancels its call too, and whoever reads on gets RequestCancelledError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2_grpc

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from hetero_client import wire
from hetero_client.access import Access, Calls
from hetero_client.channel import error_from, open_aio_channel
from hetero_client.client import CALL_TIMEOUT_S, RETRY_S, is_serving, may_serve, not_ready_message
from hetero_client.errors import DeadlineError, QueueFullError, RequestCancelledError, RequestError, UnavailableError
from hetero_client.messages import ChatMessage, Completion, Event, GenerateOptions, ModelInfo, Prompt, ServerInfo
from hetero_client.resuming import ResumableRequest, ServerRecord, health_request


class AsyncGenerateStream(AsyncIterator[Event]):
    """Events of one request: Started, any number of Delta, a Finished for each completion."""

    def __init__(self, resumable: ResumableRequest, *, inference: Any, health: Any, address: str) -> None:
        self._resumable = resumable
        self._inference, self._health = inference, health
        self._address = address
        self._closed = asyncio.Event()
        self._was_cancelled = False
        self._call = resumable.generate(inference)

    @property
    def request_id(self) -> str:
        """Id of the request, given or drawn."""
        return self._resumable.request_id

    async def __anext__(self) -> Event:
        try:
            event = await self._next()
        except asyncio.CancelledError:
            if not self._closed.is_set():  # the task was cancelled; otherwise aclose() ended the call
                self._was_cancelled = True
                await self.aclose()
                raise
            event = None
        if event is not None:
            return event
        if self._was_cancelled:
            problem = "a task that read its stream was cancelled, and the request with it"
            raise RequestCancelledError(f"request {self.request_id}: {problem}", code="CANCELLED")
        raise StopAsyncIteration

    async def _next(self) -> Event | None:
        """Return the next event; None at the end."""
        while not self._closed.is_set():
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                if not self._closed.is_set():
                    await self._resume(error)
                continue
            if message is grpc.aio.EOF:
                self._closed.set()
                self._resumable.check_end()
                break
            event = self._resumable.read(message)
            if event is not None:
                return event
        return None

    async def aclose(self) -> None:
        """Cancel the call, unless it is over."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _resume(self, broken: grpc.RpcError) -> None:
        try:
            pause_s = self._resumable.pause_after(error_from(broken, address=self._address))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause_s)
            await self._await_server()
            if not self._closed.is_set():
                self._call = self._resumable.generate(self._inference)
        except RequestError as error:
            self._closed.set()
            raise error from broken

    async def _await_server(self) -> None:
        """Wait until the server serves, or patience ends. The next call reports any error."""
        if self._closed.is_set():
            return
        self._call = self._resumable.watch(self._health)
        try:
            async for response in self._call:
                if may_serve(response):
                    break
        except grpc.RpcError:
            pass
        except asyncio.CancelledError:
            if not self._closed.is_set():
                raise
        finally:
            self._call.cancel()


class AsyncHeteroClient:
    """Client of one gateway at `address` ("host:port"); without `access` the environment has the credentials."""

    def __init__(self, address: str, *, access: Access | None = None, channel: grpc.aio.Channel | None = None) -> None:
        self.address = address
        access = access or Access.find()
        self._channel = channel or open_aio_channel(address, access)
        self._stub = Calls(inference_pb2_grpc.InferenceStub(self._channel), access.metadata)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._server = ServerRecord()

    def generate(
        self, prompt: Prompt, *, final_only: bool = False, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerateStream:
        """Stream the completions of a prompt and resume a stream that breaks; see GenerateOptions for the options."""
        resumable = ResumableRequest.of_prompt(prompt, final_only=final_only, server=self._server, **options)
        return AsyncGenerateStream(resumable, inference=self._stub, health=self._health, address=self.address)

    async def generate_text(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Return the whole completion at once."""
        wire.check_single(options.get("sampling"))
        return (await self.generate_texts(prompt, **options))[0]

    async def generate_texts(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> tuple[Completion, ...]:
        """Return all `sampling.n` completions at once, in order."""
        builder = wire.CompletionsBuilder()
        async with self.generate(prompt, final_only=True, **options) as stream:
            async for event in stream:
                builder.add(event)
        return builder.build()

    async def abort(self, request_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """End a request in flight; return False if there is none with this id."""
        request = pb.AbortRequest(request_id=request_id)
        return bool((await self._call(self._stub.Abort, request, timeout_s)).found)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[int, ...]:
        """Return the token ids that `generate` would see."""
        response = await self._call(self._stub.Tokenize, wire.tokenize_request(prompt), timeout_s)
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the text of token ids, without special tokens."""
        response = await self._call(self._stub.Detokenize, wire.detokenize_request(token_ids), timeout_s)
        return str(response.text)

    async def model_info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ModelInfo:
        """Return facts about the served model."""
        return wire.model_info(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    async def server_info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServerInfo:
        """Return the state of the server."""
        return wire.server_info(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the server serves requests. Raises DeadlineError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(UnavailableError, QueueFullError, DeadlineError):
                if await self._watch_until_serving(left_s):
                    return
            await asyncio.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
        raise DeadlineError(not_ready_message(self.address, timeout_s), code="DEADLINE_EXCEEDED")

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _watch_until_serving(self, timeout_s: float) -> bool:
        watch = self._health.Watch(health_request(), timeout=timeout_s, wait_for_ready=True)
        try:
            async for response in watch:
                if is_serving(response):
                    return True
        except grpc.RpcError as error:
            raise error_from(error, address=self.address) from error
        finally:
            watch.cancel()
        return False

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from(error, address=self.address) from error
