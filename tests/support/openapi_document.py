"""The HTTP door as an OpenAPI document, made of the types that read its bodies."""

from __future__ import annotations

from typing import Any, Final

from pydantic.json_schema import models_json_schema

from hetero_gateway.server.openai.embeddings import EmbeddingsBody
from hetero_gateway.server.openai.schema import Body, ChatBody, CompletionBody
from hetero_gateway.server.openai.tokens import DetokenizeBody, TokenizeBody

BODIES: Final[dict[str, type[Body]]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
READ: Final = ("/v1/models", "/v1/models/{model}", "/version", "/health")
STATUSES: Final = ("200", "400", "404", "429")
"""What a call may be answered with; 429 for what the queue has no room for."""


def openapi_document(model: str) -> dict[str, Any]:
    """Return the document of a door that serves `model`, which is the name that most of its requests should have."""
    schemas, definitions = models_json_schema(
        [(kind, "validation") for kind in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    for kind in BODIES.values():
        named = definitions["$defs"][kind.__name__]["properties"]["model"]
        named |= {"examples": [model], "enum": [model, "another"]}
        named.pop("anyOf", None)
        named.pop("default", None)
    responses = {status: {"description": "an answer"} for status in STATUSES}
    posts = {
        path: {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schemas[kind, "validation"]}},
                },
                "responses": responses,
            }
        }
        for path, kind in BODIES.items()
    }
    gets = {path: {"get": {"parameters": _parameters(path), "responses": responses}} for path in READ}
    return {
        "openapi": "3.1.0",
        "info": {"title": "heteroinference", "version": "1"},
        "paths": posts | gets,
        "components": {"schemas": definitions["$defs"]},
    }


def _parameters(path: str) -> list[dict[str, Any]]:
    names = ["model"] if "{model}" in path else []
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
