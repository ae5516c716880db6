"""Text and chats to token ids, without holding up the loop that serves everyone else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.tokenizer import TextTokenizer

INLINE_CHARS: Final = 4096
"""Up to here tokenising takes a millisecond or two, less than a thread's detour is worth; beyond, a thread does it."""

_T = TypeVar("_T")


async def encode_text(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids with the model's special tokens."""
    return await _run(lambda: tokenizer.encode(text), num_chars=len(text))


async def encode_chat(tokenizer: TextTokenizer, chat: pb.ChatMessages) -> list[int]:
    """Token ids with the assistant's turn opened. Raises InvalidRequest when the template refuses the messages."""
    num_chars = len(chat.tools_json) + sum(len(each.content) + len(each.tool_calls_json) for each in chat.messages)
    tools: list[dict[str, Any]] | None = json.loads(chat.tools_json) if chat.tools_json else None
    messages = [_template_message(message) for message in chat.messages]
    return await _run(lambda: tokenizer.encode_chat(messages, tools=tools), num_chars=num_chars)


def _template_message(message: pb.ChatMessage) -> dict[str, Any]:
    """As templates of transformers know it: without what is not said."""
    template_message: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls_json:
        template_message["tool_calls"] = [_template_call(call) for call in json.loads(message.tool_calls_json)]
    for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
        if value:
            template_message[name] = value
    return template_message


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """The OpenAI API has a call's arguments as JSON text; templates expect what the text says."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (json.JSONDecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


async def decode(tokenizer: TextTokenizer, token_ids: list[int]) -> str:
    """Text without special tokens."""
    return await _run(lambda: tokenizer.decode(token_ids), num_chars=len(token_ids))


async def _run(work: Callable[[], _T], *, num_chars: int) -> _T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
