"""Reads the requests of both doors: checks every field, tokenises the prompt, compiles the constraint.

Long requests are read in threads, so that other streams go on meanwhile; short ones are done before a thread would
have begun. A prompt that cannot fit the model is refused by its length in bytes, before it is tokenised.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from hetero_api.manifest import names_of_weights
from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.errors import InvalidRequest, QueueFull
from hetero_gateway.engine.request import GenerationRequest
from hetero_gateway.engine.text.asked_answer import AskedAnswer
from hetero_gateway.engine.text.constraints import ConstraintCompiler
from hetero_gateway.group.adapters.registry import Adapter, AdapterRegistry
from hetero_gateway.server.config import ServedModel
from hetero_gateway.server.errors import InvalidArguments, Violation
from hetero_gateway.server.sampling_params import (
    end_violations,
    num_completions,
    read_constraint,
    resolved_sampling,
    with_defaults,
)
from hetero_gateway.server.validation import check_detokenize, check_generate, check_tokenize, parse

INLINE_BYTES: Final = 4096
"""Reading so much takes a millisecond or two, less than the detour to a thread is worth."""
MESSAGE_COST: Final = 64
"""Bytes of text that take as long to read as one message of a chat."""
MAX_THREADS: Final = 2
"""Long requests that are read at a time; the others wait."""
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
_END_TOKENS: Final = 16
"""Tokens of a prompt that show whether it leaves a thought open."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class RequestReader:
    """Reader of one model's requests. Used by one asyncio loop."""

    def __init__(
        self,
        model: ServedModel,
        adapters: AdapterRegistry | None = None,
        load: Callable[[str], Awaitable[Adapter]] | None = None,
    ) -> None:
        """`adapters` None: there are none. `load` returns one of them, loaded; see `AdminRpcs.loaded_adapter`."""
        config, settings = model.engine_config, model.group_settings
        self._names = frozenset({"", settings.name, *names_of_weights(model.info.model_uri)})
        self._adapters = adapters or AdapterRegistry(settings.spec.engine.adapters, taken=self._names)
        self._load = load
        self._tokenizer = model.tokenizer
        self._vocab_size = config.vocab_size
        self._max_model_len = config.max_model_len
        self._sampling_defaults = model.sampling_defaults
        self._constraints = ConstraintCompiler(
            model.tokenizer, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
        )
        self._pool = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="reading")
        self._held = 0
        """Bytes of the long requests that are read in threads or wait for one."""

    async def parse(self, kind: type[M], data: bytes) -> M:
        """Return the message that `data` encodes. Raises InvalidArguments, and QueueFull when too many bytes wait."""
        return await self.run(lambda: parse(kind, data), cost=len(data))

    async def run(self, work: Callable[[], T], *, cost: int) -> T:
        """Return the result of `work`, which reads about `cost` bytes; many of them in a thread. Raises QueueFull."""
        if cost <= INLINE_BYTES:
            return work()
        if self._held and self._held + cost > MAX_WAITING_BYTES:
            raise QueueFull(f"long prompts of {self._held} bytes wait to be read, {cost} more are too many; try later")
        self._held += cost
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._held -= cost

    async def read(
        self, request: pb.GenerateRequest, *, deadline_s: float | None = None, answer: AskedAnswer | None = None
    ) -> GenerationRequest:
        """Return the engine's request; `deadline_s` is a time of the engine's clock, `answer` what a chat asks for.

        Raises InvalidArguments or InvalidRequest for a bad field, and QueueFull when too many bytes wait to be read.
        """
        adapter = self._adapter_of(request.model)
        prompt = await self.run(lambda: self._checked(request), cost=_cost(request, request.chat))
        params = with_defaults(request.sampling, self._sampling_defaults)
        number, named = num_completions(params), read_constraint(params)
        constraint = named
        if answer is not None:
            end = self.prompt_end(prompt)
            # Schemas of many tools are long.
            constraint = await self.run(
                lambda: answer.constraint(named, prompt_end=end), cost=_cost(request, request.chat)
            )
        if constraint is not None and named is None:
            for violation in end_violations(params, "tool_choice"):
                raise InvalidRequest(violation.field, violation.problem)
        compiled = None if constraint is None else await self._constraints.compile(constraint)
        if adapter is not None and self._load is not None:
            adapter = await self._load(adapter.name)
        return GenerationRequest(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=resolved_sampling(params),
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            stop=tuple(params.stop),
            stop_token_ids=frozenset(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            constraint=compiled,
            cache_salt=request.cache_salt if adapter is None else f"{adapter.salt}{request.cache_salt}",
            adapter=0 if adapter is None else adapter.number,
            deadline_s=deadline_s,
            n=number,
            priority=request.priority,
            received=_received(request, number),
            shown_token_ids=frozenset() if answer is None else answer.shown_token_ids,
        )

    def _adapter_of(self, name: str) -> Adapter | None:
        """Return the adapter of this name, loaded or not; None for the model's own. Raises InvalidArguments."""
        if name in self._names:
            return None
        adapter = self._adapters.find(name)
        if adapter is None:
            known = ", ".join(repr(each.name) for each in self._adapters) or "none"
            raise InvalidArguments([Violation("model", f"{name!r:.80} is not served here; adapters known: {known}")])
        return adapter

    def prompt_end(self, prompt: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, special ones as they are written."""
        return self._tokenizer.written(prompt[-_END_TOKENS:])

    async def tokenize(self, request: pb.TokenizeRequest) -> Sequence[int]:
        """Return the token ids that Generate would see. Raises as `read` does, but for a prompt's length."""
        return await self.run(lambda: self._tokenized(request), cost=_cost(request, request.chat))

    async def detokenize(self, request: pb.DetokenizeRequest) -> str:
        """Return the text of the tokens, special ones left out. Raises InvalidArguments."""
        return await self.run(lambda: self._detokenized(request), cost=len(request.token_ids))

    def _checked(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        """Check every field, and return the prompt's tokens."""
        check_generate(request, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        return tuple(self._prompt(request))

    def _prompt(self, request: pb.GenerateRequest) -> Sequence[int]:
        match request.WhichOneof("prompt"):
            case "chat":
                return self._encode_chat(request.chat, max_model_len=self._max_model_len)
            case "text":
                return self._tokenizer.encode(request.text, max_model_len=self._max_model_len)
            case _:
                return request.token_ids.ids

    def _tokenized(self, request: pb.TokenizeRequest) -> Sequence[int]:
        check_tokenize(request)
        if request.WhichOneof("input") == "chat":
            return self._encode_chat(request.chat)
        return self._tokenizer.encode(request.text)

    def _detokenized(self, request: pb.DetokenizeRequest) -> str:
        check_detokenize(request, vocab_size=self._vocab_size)
        return self._tokenizer.decode(list(request.token_ids))

    def _encode_chat(self, chat: pb.ChatMessages, *, max_model_len: int | None = None) -> Sequence[int]:
        tools: list[dict[str, Any]] | None = json.loads(chat.tools_json) if chat.tools_json else None
        options = json.loads(chat.template_options_json) if chat.template_options_json else None
        messages = [template_message(message) for message in chat.messages]
        return self._tokenizer.encode_chat(messages, tools=tools, options=options, max_model_len=max_model_len)


def _cost(request: pb.GenerateRequest | pb.TokenizeRequest, chat: pb.ChatMessages) -> int:
    """Return how long a request takes to read, as bytes of plain text."""
    return request.ByteSize() + MESSAGE_COST * len(chat.messages)


def template_message(message: pb.ChatMessage) -> dict[str, Any]:
    """Return a message as templates of transformers know it: without the fields that are not set."""
    template_message: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls_json:
        template_message["tool_calls"] = json.loads(message.tool_calls_json)
    # Templates name it either way; GPT-OSS's takes no text beside the reasoning of a call.
    thinking = "" if message.tool_calls_json and message.content else message.reasoning
    fields = {
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
        "thinking": thinking,
    }
    for name, value in fields.items():
        if value:
            template_message[name] = value
    return template_message


def _received(request: pb.GenerateRequest, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the received tokens of each of `number` completions; nothing if the field is absent.

    A stream that is taken up may have brought no token yet, so an empty list is not an absent one.
    """
    if not request.received:
        return ()
    missing = number - len(request.received)
    return (*(tuple(received.token_ids) for received in request.received), *[()] * missing)
