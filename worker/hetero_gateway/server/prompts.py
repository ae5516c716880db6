"""Text and chats to token ids, without holding up the loop that serves everyone else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

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
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    num_chars = sum(len(message["content"]) for message in messages)
    return await _run(lambda: tokenizer.encode_chat(messages), num_chars=num_chars)


async def decode(tokenizer: TextTokenizer, token_ids: list[int]) -> str:
    """Text without special tokens."""
    return await _run(lambda: tokenizer.decode(token_ids), num_chars=len(token_ids))


async def _run(work: Callable[[], _T], *, num_chars: int) -> _T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
