"""Embeddings: POST /v1/embeddings, and their making for all doors.

An embedding is made of the model's hidden states behind its last norm. It is a request whose one completion has one
token, which nobody reads: scheduling, limits and healing are those of every request.
"""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import model_validator
from starlette.responses import Response

from hetero_api.v1 import inference_pb2 as pb
from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.errors import EngineUnavailable, QueueFull
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.stream import RequestStream
from hetero_gateway.server.access.intake import Intake
from hetero_gateway.server.errors import InvalidArguments, LimitExceeded, Violation
from hetero_gateway.server.openai.answers import Json, answer_of
from hetero_gateway.server.openai.requests import set_prompt
from hetero_gateway.server.openai.schema import Listed, prompts_of
from hetero_gateway.server.openai.tokens import TokensBody
from hetero_gateway.server.reading import RequestReader

AT_ONCE: Final = 64
"""Embeddings of one call that are in the engine at a time, or as many completions as its key may have."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding of unit length, and the number of tokens that it was made of."""

    values: list[float]
    num_tokens: int


class Embedder:
    """Maker of embeddings for the calls of all doors. One asyncio loop."""

    def __init__(self, intake: Intake, reader: RequestReader) -> None:
        self._intake = intake
        self._reader = reader

    async def embed(
        self, requests: Sequence[pb.GenerateRequest], pooling: ranks_pb2.Pooling.ValueType
    ) -> list[Embedding]:
        """Return an embedding of each request's prompt.

        All prompts count as one against the limits. Raises what `RequestReader.read`, `Intake.charge` and, where none
        of the call is in flight, `Intake.submit` raise, or the error that ends a request; then no other request of the
        call is left in flight.
        """
        left = 0
        for request in requests:
            request.sampling.CopyFrom(pb.SamplingParams(temperature=0, max_tokens=1))
            asked = await self._reader.read(request)
            request.token_ids.CopyFrom(pb.TokenIds(ids=asked.prompt_token_ids))  # instead of text
            left += len(asked.prompt_token_ids)
            await asyncio.sleep(0)
        meter = self._intake.charge(left)
        room = asyncio.Semaphore(min(AT_ONCE, meter.limits.concurrent_completions or AT_ONCE))
        running: set[RequestStream] = set()
        ended = asyncio.Event()

        async def begun(asked: GenerationRequest) -> RequestStream:
            while True:
                try:
                    return self._intake.submit(asked, is_charged=True)
                except (LimitExceeded, QueueFull):
                    if not running:
                        raise
                    ended.clear()
                    await ended.wait()  # for one of this call: its place is ours

        async def embed_one(request: pb.GenerateRequest) -> Embedding:
            nonlocal left
            async with room:
                asked = await self._reader.read(request)
                asked.sampling.pooling = pooling
                running.add(stream := await begun(asked))
                left -= stream.num_prompt_tokens
                try:
                    return await _embedding_of(stream)
                finally:
                    stream.cancel()
                    running.discard(stream)
                    ended.set()

        tasks = [asyncio.create_task(embed_one(each)) for each in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            meter.end(completions=0, more_tokens=-left)


async def _embedding_of(stream: RequestStream) -> Embedding:
    async for _ in stream:
        pass
    if stream.embedding is None:
        raise EngineUnavailable("the request was aborted before its embedding was there")
    return Embedding(_of_unit_length(stream.embedding), stream.num_prompt_tokens)


def _of_unit_length(values: list[float]) -> list[float]:
    """Return the values divided by their Euclidean norm; zeros stay zeros."""
    norm = math.hypot(*values)
    return [value / norm for value in values] if norm else values


MAX_INPUTS: Final = 2048
"""Inputs of one call, as the API has it."""
_POOLING: Final = {"last": ranks_pb2.POOLING_LAST, "mean": ranks_pb2.POOLING_MEAN}


class EmbeddingsBody(TokensBody):
    """POST /v1/embeddings. `pooling` is our own field: the hidden states that make the embedding."""

    input: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] = "last"
    cache_salt: str = ""
    priority: int = 0

    @model_validator(mode="after")
    def _fits(self) -> EmbeddingsBody:
        inputs = prompts_of(self.input)
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise ValueError(f"input must hold between 1 and {MAX_INPUTS} texts, not {len(inputs)}")
        if not all(inputs):
            raise ValueError("input holds a text without a character, or a list without a token")
        if self.dimensions is not None:
            raise ValueError("dimensions cannot be chosen: vectors of this model mean nothing when they are cut")
        return self

    def requests(self) -> list[pb.GenerateRequest]:
        """Return a request for each input. Raises InvalidArguments for a token id or a priority that cannot be."""
        requests = []
        for prompt in prompts_of(self.input):
            try:
                request = pb.GenerateRequest(cache_salt=self.cache_salt, priority=self.priority)
            except ValueError as error:
                raise InvalidArguments([Violation("priority", str(error))]) from error
            set_prompt(request, prompt, field="input")
            requests.append(request)
        return requests


async def embeddings(body: EmbeddingsBody, *, embedder: Embedder, model: str) -> Response:
    """Return the answer to a call. Raises as `Embedder.embed` does."""
    made = await embedder.embed(body.requests(), _POOLING[body.pooling])
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(each.num_tokens for each in made))

    def answer() -> Json:
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(each.values, body.encoding_format)}
            for index, each in enumerate(made)
        ]
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return await answer_of(answer, num_numbers=sum(len(each.values) for each in made))


def _encoded(values: list[float], encoding: str) -> list[float] | str:
    """Return the numbers as the client wants them: a list, or float32 bytes, little-endian, in base64."""
    if encoding == "float":
        return values
    return base64.b64encode(array("f", values).tobytes()).decode("ascii")
