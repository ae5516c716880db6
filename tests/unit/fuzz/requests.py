"""Targets that read what users send: manifests, stored resources, and requests at both doors."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import yaml
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from hetero_api.errors import ManifestError
from hetero_api.manifest import find_unserved, parse_manifest
from hetero_api.v1 import inference_pb2 as pb
from hetero_gateway.engine.errors import InvalidRequest, QueueFull
from hetero_gateway.server.errors import InvalidArguments
from hetero_gateway.server.openai.adapters import LoadAdapterBody
from hetero_gateway.server.openai.embeddings import EmbeddingsBody
from hetero_gateway.server.openai.requests import chat_requests, completion_requests
from hetero_gateway.server.openai.schema import ChatBody, CompletionBody, IgnoredFields, parse_body
from hetero_gateway.server.openai.tokens import DetokenizeBody, TokenizeBody
from hetero_gateway.server.reading import RequestReader
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import resource_of
from tests.unit.fuzz.model_files import directory
from tests.unit.fuzz.target import Target, changed_json, changed_message
from tests.unit.server.server_setup import served_model

_BAD_REQUESTS: Final = (InvalidArguments, InvalidRequest, QueueFull)
_SPEC: Final = {
    "model": {"uri": "hf://org/name", "revision": "main", "maxModelLen": 4096, "quantization": "int8"},
    "pools": [
        {"name": "gpu", "type": "GPU", "ranks": 1, "gpu": {"memoryPerRank": "8Gi"}},
        {"name": "cpu", "type": "CPU", "ranks": 2, "ranksPerPod": 2, "sharedMemory": "2Gi",
         "cpu": {"coresPerRank": 4, "memoryPerRank": "8Gi", "numa": {"policy": "BestEffort"}},
         "scheduling": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "x", "operator": "Exists"}]}},
    ],
    "placement": {"mode": "Tensor", "shares": {"kvHeads": [1, 1, 2]}, "workload": {"batch": 8}},
    "engine": {"blockSize": 16, "maxNumSeqs": 8, "maxNumBatchedTokens": 512, "kvCacheDtype": "float16"},
    "gateway": {"maxQueuedRequests": 8, "service": {"type": "ClusterIP"}},
    "recovery": {"maxRestarts": 3},
}  # fmt: skip


def _manifest(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "heteroinference.io/v1alpha1", "kind": "HeteroInference", "metadata": {"name": "g"}, "spec": spec
    }  # fmt: skip


def _specs() -> Iterator[dict[str, Any]]:
    yield {"model": {"uri": "pvc://claim/path"}, "pools": [{"name": "cpu", "type": "CPU", "ranks": 1}]}
    for section in ("placement", "engine", "gateway", "recovery", "model"):
        yield {"model": {"uri": "hf://a/b"}, "pools": _SPEC["pools"], section: _SPEC[section]}


def _read_manifest(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    find_unserved(parse_manifest(text, source="m.yaml").spec)


def _manifests() -> Iterator[bytes]:
    for spec in _specs():
        yield json.dumps(_manifest(spec)).encode()
        yield yaml.safe_dump(_manifest(spec)).encode()


def _read_resource(data: bytes) -> None:
    """What the operator makes of a spec that an API server without the CRD's rules has stored."""
    try:
        spec = json.loads(data)
    except (ValueError, RecursionError):
        return
    world = OperatorWorld(resource_of("x", {"model": {"uri": "hf://a/b"}, "pools": []}))
    world.resource["spec"] = spec
    world.plan()


def _resources() -> Iterator[bytes]:
    for spec in _specs():
        yield json.dumps(spec).encode()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _reader() -> RequestReader:
    return RequestReader(served_model(directory("served")))


def _read_request(data: bytes) -> None:
    """The first byte chooses the method."""

    async def read() -> None:
        kind, rest = _KINDS.get(data[:1], pb.GenerateRequest), data[1:]
        request: Any = await _reader().parse(kind, rest)
        match request:
            case pb.TokenizeRequest():
                await _reader().tokenize(request)
            case pb.DetokenizeRequest():
                await _reader().detokenize(request)
            case pb.GenerateRequest():
                await _reader().read(request)

    _loop().run_until_complete(read())


_KINDS: Final[Mapping[bytes, type[Message]]] = {
    b"g": pb.GenerateRequest, b"t": pb.TokenizeRequest, b"d": pb.DetokenizeRequest, b"a": pb.AbortRequest
}  # fmt: skip


