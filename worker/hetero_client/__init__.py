"""The client side: a typed Python client, the `hetero` command, the local launcher and the model store.

    from hetero_client import HeteroClient, SamplingParams

    with HeteroClient("127.0.0.1:50051") as client:
        for event in client.generate("The capital of France is", sampling=SamplingParams(max_tokens=16)):
            ...

Names are resolved on first use, so that `hetero --help` imports neither grpc nor protobuf. The gateway and
the worker are started as processes; nothing here imports them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hetero_client.access import Access
    from hetero_client.admin import AdminClient, GroupTopology, RankView
    from hetero_client.aio import AsyncGenerateStream, AsyncHeteroClient
    from hetero_client.client import GenerateStream, HeteroClient
    from hetero_client.messages import (
        ChatMessage,
        Choice,
        Completion,
        Constraint,
        Delta,
        Event,
        Finished,
        FinishReason,
        GenerateOptions,
        Grammar,
        JsonSchema,
        ModelInfo,
        Prompt,
        PromptLogprobs,
        Regex,
        SamplingParams,
        ServerInfo,
        Started,
        Timings,
        TokenLogprobs,
        Usage,
    )

__all__ = [
    "Access", "AdminClient", "AsyncGenerateStream", "AsyncHeteroClient", "ChatMessage", "Choice", "Completion",
    "Constraint", "Delta", "Event", "FinishReason", "Finished", "GenerateOptions", "GenerateStream", "Grammar",
    "GroupTopology", "HeteroClient", "JsonSchema", "ModelInfo", "Prompt", "PromptLogprobs", "RankView", "Regex",
    "SamplingParams", "ServerInfo", "Started", "Timings", "TokenLogprobs", "Usage",
]  # fmt: skip

_MODULES: Final = {
    "Access": "access",
    "AdminClient": "admin",
    "GroupTopology": "admin",
    "RankView": "admin",
    "AsyncGenerateStream": "aio",
    "AsyncHeteroClient": "aio",
    "GenerateStream": "client",
    "HeteroClient": "client",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'messages')}"), name)
