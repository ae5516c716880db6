"""Bodies of the calls that load and unload adapters, as vLLM has them."""

from __future__ import annotations

from hetero_gateway.server.openai.schema import Body


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class LoadAdapterBody(UnloadAdapterBody):
    """POST /v1/load_lora_adapter."""

    lora_path: str