def _changed_request(data: bytes, random_: random.Random) -> bytes:
    return data[:1] + changed_message(_KINDS.get(data[:1], pb.GenerateRequest))(data[1:], random_)


def _requests() -> Iterator[bytes]:
    yield b"t" + pb.TokenizeRequest(text="hello").SerializeToString()
    yield b"d" + pb.DetokenizeRequest(token_ids=[3, 4, 5]).SerializeToString()
    yield b"a" + pb.AbortRequest(request_id="r").SerializeToString()
    for request in _generate_requests():
        yield b"g" + request.SerializeToString()


def _generate_requests() -> Iterator[pb.GenerateRequest]:
    for sampling in (
        pb.SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, stop=["x"], stop_token_ids=[3], logprobs=2),
        pb.SamplingParams(n=2, seed=7, logit_bias={3: 1.5}, min_tokens=1, ignore_eos=True, repetition_penalty=1.1),
        pb.SamplingParams(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        pb.SamplingParams(regex="a+b"),
        pb.SamplingParams(choice=pb.Choice(texts=["a", "b"])),
        pb.SamplingParams(grammar='root ::= "a" | "b"'),
    ):
        yield pb.GenerateRequest(text="hello", sampling=sampling, request_id="r", cache_salt="s")
    messages = [
        pb.ChatMessage(role="system", content="be brief"),
        pb.ChatMessage(role="assistant", tool_calls_json='[{"function": {"name": "f", "arguments": "{}"}}]'),
        pb.ChatMessage(role="tool", content="1", tool_call_id="c"),
    ]
    tools = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    yield pb.GenerateRequest(chat=pb.ChatMessages(messages=messages, tools_json=tools))
    received = [pb.Received(token_ids=[4, 5])]
    yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), received=received)


def _read_body(data: bytes) -> None:
    """The first byte chooses the route."""
    rest, ignored = data[1:], IgnoredFields()

    async def read() -> None:
        requests: Sequence[pb.GenerateRequest] = ()
        match data[:1]:
            case b"c":
                requests = completion_requests(parse_body(CompletionBody, rest, ignored), "id")
            case b"e":
                requests = parse_body(EmbeddingsBody, rest, ignored).requests()
            case b"t":
                await _reader().tokenize(parse_body(TokenizeBody, rest, ignored).request())
            case b"d":
                await _reader().detokenize(parse_body(DetokenizeBody, rest, ignored).request())
            case b"l":
                parse_body(LoadAdapterBody, rest, ignored)
            case _:
                requests = chat_requests(parse_body(ChatBody, rest, ignored), "id")
        for request in requests[:4]:
            await _reader().read(request)

    _loop().run_until_complete(read())


def _bodies() -> Iterator[bytes]:
    common = {"model": "m", "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "seed": -1, "stream": True,
              "logit_bias": {"3": 1}, "stream_options": {"include_usage": True}, "n": 2}  # fmt: skip
    yield b"c" + json.dumps({**common, "prompt": "hello", "logprobs": 1, "echo": True}).encode()
    yield b"c" + json.dumps({"model": "m", "prompt": [[1, 2], [3]], "structured_outputs": {"regex": "a+"}}).encode()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    yield b"m" + json.dumps({**common, "messages": messages, "tools": tools, "tool_choice": "none"}).encode()
    yield b"e" + json.dumps({"model": "m", "input": ["a", "b"], "encoding_format": "base64"}).encode()
    yield b"e" + json.dumps({"input": [[1, 2], [3]], "pooling": "mean", "priority": 1}).encode()
    yield b"t" + json.dumps({"messages": messages[:2], "chat_template_kwargs": {"a": 1}}).encode()
    yield b"t" + json.dumps({"prompt": "hello"}).encode()
    yield b"d" + json.dumps({"tokens": [1, 2, 3]}).encode()
    yield b"l" + json.dumps({"lora_name": "a", "lora_path": "b"}).encode()
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    yield b"m" + json.dumps({"model": "m", "messages": messages[:1], "response_format": schema}).encode()


def _changed_body(data: bytes, random_: Any) -> bytes:
    return data[:1] + changed_json(data[1:], random_)


TARGETS: Final = (
    Target("manifests", _read_manifest, (ManifestError,), _manifests, changed_json),
    Target("resources", _read_resource, (), _resources, changed_json),
    Target("requests", _read_request, (*_BAD_REQUESTS, DecodeError), _requests, _changed_request),
    Target("bodies", _read_body, (*_BAD_REQUESTS, ValidationError), _bodies, _changed_body),
)
