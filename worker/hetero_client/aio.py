"""The asyncio client: `HeteroClient` with `await`.

To be made and used on one event loop. The same errors as the synchronous client, the same cancelling of
calls whose stream is closed; a cancelled task cancels its call too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import inference_pb2_grpc
from hetero_client import wire
from hetero_client.channel import channel_options
from hetero_client.client import CALL_TIMEOUT_S, RETRY_S, health_request, is_serving, not_ready_message
from hetero_client.errors import DeadlineError, UnavailableError
from hetero_client.messages import ChatMessage, Completion, Event, ModelInfo, Prompt, SamplingParams, ServerInfo
from hetero_client.status import error_from


class AsyncGenerateStream(AsyncIterator[Event]):
    """The events of one request: Started, any number of Delta, Finished."""

    def __init__(self, call: Any, *, address: str) -> None:
        self._call = call
        self._address = address
        self._reader = wire.StreamReader()
        self._closed = False

    @property
    def request_id(self) -> str:
        """The request's id; empty until Started came."""
        return self._reader.request_id

    async def __anext__(self) -> Event:
        while not self._closed:
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                self._closed = True
                raise error_from(error, address=self._address) from error
            except asyncio.CancelledError:
                if not self._closed:  # The task was cancelled; otherwise aclose() ended the call.
                    self._call.cancel()
                    raise
                break
            if message is grpc.aio.EOF:
                self._closed = True
                self._reader.check_end()
                break
            event = self._reader.read(message)
            if event is not None:
                return event
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the call, unless it is over."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncHeteroClient:
    """Talks to one gateway at `address` ("host:port")."""

    def __init__(self, address: str, *, channel: grpc.aio.Channel | None = None) -> None:
        self.address = address
        self._channel = channel or grpc.aio.insecure_channel(address, options=channel_options(address))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        cache_salt: str = "",
        final_only: bool = False,
    ) -> AsyncGenerateStream:
        """Stream a completion. `timeout_s` is the request's deadline; None means none."""
        request = wire.generate_request(
            prompt, sampling=sampling, request_id=request_id, cache_salt=cache_salt, final_only=final_only
        )
        return AsyncGenerateStream(self._stub.Generate(request, timeout=timeout_s), address=self.address)

    async def generate_text(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> Completion:
        """The whole completion at once."""
        builder = wire.CompletionBuilder()
        stream = self.generate(
            prompt,
            sampling=sampling,
            request_id=request_id,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            final_only=True,
        )
        async with stream:
            async for event in stream:
                builder.add(event)
        return builder.build()

    async def abort(self, request_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """End a request that is in flight. False if there is none of this id."""
        request = pb.AbortRequest(request_id=request_id)
        return bool((await self._call(self._stub.Abort, request, timeout_s)).found)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[int, ...]:
        """The token ids that `generate` would see."""
        response = await self._call(self._stub.Tokenize, wire.tokenize_request(prompt), timeout_s)
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """The text of token ids, special tokens left out."""
        response = await self._call(self._stub.Detokenize, wire.detokenize_request(token_ids), timeout_s)
        return str(response.text)

    async def model_info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ModelInfo:
        """Which model is served."""
        return wire.model_info(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    async def server_info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServerInfo:
        """How the server stands."""
        return wire.server_info(await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when the server serves requests. Raises DeadlineError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(UnavailableError, DeadlineError):
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
