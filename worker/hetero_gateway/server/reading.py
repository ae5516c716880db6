"""Requests as clients word them, read into requests of the engine; whichever door they came through."""

from __future__ import annotations

import uuid
from dataclasses import replace

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.constraints import ConstraintCompiler
from hetero_gateway.engine.request import GenerationRequest, SamplingConfig
from hetero_gateway.engine.tokenizer import TextTokenizer
from hetero_gateway.server.prompts import encode_chat, encode_text
from hetero_gateway.server.sampling_params import num_completions, sampling_config
from hetero_gateway.server.validation import check_generate


class RequestReader:
    """Checks every field, tokenises the prompt, compiles the constraint."""

    def __init__(self, tokenizer: TextTokenizer, *, constraints: ConstraintCompiler, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._vocab_size = vocab_size

    async def read(self, request: pb.GenerateRequest, *, deadline_s: float | None = None) -> GenerationRequest:
        """`deadline_s` is a time of the engine's clock. Raises InvalidArguments or InvalidRequest."""
        check_generate(request, vocab_size=self._vocab_size)
        num = num_completions(request.sampling)
        return GenerationRequest(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=tuple(await self._prompt(request)),
            sampling=await self._compiled(sampling_config(request.sampling)),
            cache_salt=request.cache_salt,
            deadline_s=deadline_s,
            n=num,
            priority=request.priority,
            received=_received(request, num),
        )

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "chat":
                return await encode_chat(self._tokenizer, request.chat)
            case "text":
                return await encode_text(self._tokenizer, request.text)
            case _:
                return list(request.token_ids.ids)

    async def _compiled(self, sampling: SamplingConfig) -> SamplingConfig:
        if sampling.constraint is None:
            return sampling
        return replace(sampling, constraint=await self._constraints.compile(sampling.constraint))


def _received(request: pb.GenerateRequest, num_completions: int) -> tuple[tuple[int, ...], ...]:
    """One a completion if the field is there at all, else none: a stream that is taken up may have brought nothing."""
    if not request.received:
        return ()
    missing = num_completions - len(request.received)
    return (*(tuple(received.token_ids) for received in request.received), *[()] * missing)
