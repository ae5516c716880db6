"""The HTTP door of the gateway, as the resource declares it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from hetero_api.spec_types import Form, SpecEnum, SpecModel, spelled

CorsOrigin = Annotated[
    str,
    Form("^([*]|https?://[-A-Za-z0-9.:\\[\\]]+)$", "must be an origin such as https://chat.example.org, or *"),
    StringConstraints(max_length=253),
]
"""Origin of a web page, as browsers send it: without a path."""


class ToolCallFormat(SpecEnum):
    """Formats in which models write calls of tools."""

    AUTO = "Auto"
    NONE = "None"
    GPT_OSS = "GptOss"
    MINIMAX_M2 = "MiniMaxM2"
    GLM = "Glm"
    QWEN3_CODER = "Qwen3Coder"
    DEEPSEEK_V3 = "DeepSeekV3"
    DEEPSEEK_V31 = "DeepSeekV31"
    MISTRAL = "Mistral"
    MISTRAL_LIST = "MistralList"
    HERMES = "Hermes"
    LLAMA3 = "Llama3"


class HttpSpec(SpecModel):
    """The endpoint that speaks the OpenAI API."""

    tool_call_format: Annotated[ToolCallFormat, spelled(ToolCallFormat)] = ToolCallFormat.AUTO
    """How the model writes calls of tools. Auto: as its chat template shows. None: calls are text."""
    strict_fields: bool = False
    """Refuse fields of requests that this version does not know, rather than leave them out and name them in the
    header x-hetero-ignored.
    """
    cors_origins: Annotated[list[CorsOrigin], Field(max_length=64)] = Field(default_factory=list)
    """Origins of web pages that may call the endpoint, e.g. https://chat.example.org; "*": all. Default: none."""
    page: bool = True
    """Serve a page at the endpoint's root: a chat, and a live picture of ranks, placement and healing. With keys its
    files are open, and the picture needs a key of role admin.
    """
