"""vllm.grpc.engine.VllmEngine, the service that a router calls.

The router has the tokenizer: prompts come as token ids, and answers go out as such. Stop strings are looked for here
all the same, in the engine's own text. A form that an answer is bound to begins where the model's thought ends, if the
prompt has begun one, unless the request says that it begins at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hetero_api.contract import VERSION
from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.request import FinishReason, GenerationRequest
from hetero_gateway.engine.text.answer_formats import AnswerFormat
from hetero_gateway.engine.text.asked_answer import AskedAnswer
from hetero_gateway.server.calls import Account, Context, RpcStatus, abort, answering, when_over
from hetero_gateway.server.config import ServedModel
from hetero_gateway.server.inference import deadline_of, merged
from hetero_gateway.server.openai.embeddings import Embedder
from hetero_gateway.server.router.artifacts import model_type, tokenizer_chunks
from hetero_gateway.server.router.cache_events import CacheEvents
from hetero_gateway.server.router.messages import Answers, generate_request, prompt_request
from hetero_gateway.server.router.parts import RouterParts

_SERVICE: Final = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
SERVER_TYPE: Final = "vllm-grpc"
"""Type by which the protocol knows its servers."""
_BEHIND_THOUGHT: Final = "after_reasoning"


class VllmEngineServicer:
    """The service's methods, under its names. Made on the loop that runs it, before the engine serves."""

    def __init__(self, parts: RouterParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._started_s = clock()
        self._last_received_s = 0.0
        self._embedder = Embedder(parts.intake, parts.reader)
        self._cache_events = CacheEvents(parts.core.cache_log)
        tokenizer = parts.model.tokenizer
        self._special_ids = tokenizer.special_ids
        self._answers = AnswerFormat.find(tokenizer.chat_template, special_id=tokenizer.special_id)
        self._tokenizer_chunks: list[common.GetTokenizerChunk] = []

    # --- requests ---------------------------------------------------------------------------------------

    async def Generate(self, data: bytes, context: Context) -> AsyncIterator[vllm.GenerateResponse]:  # noqa: N802
        """Stream completions of one prompt."""
        account = Account(self._parts.in_flight, self._parts.metrics.requests, outcome=grpc.StatusCode.CANCELLED.name)
        when_over(context, account.close)
        async with answering(context, "Generate", account):
            arrived_s = self._clock()
            self._last_received_s = time.time()
            request = await self._parts.reader.parse(vllm.GenerateRequest, data)
            asked = await self._read(request, deadline_s=deadline_of(context, now=arrived_s))
            stream = self._parts.intake.submit(asked)
            when_over(context, stream.cancel)
            answers = Answers(asked, streams=request.stream)
            async for event in stream if request.stream else merged(stream):
                if isinstance(event, pb.Finished):
                    account.outcome = FinishReason(event.reason).name
                answer = answers.take(event)
                if answer is not None:
                    yield answer

    async def _read(self, request: vllm.GenerateRequest, *, deadline_s: float | None) -> GenerationRequest:
        """Return the engine's request. Raises InvalidArguments, InvalidRequest or QueueFull."""
        ours = await self._parts.reader.run(
            lambda: generate_request(request, self._special_ids), cost=request.ByteSize()
        )
        answer = None if request.sampling_params.grammar_from_first_token else AskedAnswer(self._answers)
        return await self._parts.reader.read(ours, deadline_s=deadline_s, answer=answer)

    async def Embed(self, data: bytes, context: Context) -> vllm.EmbedResponse:  # noqa: N802
        """Return the embedding of one prompt, made of its last token's hidden states."""
        async with answering(context, "Embed"):
            request = await self._parts.reader.parse(vllm.EmbedRequest, data)
            ours = prompt_request(request.request_id, request.tokenized)
            (made,) = await self._embedder.embed([ours], ranks_pb2.POOLING_LAST)
            return vllm.EmbedResponse(
                embedding=made.values, prompt_tokens=made.num_tokens, embedding_dim=len(made.values)
            )

    async def Abort(self, data: bytes, context: Context) -> vllm.AbortResponse:  # noqa: N802
        """End requests that are in flight; those that are not have ended."""
        async with answering(context, "Abort"):
            for request_id in (await self._parts.reader.parse(vllm.AbortRequest, data)).request_ids:
                self._parts.intake.abort(request_id)
            return vllm.AbortResponse()

    # --- what the engine is -----------------------------------------------------------------------------

    async def HealthCheck(self, data: bytes, context: Context) -> vllm.HealthCheckResponse:  # noqa: N802, ARG002
        """Return whether requests are served now."""
        is_serving = self._parts.core.is_serving
        return vllm.HealthCheckResponse(healthy=is_serving, message="serving" if is_serving else "not serving")

    async def GetModelInfo(self, data: bytes, context: Context) -> vllm.GetModelInfoResponse:  # noqa: N802, ARG002
        """Return the model's names and bounds."""
        info, name = self._parts.model.info, self._parts.model.group_settings.name
        defaults = MessageToDict(self._parts.model.sampling_defaults, preserving_proto_field_name=True)
        return vllm.GetModelInfoResponse(
            model_path=name,
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            served_model_name=name,
            tokenizer_path=name,
            model_type=model_type(self._parts.model.directory),
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            max_req_input_len=info.max_model_len - 1,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(self, data: bytes, context: Context) -> vllm.GetServerInfoResponse:  # noqa: N802, ARG002
        """Return the server's state and its bounds."""
        stats = self._parts.core.stats()
        has_thought = self._answers.thought is not None
        return vllm.GetServerInfoResponse(
            active_requests=stats.running_requests + stats.waiting_requests,
            is_paused=not self._parts.core.is_serving,
            last_receive_timestamp=self._last_received_s,
            uptime_seconds=self._clock() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=self._parts.core.block_size,
            model_dtype=self._parts.model.info.dtype,
            max_num_seqs=self._parts.model.engine_config.max_num_seqs,
            constrained_decoding_start=_BEHIND_THOUGHT if has_thought else "first_token",
        )

    async def GetLoads(self, data: bytes, context: Context) -> vllm.GetLoadsResponse:  # noqa: N802, ARG002
        """Return what the engine has to do."""
        stats, size = self._parts.core.stats(), self._parts.core.block_size
        prompt_tokens = stats.prompt_tokens + stats.cached_tokens
        usage = stats.used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        load = vllm.SchedulerLoad(
            num_running_reqs=stats.running_requests,
            num_waiting_reqs=stats.waiting_requests,
            num_total_reqs=stats.running_requests + stats.waiting_requests,
            num_used_tokens=stats.used_blocks * size,
            max_total_num_tokens=stats.num_blocks * size,
            token_usage=usage,
            gen_throughput=self._parts.core.tokens_per_second,
            cache_hit_rate=stats.cached_tokens / prompt_tokens if prompt_tokens else 0.0,
            utilization=usage,
            max_running_requests=self._parts.model.engine_config.max_num_seqs,
        )
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=VERSION, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, data: bytes, context: Context) -> AsyncIterator[common.GetTokenizerChunk]:  # noqa: N802, ARG002
        """Stream the archive of the tokenizer's files."""
        async with answering(context, "GetTokenizer"):
            if not self._tokenizer_chunks:
                made = await self._parts.reader.run(lambda: _archive(self._parts.model), cost=_ARCHIVE_COST)
                self._tokenizer_chunks = made
            for chunk in self._tokenizer_chunks:
                yield chunk

    # --- its cache --------------------------------------------------------------------------------------

    async def SubscribeKvEvents(self, data: bytes, context: Context) -> AsyncIterator[common.KvEventBatch]:  # noqa: N802
        """Stream what the prefix cache holds and how it changes."""
        async with answering(context, "SubscribeKvEvents"):
            request = await self._parts.reader.parse(common.SubscribeKvEventsRequest, data)
            async for batch in self._cache_events.stream(request.start_sequence_number):
                yield batch

    async def FlushCache(self, data: bytes, context: Context) -> common.FlushCacheResponse:  # noqa: N802, ARG002
        """Empty the prefix cache; requests in flight go on."""
        self._parts.core.forget_prefixes()
        return common.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def StartProfile(self, data: bytes, context: Context) -> NoReturn:  # noqa: N802, ARG002
        """Refuse: profiles of a number of steps are hetero.v1.Admin.Profile's."""
        await abort(context, _NO_PROFILES)

    async def StopProfile(self, data: bytes, context: Context) -> NoReturn:  # noqa: N802, ARG002
        """Refuse as StartProfile."""
        await abort(context, _NO_PROFILES)


_NO_PROFILES: Final = RpcStatus(
    grpc.StatusCode.UNIMPLEMENTED, "profiles are taken by hetero.v1.Admin.Profile, or `hetero profile`"
)
_ARCHIVE_COST: Final = 1 << 20
"""Bytes of text that take about as long to read as the archive takes to make."""


def _archive(model: ServedModel) -> list[common.GetTokenizerChunk]:
    return tokenizer_chunks(model.directory, model.tokenizer)


def serve_vllm_engine(server: grpc.aio.Server, servicer: VllmEngineServicer) -> None:
    """Have `server` answer the service."""
    handlers = {method.name: _handler(servicer, method) for method in _SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))


def _handler(servicer: VllmEngineServicer, method: Any) -> Any:
    """Return gRPC's handler of a method. Requests come as bytes, which the reader parses within bounds."""
    answer_kind: type[Message] = GetMessageClass(method.output_type)
    make: Any = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return make(getattr(servicer, method.name), response_serializer=answer_kind.SerializeToString)
