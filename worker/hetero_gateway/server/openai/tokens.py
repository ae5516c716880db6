"""Calls that turn text and chats to tokens and back, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.server.errors import InvalidArguments, Violation
from hetero_gateway.server.openai.requests import chat_messages
from hetero_gateway.server.openai.schema import Body, Listed, Message, Tool


class TokensBody(Body):
    """Fields of both calls."""

    model: str | None = None


class TokenizeBody(TokensBody):
    """POST /tokenize: text, or a chat."""

    prompt: str | None = None
    messages: Listed[Message] | None = None
    tools: Listed[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages is needed")
        return self

    def request(self) -> pb.TokenizeRequest:
        """Return the request that says the same."""
        if self.messages is not None:
            return pb.TokenizeRequest(chat=chat_messages(self.messages, self.tools, self.chat_template_kwargs))
        return pb.TokenizeRequest(text=self.prompt or "")


class DetokenizeBody(TokensBody):
    """POST /detokenize."""

    tokens: Listed[int]

    def request(self) -> pb.DetokenizeRequest:
        """Return the request that says the same. Raises InvalidArguments for an id that no model has."""
        try:
            return pb.DetokenizeRequest(token_ids=self.tokens)
        except ValueError as error:
            raise InvalidArguments([Violation("tokens", str(error))]) from error
